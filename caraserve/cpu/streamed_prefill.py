"""Streamed prefills: prompts whose adapter is still being downloaded to the host cache.

The lane computes as many layers of such a prompt as have arrived and runs iterations in between. Between two layers a
prompt is its residual stream and nothing else, so it can stop there for as long as the download takes without making
another request wait. When the download fails, or the engine recalls the prompt, the result asks for a retry.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from caraserve.core.batch import Batch, RowResult, StepResult
from caraserve.cpu.adapters import CpuImage
from caraserve.cpu.batch import CpuBatch

Done = Callable[[StepResult | Exception], None]
Compute = Callable[[Batch, CpuBatch, NDArray[np.void]], None]
Collect = Callable[[Batch, CpuBatch, float], StepResult]


@dataclass(slots=True, eq=False)
class _StreamedPrefill:
    batch: Batch
    cpu_batch: CpuBatch
    image: CpuImage
    done: Done
    buffers: NDArray[np.void]
    started_s: float
    layer: int = 0  # the next one to compute
    computed_s: float = 0.0  # time spent in computed layers
    is_recalled: bool = False

    @property
    def slot(self) -> int:
        return self.batch.rows[0].slot

    def computable_layers(self) -> int:
        return self.image.computable_layers(assist=self.batch.rows[0].assist)


class StreamedPrefills:
    """The streamed prefills of one backend. For the lane thread only."""

    def __init__(self, layers: int, buffers: Sequence[NDArray[np.void]], compute: Compute, collect: Collect) -> None:
        """`buffers`: a BUFFERS record for each prefill that may run at a time. `compute` runs the layers that a batch
        names; `collect` makes the result after the last one."""
        self._layers, self._free = layers, list(buffers)
        self._compute, self._collect = compute, collect
        self._running: list[_StreamedPrefill] = []

    def start(self, batch: Batch, cpu_batch: CpuBatch, image: CpuImage, done: Done) -> None:
        """Starts a side batch whose slot and KV blocks have been set."""
        self._running.append(_StreamedPrefill(batch, cpu_batch, image, done, self._free.pop(), time.monotonic()))
        self.advance()

    def recall(self, slot: int) -> None:
        """Ends the prefill of a request slot for a retry, if layers of its adapter are not in the host cache yet."""
        for prefill in self._running:
            prefill.is_recalled |= prefill.slot == slot and prefill.image.in_host < self._layers
        self.advance()

    def advance(self) -> None:
        """Computes the layers that have arrived, and ends prefills whose missing layers will not arrive."""
        for prefill in list(self._running):
            end = prefill.computable_layers()
            is_stopped = prefill.is_recalled or prefill.image.is_aborted
            if end > prefill.layer and not (is_stopped and end < self._layers):
                self._compute_layers(prefill, end)
            elif is_stopped:
                retry = StepResult((RowResult(needs_retry=True),), prefill.started_s, time.monotonic())
                self._end(prefill, retry)

    def close(self) -> None:
        """Ends all prefills with an error."""
        for prefill in list(self._running):
            self._end(prefill, RuntimeError("the device has been closed"))

    def _compute_layers(self, prefill: _StreamedPrefill, end: int) -> None:
        started_s = time.monotonic()
        try:
            prefill.cpu_batch.set_layers(prefill.layer, end)
            self._compute(prefill.batch, prefill.cpu_batch, prefill.buffers)
            prefill.layer = end
            prefill.computed_s += time.monotonic() - started_s
            if end == self._layers:
                self._end(prefill, self._outcome(prefill))
        except Exception as error:  # the engine fails the request and continues
            self._end(prefill, error)

    def _outcome(self, prefill: _StreamedPrefill) -> StepResult:
        """Returns the result; time outside of computed layers counts as waiting for weights."""
        result = self._collect(prefill.batch, prefill.cpu_batch, prefill.started_s)
        (row,), waited_s = result.rows, result.done_s - result.started_s - prefill.computed_s
        row = structs.replace(row, waited_ms=row.waited_ms + 1000 * max(0.0, waited_s))
        return replace(result, rows=(row,))

    def _end(self, prefill: _StreamedPrefill, outcome: StepResult | Exception) -> None:
        self._running.remove(prefill)
        self._free.append(prefill.buffers)
        prefill.done(outcome)
