"""Makes plans of running requests and launches them: iterations, and beside them prompts that would stop one.

Where the device has a lane for it (`Limits.assisted_batches`), a prompt that needs CPU workers is a side batch: it
takes as long as they do, and iterations overtake it. Meanwhile its request is in none of them, and keeps all that it
holds. What its plan writes is published when it has ended, for others are not ordered behind it.

A prompt whose adapter another instance is still sending is one too (`Limits.streamed_batches`), and takes as
long as the network does. That may be long: its plan is recalled when its request has ended, or others lack its blocks.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from caraserve.core.backend import Backend
from caraserve.core.batch import Batch, ScheduledRow, StepResult
from caraserve.core.request import Phase, Request
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.merge_policy import MergePolicy
from caraserve.engine.queues import RequestQueues
from caraserve.engine.scheduler import Scheduled, SchedulerOutput, grants, has_work, plan_aside, plan_iteration


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A plan on its way: which request each row belongs to, and where the result will come."""

    rows: tuple[tuple[ActiveRequest, ScheduledRow], ...]
    result: "asyncio.Future[StepResult | Exception]"
    num_tokens: int
    begins_s: float  # expected


class Executor:
    """The only one who launches plans. The event loop's alone."""

    def __init__(
        self, backend: Backend, queues: RequestQueues, merging: MergePolicy | None, wake: Callable[[], None]
    ) -> None:
        """`merging`: says which adapter is merged when. `wake`: called when a plan aside has ended."""
        self._backend, self._limits, self._queues = backend, backend.limits, queues
        self._merging, self._wake = merging, wake
        self._loop = asyncio.get_running_loop()
        self._aside: list[LaunchedBatch] = []  # under way, or not yet taken by `take_ended_aside`

    def launch(self, begins_s: float) -> LaunchedBatch | None:
        """Launches the next iteration, if anybody has work for it, and plans aside. The iteration has the first choice
        of blocks, but they are launched before it: they begin after what is under way, and need not wait for it too."""
        order, served, merged = self._precedence(begins_s)
        by_request = {active.request: active for active in order}
        slots = [active.adapter_slot for active in order]
        recallable = self._recallable()
        growable = self._queues.growable() + recallable
        decision = plan_iteration(list(by_request), slots, self._queues.pool, self._limits, served, growable)
        for request in decision.preempted:
            self._queues.preempt(by_request[request])
        lacking = max(0, decision.lacking - recallable) + self._launch_asides(begins_s)
        self._queues.grow(lacking)
        self._recall(everyone=decision.is_short or self._queues.is_short)
        if not decision.scheduled:
            return None
        return self._launch_iteration(decision, by_request, merged, begins_s)

    async def outcome_of(self, launched: LaunchedBatch) -> StepResult | Exception | None:
        """The result of an iteration; None when a plan aside has ended before it."""
        if self._aside:
            ends = [launched.result, *(plan.result for plan in self._aside)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not launched.result.done():
                return None
        return await launched.result

    def take_ended_aside(self) -> list[LaunchedBatch]:
        """Plans aside that have ended, each once."""
        ended = [launched for launched in self._aside if launched.result.done()]
        for launched in ended:
            self._aside.remove(launched)
        return ended

    def _precedence(self, begins_s: float) -> tuple[list[ActiveRequest], int, int | None]:
        """Requests that may be in an iteration, first served first; how many may be served; the adapter slot that is
        merged for them."""
        running = self._queues.running
        if self._limits.assisted_batches or self._limits.streamed_batches:
            running = [o for o in running if not self._queues.goes_aside(o) and self._queues.is_ready(o, begins_s)]
        if self._merging is None:
            return running, len(running), None
        able = [active for active in running if has_work(active.request, self._limits)]
        choice = self._merging.choose([active.adapter_slot for active in able])
        served = [able[index] for index in choice.serve]
        return [*served, *(active for active in running if active not in served)], len(served), choice.merged

    def _launch_iteration(
        self,
        decision: SchedulerOutput,
        by_request: Mapping[Request, ActiveRequest],
        merged: int | None,
        begins_s: float,
    ) -> LaunchedBatch:
        beside = not self._limits.assisted_batches  # whether CPU workers help within iterations
        entries = [(by_request[entry.request], entry) for entry in decision.scheduled]
        rows = tuple(
            replace(entry.row, assist=True) if beside and active.assist else entry.row for active, entry in entries
        )
        plan = self._plan(decision.scheduled, rows, merged=merged)
        for active, entry in entries:
            self._account(entry)
            self._queues.publish(active)
        return self._launch(plan, [active for active, _ in entries], begins_s)

    def _launch_asides(self, begins_s: float) -> int:
        """Launches what goes aside and has blocks. Returns how many blocks others lack, if there can be so many."""
        if not (self._limits.assisted_batches or self._limits.streamed_batches):
            return 0
        lacking = 0
        for active in list(self._queues.running):
            if active.is_aside or not self._queues.goes_aside(active):
                continue
            entry: Scheduled | int = 0
            if active.can_go_on or active.is_streamed:
                entry = plan_aside(active.request, active.adapter_slot, self._queues.pool, self._limits)
            if isinstance(entry, Scheduled):
                self._launch_aside(active, entry, begins_s)
            elif not active.can_go_on:
                self._queues.set_back(active)  # it would hold what it has for as long as the network takes
            elif lacking + entry <= self._queues.growable():
                lacking += entry
        return lacking

    def _launch_aside(self, active: ActiveRequest, entry: Scheduled, begins_s: float) -> None:
        plan = self._plan((entry,), (replace(entry.row, assist=active.assist),), is_side_batch=True)
        self._account(entry)
        self._queues.begin_aside(active)
        launched = self._launch(plan, [active], begins_s)
        launched.result.add_done_callback(lambda _: self._wake())
        self._aside.append(launched)

    def _recallable(self) -> int:
        """Blocks of those who would wait for a network, or do: nobody else loses any for theirs."""
        waiting = [active for active, _ in self._waiting_for_network()]
        waiting += [active for active in self._queues.running if not (active.is_aside or active.can_go_on)]
        return sum(len(active.request.blocks) for active in waiting)

    def _recall(self, *, everyone: bool) -> None:
        """Plans aside that may wait for the network, of requests that have ended, or of all."""
        for active, row in self._waiting_for_network():
            if everyone or active.request.phase is Phase.FINISHED:
                self._backend.recall(row.slot)

    def _waiting_for_network(self) -> list[tuple[ActiveRequest, ScheduledRow]]:
        return [launched.rows[0] for launched in self._aside if launched.rows[0][0].is_streamed]

    def _plan(
        self,
        scheduled: Sequence[Scheduled],
        rows: tuple[ScheduledRow, ...],
        *,
        merged: int | None = None,
        is_side_batch: bool = False,
    ) -> Batch:
        """Whichever plan is launched first tells the device of all requests that took a slot."""
        starts, reused = self._queues.new_in_slots()
        return Batch(starts, (*reused, *grants(scheduled)), rows, merged, is_side_batch)

    def _account(self, entry: Scheduled) -> None:
        entry.request.blocks += entry.blocks
        entry.request.computed += entry.row.count
        entry.request.launched_outputs += entry.row.samples

    def _launch(self, plan: Batch, active: Sequence[ActiveRequest], begins_s: float) -> LaunchedBatch:
        result: asyncio.Future[StepResult | Exception] = self._loop.create_future()

        def settle(outcome: StepResult | Exception) -> None:
            if not result.done():  # the engine may have been stopped meanwhile
                result.set_result(outcome)

        def done(outcome: StepResult | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(settle, outcome)

        self._backend.launch(plan, done)
        return LaunchedBatch(tuple(zip(active, plan.rows, strict=True)), result, plan.num_tokens, begins_s)


def undo(active: ActiveRequest, row: ScheduledRow) -> None:
    """A plan aside has computed nothing: its row is launched again, without help."""
    active.request.computed -= row.count
    active.request.launched_outputs -= row.samples
    active.assist = False
