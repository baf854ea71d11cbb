"""`interrupted_ms` of a request is the time for which it waited for loads of other requests' adapters, and no other."""

import pytest

from caraserve.core.batch import RowResult, ScheduledRow, StepResult
from tests.engine_harness import EngineHarness, in_harness, turn
from tests.fake_backend import STALL_MS


async def run_lane(here: EngineHarness) -> None:
    """Ends iterations until no more are launched."""
    while here.backend.lane:
        here.backend.step()
        await turn()


async def load(here: EngineHarness, read_s: float, copy_s: float) -> None:
    """Ends the read and the copy under way, after so many seconds each."""
    here.backend.now_s += read_s
    here.reader.reads.pop()(True)
    await turn()
    here.backend.now_s += copy_s
    here.backend.copies.pop()(True)
    await turn()


async def test_an_exclusive_load_interrupts_all_decoding_requests_and_not_its_own() -> None:
    async with in_harness(exclusive=True) as here:
        running = [here.ask(prompt, None, max_tokens=20) for prompt in ([1, 2, 3], [4, 5])]
        await turn()
        here.backend.step()  # computes their prompts
        await turn()
        cold, ends = here.ask([6, 7], "a0", max_tokens=2)
        await run_lane(here)  # ends the iterations launched before
        await load(here, read_s=3.0, copy_s=2.0)
        await here.until_done([ends, *(task for _, task in running)])
        for asked, _ in running:
            assert asked.finish.phases.interrupted_ms == pytest.approx(5000)
            assert asked.finish.phases.decode_ms >= 5000
            assert asked.finish.phases.load_ms == 0
        assert cold.finish.phases.interrupted_ms == 0
        assert cold.finish.phases.load_ms >= 5000


async def test_a_request_whose_own_load_has_ended_is_interrupted_by_the_next_one() -> None:
    async with in_harness(exclusive=True) as here:
        first, first_ends = here.ask([1, 2], "a0", max_tokens=2)
        await turn()
        await load(here, read_s=1.0, copy_s=1.0)
        await run_lane(here)
        second, second_ends = here.ask([1, 2], "a1", max_tokens=2)
        await turn()
        assert first_ends.done(), "two tokens, and no load meanwhile"
        third, third_ends = here.ask([1, 2], "a0", max_tokens=2)
        await turn()
        await load(here, read_s=3.0, copy_s=4.0)
        await here.until_done([second_ends, third_ends])
        assert first.finish.phases.interrupted_ms == second.finish.phases.interrupted_ms == 0
        assert third.finish.phases.load_ms == 0
        assert third.finish.phases.interrupted_ms == pytest.approx(7000)


async def test_a_load_beside_iterations_interrupts_no_request() -> None:
    async with in_harness(mode="overlapped") as here:
        running, running_ends = here.ask([1, 2, 3], None, max_tokens=20)
        await turn()
        _, cold_ends = here.ask([6, 7], "a0", max_tokens=2)
        await turn()
        await load(here, read_s=3.0, copy_s=2.0)
        await here.until_done([running_ends, cold_ends])
        assert running.finish.phases.interrupted_ms == 0


async def test_weights_that_an_iteration_waits_for_stall_their_own_requests_and_interrupt_the_others() -> None:
    async with in_harness(mode="assisted") as here:
        running, running_ends = here.ask([1, 2, 3], None, max_tokens=20)
        await turn()
        here.backend.step()
        await turn()
        cold = [here.ask(prompt, "a0", max_tokens=1) for prompt in ([6, 7], [8, 9])]
        await turn()
        here.reader.reads.pop()(True)  # in host memory, and still on its way to the device
        await turn()
        while not all(task.done() for _, task in cold):
            here.backend.step()
            await turn()
        here.backend.copies.pop()(True)
        await here.until_done([running_ends])
        for asked, _ in cold:
            assert asked.finish.phases.stalled_ms == STALL_MS
            assert asked.finish.phases.interrupted_ms == 0, "they wait for the same adapter"
        assert running.finish.phases.interrupted_ms == STALL_MS, "both waited at once"
        assert running.finish.phases.stalled_ms == 0


def test_overlapping_waits_interrupt_for_no_longer_than_the_iteration_took() -> None:
    rows = [ScheduledRow(slot, 0, 1, adapter_slot, samples=True) for slot, adapter_slot in enumerate((0, 1, 2, 2))]
    results = tuple(RowResult((7,), waited_ms=waited_ms) for waited_ms in (0.0, 600.0, 700.0, 700.0))
    assert StepResult(results, 1.0, 2.0).interruptions_ms(rows) == pytest.approx([1000, 400, 300, 300])
