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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caraserve.cpu.lora_workers.pool import WorkerPool, WorkerState
from caraserve.gpu.driver.api import has_reached, successor
from caraserve.gpu.memory.sync_slots import RegionWords, SyncSlot

log = logging.getLogger(__name__)

CHECK_S = 0.001  # between two checks while a chunk is in flight
_TIMEOUT_FACTOR, _TIMEOUT_MARGIN_S = 5.0, 0.002  # a hand-off may take 5 times its layer's prediction and 2 ms more
DEATH_GRACE_S = 0.003  # for the other workers to redo the part of one that died


class SyncSlotPool:
    """The sync slots of a backend. Their number bounds the assisted chunks in flight."""

    def __init__(self, words: RegionWords, sync_slots: Iterable[SyncSlot]) -> None:
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

    def release(self, sync_slot: SyncSlot, workers: Sequence[WorkerState] = ()) -> None:
        """Returns a sync slot once the device has finished the chunk. `workers`: all of them, if the device did not
        wait for one: a busy one may still write to the slot, so it is free only when that worker is idle or dead."""
        late = _busy(workers)
        if late:
            self._quarantine.append((sync_slot, late))
        else:
            self._free.append(sync_slot)

    def reclaim(self, workers: Sequence[WorkerState]) -> None:
        """Frees slots of aborted chunks to which no worker can write any more."""
        busy = _busy(workers)
        for sync_slot, late in list(self._quarantine):
            late &= busy
            if not late:
                self._quarantine.remove((sync_slot, late))
                self._free.append(sync_slot)


def _busy(workers: Sequence[WorkerState]) -> set[tuple[int, int]]:
    """Returns (worker, incarnation) of the workers that compute something."""
    return {(index, state.incarnation) for index, state in enumerate(workers) if state.is_busy}


def idle_workers(workers: Sequence[WorkerState]) -> list[int]:
    """Returns the indices of the workers that can be asked for a hand-off now."""
    return [index for index, state in enumerate(workers) if state.incarnation and not state.is_busy]


@dataclass(slots=True, eq=False)
class _Watched:
    sync_slot: SyncSlot
    expected_s: dict[int, float]  # of the hand-offs to workers, in the device's order
    until_s: float = 0.0  # deadline of the hand-off in progress
    at: int | None = None  # the hand-off in progress
    alive: frozenset[tuple[int, int]] = frozenset()  # the workers that were alive when it was first seen


class Watchdog:
    """Aborts chunks whose workers died or are too slow, so that no stream waits forever. Thread-safe."""

    def __init__(self, words: RegionWords) -> None:
        self._words = words
        self._watched: list[_Watched] = []
        self._lock = threading.Lock()
        self.needed = threading.Event()  # set when a chunk is watched

    @property
    def is_watching(self) -> bool:
        """True if `check` must be called every `CHECK_S`, and when a worker dies."""
        return bool(self._watched)

    def watch(self, sync_slot: SyncSlot, expected_s: dict[int, float]) -> None:
        """Watches a chunk that is about to be launched. `expected_s`: by hand-off, the predicted time of all
        hand-offs of its layer."""
        with self._lock:
            self._watched.append(_Watched(sync_slot, expected_s))
        self.needed.set()

    def unwatch(self, sync_slot: SyncSlot) -> bool:
        """Ends the watch of a chunk that the device has finished. Returns whether it was aborted."""
        with self._lock:
            self._watched = [watched for watched in self._watched if watched.sync_slot is not sync_slot]
            return self._words.load(sync_slot.status) == sync_slot.generation

    def abort(self, sync_slot: SyncSlot) -> None:
        """Ends all remaining waits of a chunk; nothing more of workers is added to its outputs."""
        self._words.store(sync_slot.status, sync_slot.generation)

    def check(self, now_s: float, workers: Sequence[WorkerState]) -> None:
        """Aborts chunks whose workers have died or take too long. `workers`: all of them."""
        alive = frozenset((index, state.incarnation) for index, state in enumerate(workers) if state.incarnation)
        with self._lock:
            for watched in self._watched:
                if self._is_overdue(watched, now_s, alive):
                    self.abort(watched.sync_slot)

    def _is_overdue(self, watched: _Watched, now_s: float, alive: frozenset[tuple[int, int]]) -> bool:
        waiting = self._waiting(watched)
        if waiting is None:
            return False
        if waiting != watched.at:
            watched.at, watched.alive = waiting, alive
            watched.until_s = now_s + _TIMEOUT_FACTOR * watched.expected_s[waiting] + _TIMEOUT_MARGIN_S
        if not watched.alive <= alive:
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


class WatchdogThread:
    """Lets a watchdog check the workers on a thread while chunks are in flight."""

    def __init__(self, watchdog: Watchdog, workers: WorkerPool) -> None:
        self.watchdog, self._workers = watchdog, workers
        self._closing = self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="caraserve-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; no chunk may be in flight."""
        self._closing = True
        self.watchdog.needed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self.watchdog.needed.wait()
            self.watchdog.needed.clear()
            while self.watchdog.is_watching and not self._closing:
                self._check()
                with self._workers.changed:
                    self._workers.changed.wait(CHECK_S)

    def _check(self) -> None:
        try:
            self.watchdog.check(time.monotonic(), self._workers.states())
        except Exception:  # the thread goes on: without it each layer would wait for its own limit of 10 s
            if not self._has_failed:  # one message, though it looks every millisecond
                log.exception("the watchdog cannot check the workers; it tries again")
            self._has_failed = True
        else:
            self._has_failed = False
