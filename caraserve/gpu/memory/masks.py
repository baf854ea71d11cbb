"""Masks of structured output: a lane's memory for them, and how the device waits until they are written.

The mask of a row depends on the token before it, which the host learns while the device is already computing the next
pass. So the waiter's thread, which has just received that token, writes the masks into pinned memory during the pass
and then raises a word. Behind the pass the stream waits for the word, copies the masks and samples the masked rows.
Passes without such rows issue nothing of this, and graphs sample all other rows as ever. Not launching such passes
ahead would be simpler, but all requests of the batch would wait from a result to the next launch.

The wait always ends: the writing is queued before the wait is issued, depends on earlier results only, is bounded by
the grammar's limits, and raises the word even if it fails. One buffer is enough, because the masks of a pass are
written after the result of the pass before it, which has copied its own by then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.batch import ScheduledRow
from caraserve.core.outputs import SAMPLE_MASKED, Output
from caraserve.cpu.masks import masked_rows, write_masks
from caraserve.errors import GrammarFailed
from caraserve.gpu.driver.api import WORD_BYTES, Driver, Stream, successor
from caraserve.gpu.memory.results import Waiter

_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class MaskedOutputs:
    """The outputs of one pass that have masks. `indices`: ascending. `await_masks`: makes a stream wait for the masks
    and copies them to the device. `failures`: of grammars, by request slot; known once the pass has ended."""

    indices: NDArray[np.intp]
    has_scores: bool
    await_masks: Callable[[Stream], None]
    failures: dict[int, GrammarFailed] = field(default_factory=dict)


def mask_bytes(rows: int, words: int) -> int:
    """Returns the bytes of pinned memory for the masks of `rows` rows, and for the word that says they are written."""
    return _LINE_BYTES + WORD_BYTES * rows * words


class LaneMasks:
    """The masks of one lane. Used by the launching thread, except for `_write`."""

    def __init__(
        self, driver: Driver, waiter: Waiter, memory: NDArray[np.uint8], address: int, on_device: Tensor
    ) -> None:
        """`memory`: pinned, [mask_bytes(rows, words)], at device address `address`. `on_device`: int32 [rows,
        words]."""
        self._driver, self._waiter, self._address, self._on_device = driver, waiter, address, on_device
        self._word = memory[:WORD_BYTES].view(np.uint32)
        self._masks = memory[_LINE_BYTES:].view(np.uint32).reshape(tuple(on_device.shape))
        self._turn = 0  # value of the word once the masks of the last pass are written

    def prepare(self, rows: Sequence[ScheduledRow], outputs: Output) -> MaskedOutputs | None:
        """Queues the writing of a pass's masks behind the results of all earlier passes of this lane. Returns None for
        a pass without masked rows. To be called before the pass is issued."""
        masked = masked_rows(rows)
        if not masked:
            return None
        turn = self._turn = successor(self._turn)
        indices = np.flatnonzero(outputs.kind == SAMPLE_MASKED)

        def await_masks(stream: Stream) -> None:
            self._driver.wait_value(stream, self._address, turn)
            num_bytes = len(masked) * self._masks.strides[0]
            self._driver.copy_to_device(self._on_device.data_ptr(), self._address + _LINE_BYTES, num_bytes, stream)

        prepared = MaskedOutputs(indices, bool((outputs.logprobs[indices] >= 0).any()), await_masks)
        self._waiter.after_those(lambda: self._write(masked, turn, prepared.failures))
        return prepared

    def _write(self, rows: Sequence[ScheduledRow], turn: int, failures: dict[int, GrammarFailed]) -> None:
        try:
            failures.update(write_masks(rows, self._masks[: len(rows)]))
        finally:
            self._word[0] = turn
