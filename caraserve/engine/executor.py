"""Makes plans of running requests and launches them: iterations, and beside them prompts that would stop one.
Level 3; for `loop.py`.

On a device with a lane for them (`Limits.aside_plans`), a prompt that needs help goes in a plan of its own: it takes as
long as its workers do, and iterations pass it. Meanwhile its request is in none of them, and nothing of it is taken
away. What its plan writes is published when it has ended, for others are not ordered behind it.

A prompt whose adapter another instance is still sending goes aside too (`Limits.streamed_plans`), and takes as long as
the network does. That may be long: its plan is recalled when its request has ended, or others lack its blocks.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from caraserve.core.backend import Backend
from caraserve.core.batch import Plan, Row, StepResult
from caraserve.core.request import Phase, Request
from caraserve.engine.active_request import Open
from caraserve.engine.merge_policy import MergeRule
from caraserve.engine.queues import Line
from caraserve.engine.scheduler import Decision, Scheduled, grants, has_work, plan_aside, plan_iteration


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan on its way: which request each row belongs to, and where the result will come."""

    rows: tuple[tuple[Open, Row], ...]
    result: "asyncio.Future[StepResult | Exception]"
    num_tokens: int
    begins_s: float  # expected


class Launcher:
    """The only one who launches plans. The event loop's alone."""

    def __init__(self, backend: Backend, line: Line, merging: MergeRule | None, wake: Callable[[], None]) -> None:
        """`merging`: says which adapter is merged when. `wake`: called when a plan aside has ended."""
        self._backend, self._limits, self._line = backend, backend.limits, line
        self._merging, self._wake = merging, wake
        self._loop = asyncio.get_running_loop()
        self._aside: list[Launched] = []  # under way, or not yet taken by `take_ended_aside`

    def launch(self, begins_s: float) -> Launched | None:
        """Launches the next iteration, if anybody has work for it, and plans aside. The iteration has the first choice
        of blocks, but they are launched before it: they begin after what is under way, and need not wait for it too."""
        order, served, merged = self._precedence(begins_s)
        by_request = {opened.request: opened for opened in order}
        slots = [opened.adapter_slot for opened in order]
        recallable = self._recallable()
        growable = self._line.growable() + recallable
        decision = plan_iteration(list(by_request), slots, self._line.pool, self._limits, served, growable)
        for request in decision.preempted:
            self._line.preempt(by_request[request])
        lacking = max(0, decision.lacking - recallable) + self._launch_asides(begins_s)
        self._line.grow(lacking)
        self._recall(everyone=decision.is_short or self._line.is_short)
        if not decision.scheduled:
            return None
        return self._launch_iteration(decision, by_request, merged, begins_s)

    async def outcome_of(self, launched: Launched) -> StepResult | Exception | None:
        """The result of an iteration; None when a plan aside has ended before it."""
        if self._aside:
            ends = [launched.result, *(plan.result for plan in self._aside)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not launched.result.done():
                return None
        return await launched.result

    def take_ended_aside(self) -> list[Launched]:
        """Plans aside that have ended, each once."""
        ended = [launched for launched in self._aside if launched.result.done()]
        for launched in ended:
            self._aside.remove(launched)
        return ended

    def _precedence(self, begins_s: float) -> tuple[list[Open], int, int | None]:
        """Requests that may be in an iteration, first served first; how many may be served; the adapter slot that is
        merged for them."""
        running = self._line.running
        if self._limits.aside_plans or self._limits.streamed_plans:
            running = [o for o in running if not self._line.goes_aside(o) and self._line.is_ready(o, begins_s)]
        if self._merging is None:
            return running, len(running), None
        able = [opened for opened in running if has_work(opened.request, self._limits)]
        choice = self._merging.choose([opened.adapter_slot for opened in able])
        served = [able[index] for index in choice.serve]
        return [*served, *(opened for opened in running if opened not in served)], len(served), choice.merged

    def _launch_iteration(
        self, decision: Decision, by_request: Mapping[Request, Open], merged: int | None, begins_s: float
    ) -> Launched:
        beside = not self._limits.aside_plans  # whether CPU workers help within iterations
        entries = [(by_request[entry.request], entry) for entry in decision.scheduled]
        rows = tuple(
            replace(entry.row, assist=True) if beside and opened.assist else entry.row for opened, entry in entries
        )
        plan = self._plan(decision.scheduled, rows, merged=merged)
        for opened, entry in entries:
            self._account(entry)
            self._line.publish(opened)
        return self._launch(plan, [opened for opened, _ in entries], begins_s)

    def _launch_asides(self, begins_s: float) -> int:
        """Launches what goes aside and has blocks. Returns how many blocks others lack, if there can be so many."""
        if not (self._limits.aside_plans or self._limits.streamed_plans):
            return 0
        lacking = 0
        for opened in list(self._line.running):
            if opened.is_aside or not self._line.goes_aside(opened):
                continue
            entry: Scheduled | int = 0
            if opened.can_go_on or opened.is_streamed:
                entry = plan_aside(opened.request, opened.adapter_slot, self._line.pool, self._limits)
            if isinstance(entry, Scheduled):
                self._launch_aside(opened, entry, begins_s)
            elif not opened.can_go_on:
                self._line.set_back(opened)  # it would hold what it has for as long as the network takes
            elif lacking + entry <= self._line.growable():
                lacking += entry
        return lacking

    def _launch_aside(self, opened: Open, entry: Scheduled, begins_s: float) -> None:
        plan = self._plan((entry,), (replace(entry.row, assist=opened.assist),), aside=True)
        self._account(entry)
        self._line.begin_aside(opened)
        launched = self._launch(plan, [opened], begins_s)
        launched.result.add_done_callback(lambda _: self._wake())
        self._aside.append(launched)

    def _recallable(self) -> int:
        """Blocks of those who would wait for a network, or do: nobody else loses any for theirs."""
        waiting = [opened for opened, _ in self._waiting_for_network()]
        waiting += [opened for opened in self._line.running if not (opened.is_aside or opened.can_go_on)]
        return sum(len(opened.request.blocks) for opened in waiting)

    def _recall(self, *, everyone: bool) -> None:
        """Plans aside that may wait for the network, of requests that have ended, or of all."""
        for opened, row in self._waiting_for_network():
            if everyone or opened.request.phase is Phase.FINISHED:
                self._backend.recall(row.slot)

    def _waiting_for_network(self) -> list[tuple[Open, Row]]:
        return [launched.rows[0] for launched in self._aside if launched.rows[0][0].is_streamed]

    def _plan(
        self, scheduled: Sequence[Scheduled], rows: tuple[Row, ...], *, merged: int | None = None, aside: bool = False
    ) -> Plan:
        """Whichever plan is launched first tells the device of all requests that took a slot."""
        starts, reused = self._line.new_in_slots()
        return Plan(starts, (*reused, *grants(scheduled)), rows, merged, aside)

    def _account(self, entry: Scheduled) -> None:
        entry.request.blocks += entry.blocks
        entry.request.computed += entry.row.count
        entry.request.launched_outputs += entry.row.samples

    def _launch(self, plan: Plan, opened: Sequence[Open], begins_s: float) -> Launched:
        result: asyncio.Future[StepResult | Exception] = self._loop.create_future()

        def settle(outcome: StepResult | Exception) -> None:
            if not result.done():  # the engine may have been stopped meanwhile
                result.set_result(outcome)

        def done(outcome: StepResult | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(settle, outcome)

        self._backend.launch(plan, done)
        return Launched(tuple(zip(opened, plan.rows, strict=True)), result, plan.num_tokens, begins_s)


def undo(opened: Open, row: Row) -> None:
    """A plan aside has computed nothing: its row is launched again, without help."""
    opened.request.computed -= row.count
    opened.request.launched_outputs -= row.samples
    opened.assist = False
