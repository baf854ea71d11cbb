"""Writes the masks of structured output: `write_masks` for both backends, `MaskThread` for the CPU's."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import ScheduledRow
from caraserve.cpu.thread_team import publish
from caraserve.errors import GrammarFailed

log = logging.getLogger(__name__)

_ALL_TOKENS = ~np.uint32(0)


def masked_rows(rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
    """Returns the rows whose tokens a grammar limits."""
    return [row for row in rows if row.matcher is not None]


def write_masks(rows: Sequence[ScheduledRow], masks: Iterable[NDArray[np.uint32]]) -> dict[int, GrammarFailed]:
    """Writes the mask of each row with a matcher. Returns the failures by request slot; any token may follow there,
    and none is used."""
    failures: dict[int, GrammarFailed] = {}
    for row, mask in zip(rows, masks, strict=True):
        assert row.matcher is not None
        try:
            row.matcher.write_mask(mask)
        except GrammarFailed as failure:
            failures[row.slot] = failure
        except Exception:
            log.exception("a mask cannot be written")
            failures[row.slot] = GrammarFailed("the grammar cannot be followed")
        if row.slot in failures:
            mask[:] = _ALL_TOKENS
    return failures


class MaskThread:
    """Writes masks while the forward pass that will need them is under way."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="caraserve-masks", daemon=True)
        self._thread.start()

    def write(
        self,
        rows: Sequence[ScheduledRow],
        masks: Sequence[NDArray[np.uint32]],
        failures: dict[int, GrammarFailed],
        written: int,
    ) -> None:
        """Begins to write; arguments and results as of `write_masks`. Sets the int64 at address `written` to 1 at the
        end, also if it fails."""

        def call() -> None:
            try:
                failures.update(write_masks(rows, masks))
            finally:
                publish(written, 1)

        self._calls.put(call)

    def close(self) -> None:
        """Ends the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # its matchers may belong to a finished request
