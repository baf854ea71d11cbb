"""Schedules the running requests' next iteration, and executes it with the side batches beside it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from caraserve.core.backend import Limits
from caraserve.core.batch import BASE_ADAPTER_SLOT, StepResult
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.batch_launcher import BatchLauncher, LaunchedBatch
from caraserve.engine.merge_policy import MergePolicy
from caraserve.engine.queues import RequestQueues
from caraserve.engine.scheduler import Scheduled, has_work, plan_iteration
from caraserve.engine.side_batches import SideBatches
from caraserve.engine.slot_allocator import SlotAllocator
from caraserve.engine.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Iteration:
    """The rows of the next iteration. `lacking_blocks`: KV blocks that requests wait for, beyond those in the pool and
    those that a recall releases. `is_short`: whether a request found too few blocks."""

    entries: Sequence[tuple[ActiveRequest, Scheduled]]
    merged: int | None
    lacking_blocks: int
    is_short: bool


class Executor:
    """Schedules and launches iterations, with the side batches beside them. Runs on the event loop."""

    def __init__(
        self,
        limits: Limits,
        queues: RequestQueues,
        slots: SlotAllocator,
        side_batches: SideBatches,
        launcher: BatchLauncher,
        merging: MergePolicy | None,
        speculation: Speculation,
    ) -> None:
        """`merging`: chooses the adapter that is merged into the weights, in the mode `merged`; None in other modes."""
        self._limits, self._queues, self._slots = limits, queues, slots
        self._side_batches, self._launcher, self._merging = side_batches, launcher, merging
        self._speculation = speculation

    def schedule(self, begins_s: float) -> Iteration:
        """Chooses the rows of an iteration that begins at `begins_s`, and preempts requests where blocks run out.
        `execute` must follow, because the granted blocks are already taken from the pool."""
        order, served, merged = self._precedence(begins_s)
        by_request = {active.request: active for active in order}
        adapter_slots = [active.adapter_slot for active in order]
        recallable = self._side_batches.recallable_blocks(self._queues.running)
        growable = self._slots.growable() + recallable
        drafts = self._speculation.drafts(order[:served])
        pool, limits = self._slots.pool, self._limits
        plan = plan_iteration(list(by_request), adapter_slots, pool, limits, served, growable, drafts)
        for request in plan.preempted:
            self._queues.preempt(by_request[request])
        entries = [(by_request[entry.request], entry) for entry in plan.scheduled]
        return Iteration(entries, merged, max(0, plan.lacking - recallable), plan.is_short)

    def _precedence(self, begins_s: float) -> tuple[list[ActiveRequest], int, int | None]:
        """Returns the requests that may be in an iteration, first served first; how many of them may be served; the
        adapter slot that is merged for them."""
        running = self._queues.running
        if self._side_batches.exist:
            running = [
                active
                for active in running
                if not active.needs_side_batch(self._limits) and self._queues.is_ready(active, begins_s)
            ]
        if self._merging is None:
            return running, len(running), None
        able = [active for active in running if has_work(active.request, self._limits)]
        slots = [active.adapter_slot if active.may_be_merged else BASE_ADAPTER_SLOT for active in able]
        choice = self._merging.choose(slots)
        served = [able[index] for index in choice.serve]
        return [*served, *(active for active in running if active not in served)], len(served), choice.merged

    def execute(self, iteration: Iteration) -> LaunchedBatch | None:
        """Launches side batches and the iteration, asks for more KV blocks if some are lacking, and recalls streamed
        prefills whose blocks other requests need. Returns None if the iteration has no rows.

        Side batches are launched first, with the blocks that the iteration leaves: they begin after all iterations
        launched before them, so they would otherwise wait for this one too."""
        lacking = self._side_batches.launch_pending(self._queues.running, self._queues.requeue)
        self._queues.grow_kv(iteration.lacking_blocks + lacking)
        self._side_batches.recall(all_requests=iteration.is_short or self._queues.is_short)
        if not iteration.entries:
            return None
        launched = self._launcher.launch(iteration.entries, merged=iteration.merged)
        for active, _ in iteration.entries:
            self._slots.publish(active)
        return launched

    async def result_of(self, launched: LaunchedBatch) -> StepResult | Exception | None:
        """Waits for the result of an iteration. Returns None as soon as a side batch ends before it."""
        if side_results := self._side_batches.results:
            await asyncio.wait([launched.result, *side_results], return_when=asyncio.FIRST_COMPLETED)
            if not launched.result.done():
                return None
        return await launched.result
