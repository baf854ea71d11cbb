"""Results from the device: a thread that waits for one iteration after another in a blocking driver call, so that
neither the launching thread nor the event loop waits; and the pinned memory that results are copied to."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.core.request import MAX_PROMPT_LOGPROBS
from caraserve.gpu.driver.api import Driver, DriverError, Event, Stream

log = logging.getLogger(__name__)

Ended = Callable[[DriverError | None], None]


@dataclass(frozen=True, slots=True)
class _Awaited:
    event: Event | None  # None: nothing to wait for
    ended: Ended


class Waiter:
    """Calls back when device work has run, in order, on a thread of its own."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self._queue: SimpleQueue[_Awaited | None] = SimpleQueue()
        self._spare: SimpleQueue[Event] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def when_done(self, stream: Stream, ended: Ended) -> None:
        """Calls `ended` when everything issued on a stream so far has run, or with the device's failure. Called by the
        launching thread."""
        event = self._driver.create_event() if self._spare.empty() else self._spare.get()
        self._driver.record(event, stream)
        self._queue.put(_Awaited(event, ended))

    def after_those(self, ended: Callable[[], None]) -> None:
        """Calls `ended` after all earlier callbacks."""
        self._queue.put(_Awaited(None, lambda _: ended()))

    def close(self) -> None:
        """Waits for all callbacks, then ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (awaited := self._queue.get()) is not None:
            failure = None
            if awaited.event is not None:
                try:
                    self._driver.synchronize(awaited.event)
                except DriverError as error:
                    failure = error
                self._spare.put(awaited.event)
            try:
                awaited.ended(failure)
            except Exception:
                log.exception("a result's callback failed")
            del awaited  # otherwise the last batch, with its matchers, would be kept until the next one


def result_bytes(outputs: int, alternatives: int = MAX_PROMPT_LOGPROBS) -> int:
    """Returns the bytes of the results of `outputs` outputs with so many alternatives. Those of one place follow those
    of the place before, for all outputs, so that fewer of them are a beginning of all results."""
    return 4 * outputs * (3 + 2 * alternatives)


def result_views(ints: Any, floats: Any, outputs: int) -> tuple[Any, Any, Any, Any, Any]:
    """Returns tokens, log-probabilities, ranks, and [outputs, MAX_PROMPT_LOGPROBS] alternatives with their
    log-probabilities, as views of one block of memory that is given as int32 and as float32, of numpy or torch."""
    tops, end = (MAX_PROMPT_LOGPROBS, 2, outputs), result_bytes(outputs) // 4
    ids, scores = (part[3 * outputs : end].reshape(tops) for part in (ints, floats))
    own = ints[:outputs], floats[outputs : 2 * outputs], ints[2 * outputs : 3 * outputs]
    return *own, ids[:, 0].T, scores[:, 1].T


@dataclass(slots=True)
class Results:
    """Results in host memory, in the layout of `DeviceBatch.results`: numpy views of one block with `outputs`
    entries. Embeddings follow at byte `result_bytes(outputs)`."""

    block: NDArray[np.uint8]
    outputs: int
    chosen: NDArray[np.int32] = field(init=False)
    logprob: NDArray[np.float32] = field(init=False)
    rank: NDArray[np.int32] = field(init=False)
    top_ids: NDArray[np.int32] = field(init=False)  # [outputs, MAX_PROMPT_LOGPROBS]
    top_logprobs: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        views = result_views(self.block.view(np.int32), self.block.view(np.float32), self.outputs)
        self.chosen, self.logprob, self.rank, self.top_ids, self.top_logprobs = views


class ResultBlocks:
    """Pinned blocks that results are copied into, as many as iterations may be in flight."""

    def __init__(self, blocks: list[tuple[NDArray[np.uint8], int]], outputs: int) -> None:
        """`blocks`: (memory, its device address)."""
        self._free: SimpleQueue[tuple[Results, int]] = SimpleQueue()
        for memory, address in blocks:
            self._free.put((Results(memory, outputs), address))

    def acquire(self) -> tuple[Results, int]:
        """Returns a free block and its device address. Waits while all are in use."""
        return self._free.get()

    def release(self, results: Results, address: int) -> None:
        """Returns a block whose contents have been read."""
        self._free.put((results, address))
