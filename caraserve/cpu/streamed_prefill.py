"""Prompts whose adapter is not all in the host tier: computed on the lane as far as layers have come, iterations in
between.

Between two layers such a prompt is its residual stream and nothing else, so it can stop there for as long as a network
takes, and nobody waits for it. What never comes, or is no longer waited for, makes it void.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import Batch, RowResult, StepResult
from caraserve.cpu.adapters import CpuImage
from caraserve.cpu.batch import CpuBatch

Done = Callable[[StepResult | Exception], None]
Compute = Callable[[Batch, CpuBatch, NDArray[np.void]], None]
Collect = Callable[[Batch, CpuBatch, float], StepResult]


@dataclass(slots=True, eq=False)
class _StreamedPrefill:
    plan: Batch
    batch: CpuBatch
    image: CpuImage
    done: Done
    buffers: NDArray[np.void]
    started_s: float
    layer: int = 0  # the next to be computed
    computed_s: float = 0.0  # so far
    is_recalled: bool = False

    @property
    def slot(self) -> int:
        return self.plan.rows[0].slot

    def can_compute(self) -> int:
        return self.image.can_compute(assist=self.plan.rows[0].assist)


class StreamedPrefills:
    """The lane thread's alone."""

    def __init__(self, layers: int, buffers: Sequence[NDArray[np.void]], compute: Compute, collect: Collect) -> None:
        """`buffers`: a BUFFERS record for each plan that may be under way. `compute` runs the layers that a batch says;
        `collect` makes the result when all have been."""
        self._layers, self._free = layers, list(buffers)
        self._compute, self._collect = compute, collect
        self._under_way: list[_StreamedPrefill] = []

    def begin(self, plan: Batch, batch: CpuBatch, image: CpuImage, done: Done) -> None:
        """Takes a plan whose slot and blocks are known."""
        self._under_way.append(_StreamedPrefill(plan, batch, image, done, self._free.pop(), time.monotonic()))
        self.go_on()

    def recall(self, slot: int) -> None:
        """The plan of a request slot waits for the host tier no more."""
        for aside in self._under_way:
            aside.is_recalled |= aside.slot == slot and aside.image.in_host < self._layers
        self.go_on()

    def go_on(self) -> None:
        """Computes what has come since, and ends those for which no more comes."""
        for aside in list(self._under_way):
            end = aside.can_compute()
            is_over = aside.is_recalled or aside.image.is_cut
            if end > aside.layer and not (is_over and end < self._layers):
                self._advance(aside, end)
            elif is_over:
                void = StepResult((RowResult(None, needs_retry=True),), aside.started_s, time.monotonic())
                self._end(aside, void)

    def close(self) -> None:
        """Nothing comes any more."""
        for aside in list(self._under_way):
            self._end(aside, RuntimeError("the device has been closed"))

    def _advance(self, aside: _StreamedPrefill, end: int) -> None:
        began_s = time.monotonic()
        try:
            aside.batch.compute(aside.layer, end)
            self._compute(aside.plan, aside.batch, aside.buffers)
            aside.layer = end
            aside.computed_s += time.monotonic() - began_s
            if end == self._layers:
                self._end(aside, self._outcome(aside))
        except Exception as error:  # the loop fails the plan's request and goes on
            self._end(aside, error)

    def _outcome(self, aside: _StreamedPrefill) -> StepResult:
        """All between the layers was waiting."""
        result = self._collect(aside.plan, aside.batch, aside.started_s)
        (row,), waited_s = result.rows, result.done_s - result.started_s - aside.computed_s
        return replace(result, rows=(replace(row, waited_ms=row.waited_ms + 1000 * max(0.0, waited_s)),))

    def _end(self, aside: _StreamedPrefill, outcome: StepResult | Exception) -> None:
        self._under_way.remove(aside)
        self._free.append(aside.buffers)
        aside.done(outcome)
