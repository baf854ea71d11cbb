"""The words by which device, CPU workers and a watchdog synchronise an assisted prefill, and how a wait is aborted.

The device runs through all layers of a chunk without the host. So every hand-off of a chunk (a layer's group of modules
that read the same x) has words of its own, and a chunk has a *sync slot* with the words of all its hand-offs
(memory/sync_slots.py):

    status   watchdog              the generation of the chunk that was aborted: the device asks no more workers, and
                                   its waits end
    x_flag   device                the chunk's generation, after x: the watchdog times the workers from here on
    left     device                the same, when it goes on without the workers that it asked, as the layer has arrived
    y_flag   last worker to finish the chunk's generation, after y (a completion counter of cpu/handoff.py): the
                                   watchdog looks at the next hand-off
             device                the same, when workers that the work order names are not asked, for example because
                                   the layer has arrived

All writers of a y_flag write the same value, so a late write changes nothing while the sync slot, its x and its y are
not reused. They are reused only after every worker that may write late was seen idle or dead. That is enough because a
worker is busy from its request to its last write, and the device asks none after the chunk. A wait that finds `status`
set adds nothing, nor do later ones, unless the workers were faster or the weights have arrived; the request then
computes the prompt again without CPU workers.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.gpu.driver.api import has_reached, successor
from caraserve.gpu.memory.sync_slots import SharedWords, SyncSlot

log = logging.getLogger(__name__)

CHECK_S = 0.001  # between two checks while a chunk is in flight
_TIMEOUT_FACTOR, _TIMEOUT_MARGIN_S = 5.0, 0.002  # a hand-off may take 5 times its layer's prediction and 2 ms more
DEATH_GRACE_S = 0.003  # for the other workers to redo the part of one that died


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A CPU worker at one moment. `incarnation`: a number that no earlier process of this worker had; None: no
    process."""

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
        self._words.store(sync_slot.status, sync_slot.generation)
        for flags in sync_slot.flags:
            for word in (flags.x_flag, flags.left, flags.y_flag):
                self._words.store(word, sync_slot.generation)
            self._words.store(flags.spent_ns, 0)
        sync_slot.generation = successor(sync_slot.generation)
        return sync_slot

    def release(self, sync_slot: SyncSlot, workers: Sequence[WorkerStatus] = ()) -> None:
        """Returns a sync slot once the device has finished the chunk. `workers`: all of them, if the device did not
        wait for one: a busy one may still write to the slot, so it is free only when that worker is idle or dead."""
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
    """Returns (worker, incarnation) of the workers that compute something."""
    return {
        (status.worker, status.incarnation)
        for status in workers
        if status.incarnation is not None and not status.is_idle
    }


@dataclass(slots=True, eq=False)
class _Watched:
    sync_slot: SyncSlot
    expected_s: dict[int, float]  # of the hand-offs to workers, in the device's order
    until_s: float = 0.0  # deadline of the hand-off in progress
    at: int | None = None  # the hand-off in progress
    statuses: frozenset[tuple[int, int]] = frozenset()  # alive when it was first seen


class Watchdog:
    """Aborts chunks whose workers died or are too slow, so that no stream waits forever."""

    def __init__(self, words: SharedWords) -> None:
        self._words = words
        self._watched: list[_Watched] = []

    @property
    def is_watching(self) -> bool:
        """True if `check` must be called every `CHECK_S`, and when a worker dies."""
        return bool(self._watched)

    def watch(self, sync_slot: SyncSlot, expected_s: dict[int, float]) -> None:
        """Watches a chunk that is about to be launched. `expected_s`: by hand-off, the predicted time of all
        hand-offs of its layer."""
        self._watched.append(_Watched(sync_slot, expected_s))

    def unwatch(self, sync_slot: SyncSlot) -> bool:
        """Ends the watch of a chunk that the device has finished. Returns whether it was aborted."""
        self._watched = [watched for watched in self._watched if watched.sync_slot is not sync_slot]
        return self._words.load(sync_slot.status) == sync_slot.generation

    def check(self, now_s: float, statuses: Sequence[WorkerStatus]) -> None:
        """Aborts chunks whose workers have died or take too long. `statuses`: all workers."""
        alive = frozenset((status.worker, status.incarnation) for status in statuses if status.incarnation is not None)
        for watched in self._watched:
            if self._is_overdue(watched, now_s, alive):
                self.abort(watched.sync_slot)

    def abort(self, sync_slot: SyncSlot) -> None:
        """Ends all remaining waits of a chunk; nothing more of workers is added to its outputs."""
        self._words.store(sync_slot.status, sync_slot.generation)

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
        """Returns the index of the hand-off whose workers the device waits for, or None."""
        generation = watched.sync_slot.generation
        for index in watched.expected_s:
            flags = watched.sync_slot.flags[index]
            if any(has_reached(self._words.load(word), generation) for word in (flags.y_flag, flags.left)):
                continue
            return index if has_reached(self._words.load(flags.x_flag), generation) else None
        return None


def worker_statuses(workers: WorkerPool) -> list[WorkerStatus]:
    """Returns the status of every worker."""
    return [
        WorkerStatus(index, state.incarnation or None, is_idle=not state.is_busy)
        for index, state in enumerate(workers.states())
    ]


def idle_workers(statuses: Sequence[WorkerStatus]) -> list[int]:
    """Returns the indices of the workers that can be asked for a hand-off now."""
    return [status.worker for status in statuses if status.incarnation is not None and status.is_idle]


class WatchdogThread:
    """Runs a `Watchdog` on a thread while chunks are in flight; `watch` and `unwatch` are called from another
    thread."""

    def __init__(
        self,
        words: SharedWords,
        workers: WorkerPool,
        statuses: Callable[[WorkerPool], Sequence[WorkerStatus]] = worker_statuses,
    ) -> None:
        self._watchdog, self._workers, self._statuses = Watchdog(words), workers, statuses
        self._lock = threading.Lock()
        self._needed = threading.Event()
        self._closing = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="caraserve-watchdog", daemon=True)
        self._thread.start()

    def watch(self, sync_slot: SyncSlot, expected_s: dict[int, float]) -> None:
        """Watches a chunk that is about to be launched; see `Watchdog.watch`."""
        with self._lock:
            self._watchdog.watch(sync_slot, expected_s)
        self._needed.set()

    def abort(self, sync_slot: SyncSlot) -> None:
        """Ends all remaining waits of a chunk; see `Watchdog.abort`."""
        with self._lock:
            self._watchdog.abort(sync_slot)

    def unwatch(self, sync_slot: SyncSlot) -> bool:
        """Ends the watch of a chunk that the device has finished. Returns whether it was aborted."""
        with self._lock:
            return self._watchdog.unwatch(sync_slot)

    def close(self) -> None:
        """Ends the thread; no chunk may be in flight."""
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
                try:
                    self._watchdog.check(time.monotonic(), self._statuses(self._workers))
                except Exception:  # the thread goes on: without it each layer would wait for its own limit of 10 s
                    if not self._has_failed:  # one message, though it looks every millisecond
                        log.exception("the watchdog cannot check the workers; it tries again")
                    self._has_failed = True
                else:
                    self._has_failed = False
            return self._watchdog.is_watching and not self._closing
