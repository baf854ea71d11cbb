"""From the device back to whoever launched: a thread that waits for iterations, one after another, in a blocking call
of the driver's, so that neither the launching thread nor the event loop ever does; and the memory that results come in.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from caraserve.gpu.driver.api import Driver, DriverError, Event, Stream
from caraserve.gpu.forward.batch import Results

log = logging.getLogger(__name__)

Ended = Callable[[DriverError | None], None]


@dataclass(frozen=True, slots=True)
class _Awaited:
    event: Event | None  # None: nothing to wait for
    ended: Ended


class Waiter:
    """Calls back in the order of asking, on its own thread."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self._queue: SimpleQueue[_Awaited | None] = SimpleQueue()
        self._spare: SimpleQueue[Event] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def when_done(self, stream: Stream, ended: Ended) -> None:
        """Calls `ended` when all that was issued on a stream so far has run, or the device has failed. The launching
        thread's."""
        event = self._driver.create_event() if self._spare.empty() else self._spare.get()
        self._driver.record(event, stream)
        self._queue.put(_Awaited(event, ended))

    def after_those(self, ended: Callable[[], None]) -> None:
        """Calls `ended` after all that is waited for already."""
        self._queue.put(_Awaited(None, lambda _: ended()))

    def close(self) -> None:
        """Waits for what was asked, then ends the thread."""
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
                log.exception("a result could not be handed off")


class ResultBlocks:
    """Pinned blocks that results are copied into, as many as iterations may be under way."""

    def __init__(self, blocks: list[tuple[NDArray[np.uint8], int]], outputs: int) -> None:
        """`blocks`: memory and its device address."""
        self._free: SimpleQueue[tuple[Results, int]] = SimpleQueue()
        for memory, address in blocks:
            self._free.put((Results(memory, outputs), address))

    def acquire(self) -> tuple[Results, int]:
        """Waits while all are in use, which more iterations ahead than there are blocks would be needed for."""
        return self._free.get()

    def release(self, results: Results, address: int) -> None:
        """Its contents have been read."""
        self._free.put((results, address))
