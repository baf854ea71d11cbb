"""The words by which device, CPU workers and a watchdog agree on an assisted prefill, and who gives up.

The device runs through all layers of a chunk without the host, so every hand-off of a chunk (a layer's group of
modules that read the same x) has words of its own, in a *book*; a chunk has a book to itself. In host memory, each word
on a line of its own:

    status   watchdog              the generation of the chunk that was given up
    x_flag   device                the chunk's generation, after x
    y_flag   last worker to finish the chunk's generation, after y
             device                the same, when no worker is asked, the layer having arrived for example: the wait
                                   falls through, and the kernels after it look further
             watchdog              the same, after `status`: nothing is to be added

All writers of a y_flag write the same value, so whoever comes late changes nothing, as long as the book, its x and its
y have not been used again; and they are not, until every worker that may be late has been seen idle or dead. For that
to be enough, a worker that finds an x_flag first says that it is busy, and then begins only if `status` is not the
generation. Who adds y looks at `status` after the wait: a chunk that was given up adds nothing from there on, and its
request does it again without help.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.gpu.driver.api import has_reached, successor

_LINE = 64
CHECK_S = 0.001  # between two looks while a chunk is under way
_TIMEOUT_FACTOR, _TIMEOUT_MARGIN_S = (
    5.0,
    0.002,
)  # a hand-off may take so many times what was predicted, and so much more
DEATH_GRACE_S = 0.003  # after a death the others have so long to redo its part


class SharedWords(Protocol):
    """Words of host memory that the device sees, by their offset."""

    def load(self, offset: int) -> int:
        """What was read after is at least as new."""

    def store(self, offset: int, value: int) -> None:
        """What was written before is seen first."""


def sync_slot_bytes(flags: int) -> int:
    """Bytes of a book."""
    return _LINE * (1 + 2 * flags)


@dataclass(frozen=True, slots=True)
class HandOffFlags:
    """The words of one hand-off."""

    x_flag: int
    y_flag: int


@dataclass(slots=True, eq=False)
class SyncSlot:
    """The words of one chunk; offsets. `generation` differs from that of every chunk that anybody still knows of."""

    offset: int
    flags: tuple[HandOffFlags, ...]
    generation: int = 0

    @property
    def status(self) -> int:
        return self.offset

    @classmethod
    def at(cls, offset: int, flags: int, generation: int = 0) -> "SyncSlot":
        """A book whose words begin at `offset` and all have the value `generation`."""
        lines = [offset + _LINE * (1 + 2 * index) for index in range(flags)]
        return cls(offset, tuple(HandOffFlags(line, line + _LINE) for line in lines), generation)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A CPU worker at one moment. `incarnation`: a number of its own for each life; None: nobody is there."""

    worker: int
    incarnation: int | None
    is_idle: bool


class SyncSlotPool:
    """The sync slots of a backend. Their number bounds the assisted chunks in flight."""

    def __init__(self, words: SharedWords, sync_slots: Iterable[SyncSlot]) -> None:
        self._words = words
        self._free = list(sync_slots)
        self._quarantine: list[tuple[SyncSlot, set[tuple[int, int]]]] = []  # with the workers that may write late

    def acquire(self) -> SyncSlot | None:
        """Returns a sync slot for a chunk, or None when all are in use: the chunk then waits."""
        if not self._free:
            return None
        sync_slot = self._free.pop(0)
        # Generations wrap: a word that was not written for 2^31 generations would compare as ahead of the next one.
        for word in (sync_slot.status, *(flag for flags in sync_slot.flags for flag in (flags.x_flag, flags.y_flag))):
            self._words.store(word, sync_slot.generation)
        sync_slot.generation = successor(sync_slot.generation)
        return sync_slot

    def release(self, sync_slot: SyncSlot, workers: Sequence[WorkerStatus] = ()) -> None:
        """Returns a sync slot once the device has finished the chunk. `workers`: all of them, if the chunk was aborted:
        a busy one may still write to the slot, so it is free only when that worker is idle or dead."""
        late = _busy(workers)
        if late:
            self._quarantine.append((sync_slot, late))
        else:
            self._free.append(sync_slot)

    def reclaim(self, workers: Sequence[WorkerStatus]) -> None:
        """Frees slots of aborted chunks to which no worker can write any more."""
        busy = _busy(workers)
        for sync_slot, late in list(self._quarantine):
            late &= busy
            if not late:
                self._quarantine.remove((sync_slot, late))
                self._free.append(sync_slot)


def _busy(workers: Sequence[WorkerStatus]) -> set[tuple[int, int]]:
    """(worker, incarnation) of those that compute something."""
    return {
        (status.worker, status.incarnation)
        for status in workers
        if status.incarnation is not None and not status.is_idle
    }


@dataclass(slots=True, eq=False)
class _Watched:
    sync_slot: SyncSlot
    expected_s: dict[int, float]  # of the hand-offs that workers were to do, in the device's order
    until_s: float = 0.0  # the hand-off under way may take
    at: int | None = None  # the hand-off under way
    statuses: frozenset[tuple[int, int]] = frozenset()  # when it was first seen


class Watchdog:
    """Sees to it that no hand-off is waited for in vain. Any process that has the words can run it."""

    def __init__(self, words: SharedWords) -> None:
        self._words = words
        self._watched: list[_Watched] = []

    @property
    def is_watching(self) -> bool:
        """Whether `check` is to be called every `CHECK_S`, and when a worker dies."""
        return bool(self._watched)

    def watch(self, sync_slot: SyncSlot, expected_s: dict[int, float]) -> None:
        """A chunk is about to be launched. `expected_s`: what each of its entries should take."""
        self._watched.append(_Watched(sync_slot, expected_s))

    def unwatch(self, sync_slot: SyncSlot) -> bool:
        """The device is done with a chunk. Returns whether it was given up."""
        self._watched = [watched for watched in self._watched if watched.sync_slot is not sync_slot]
        return self._words.load(sync_slot.status) == sync_slot.generation

    def check(self, now_s: float, statuses: Sequence[WorkerStatus]) -> None:
        """Gives up chunks whose workers have died or take too long."""
        alive = frozenset((status.worker, status.incarnation) for status in statuses if status.incarnation is not None)
        for watched in self._watched:
            if self._is_overdue(watched, now_s, alive):
                self.abort(watched.sync_slot)

    def abort(self, sync_slot: SyncSlot) -> None:
        """Lets the device through all that is left of a chunk; nothing is added any more."""
        self._words.store(sync_slot.status, sync_slot.generation)
        for flags in sync_slot.flags:
            self._words.store(flags.y_flag, sync_slot.generation)

    def _is_overdue(self, watched: _Watched, now_s: float, alive: frozenset[tuple[int, int]]) -> bool:
        waiting = self._waiting(watched)
        if waiting is None:
            return False
        if waiting != watched.at:
            watched.at, watched.statuses = waiting, alive
            watched.until_s = now_s + _TIMEOUT_FACTOR * watched.expected_s[waiting] + _TIMEOUT_MARGIN_S
        if not watched.statuses <= alive:
            watched.until_s = min(watched.until_s, now_s + DEATH_GRACE_S)
        return not alive or now_s >= watched.until_s

    def _waiting(self, watched: _Watched) -> int | None:
        """The entry whose x is there and whose y is not."""
        for index in watched.expected_s:
            flags, generation = watched.sync_slot.flags[index], watched.sync_slot.generation
            if has_reached(self._words.load(flags.y_flag), generation):
                continue
            return index if has_reached(self._words.load(flags.x_flag), generation) else None
        return None


def worker_statuses(workers: WorkerPool) -> list[WorkerStatus]:
    """All workers at this moment."""
    return [
        WorkerStatus(index, state.incarnation or None, is_idle=not state.is_busy)
        for index, state in enumerate(workers.states())
    ]


class WatchdogThread:
    """A `Watchdog` with a thread of its own; `watch` and `unwatch` may be called from another."""

    def __init__(
        self,
        words: SharedWords,
        workers: WorkerPool,
        statuses: Callable[[WorkerPool], Sequence[WorkerStatus]] = worker_statuses,
    ) -> None:
        self._watchdog, self._workers, self._statuses = Watchdog(words), workers, statuses
        self._lock = threading.Lock()
        self._needed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="caraserve-watchdog", daemon=True)
        self._thread.start()

    def watch(self, sync_slot: SyncSlot, expected_s: dict[int, float]) -> None:
        """A chunk is about to be launched."""
        with self._lock:
            self._watchdog.watch(sync_slot, expected_s)
        self._needed.set()

    def unwatch(self, sync_slot: SyncSlot) -> bool:
        """The device is done with a chunk. Returns whether it was given up."""
        with self._lock:
            return self._watchdog.unwatch(sync_slot)

    def close(self) -> None:
        """Ends the thread; nothing is under way any more."""
        self._closing = True
        self._needed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._needed.wait()
            self._needed.clear()
            while self._look():
                with self._workers.changed:
                    self._workers.changed.wait(CHECK_S)

    def _look(self) -> bool:
        with self._lock:
            if self._watchdog.is_watching:
                self._watchdog.check(time.monotonic(), self._statuses(self._workers))
            return self._watchdog.is_watching and not self._closing
