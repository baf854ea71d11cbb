"""Launches batches on the backend, and passes their results to the event loop."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from caraserve.core.backend import Backend
from caraserve.core.batch import Batch, ScheduledRow, StepResult
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.scheduler import Scheduled, grants
from caraserve.engine.slot_allocator import SlotAllocator


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch under way: the request of each row, and the future of the result."""

    rows: tuple[tuple[ActiveRequest, ScheduledRow], ...]
    result: "asyncio.Future[StepResult | Exception]"
    num_tokens: int


class BatchLauncher:
    """Builds and launches batches. Runs on the event loop."""

    def __init__(self, backend: Backend, slots: SlotAllocator) -> None:
        self._backend, self._slots = backend, slots
        self._loop = asyncio.get_running_loop()

    def launch(
        self,
        entries: Sequence[tuple[ActiveRequest, Scheduled]],
        *,
        merged: int | None = None,
        is_side_batch: bool = False,
    ) -> LaunchedBatch:
        """Launches a batch of scheduled rows, and counts their tokens as computed. The batch also announces to the
        device all slots and blocks that requests got since the last launch. CPU workers may help the rows of requests
        with `assist`: in side batches only, where the device has assisted ones."""
        starts, reused = self._slots.take_new()
        scheduled = [entry for _, entry in entries]
        may_assist = is_side_batch or not self._backend.limits.assisted_batches
        rows = tuple([_row(active, entry.row, may_assist=may_assist) for active, entry in entries])
        batch = Batch(starts, (*reused, *grants(scheduled)), rows, merged, is_side_batch)
        for active, entry in entries:
            active.schedule(entry.row, entry.blocks)
        result: asyncio.Future[StepResult | Exception] = self._loop.create_future()

        def settle(outcome: StepResult | Exception) -> None:
            if not result.done():  # the engine may have been stopped meanwhile
                result.set_result(outcome)

        def done(outcome: StepResult | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(settle, outcome)

        self._backend.launch(batch, done)
        requests = [active for active, _ in entries]
        return LaunchedBatch(tuple(zip(requests, rows, strict=True)), result, batch.num_tokens)


def _row(active: ActiveRequest, row: ScheduledRow, *, may_assist: bool) -> ScheduledRow:
    """Returns a row with what only its request knows."""
    assist, matcher = may_assist and active.assist, active.matcher if row.samples else None
    return replace(row, assist=assist, matcher=matcher) if assist or matcher is not None else row
