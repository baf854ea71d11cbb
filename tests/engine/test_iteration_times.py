"""When the next iteration begins, as the engine predicts it on a device that is a clock."""

from collections.abc import Sequence
from typing import Any

import pytest

from caraserve.core.batch import Batch, RowResult, StepResult
from caraserve.engine.iteration_times import IterationTimes, IterationWork
from caraserve.lora.adapter import Adapter
from caraserve.lora.start_policy import AwaitedPrefill
from tests.engine_harness import EngineHarness, in_harness, turn

NEAR_S = 0.0005


def takes_ms(requests: int, tokens: int) -> float:
    """Returns the time of an iteration on the clock: 7 ms, and with prompts at least 3 ms more."""
    return 7.0 + 0.01 * requests + (3.0 + 0.02 * tokens if tokens else 0.0)


def model_ms(requests: int, rank_sum: int, rank_max: int, tokens: int, token_ranks: int, rank: int) -> float:
    return takes_ms(requests, tokens)


def wrong_model_ms(requests: int, *others: int) -> float:
    """Returns the times of a machine on which prompts cost less, in proportion to their tokens, and decoding more."""
    tokens = others[2]
    return 9.0 + (0.1 * tokens if tokens else 0.0)


def clock_s(batch: Batch) -> float:
    prompts = [row.count for row in batch.rows if row.start == 0]  # none is cut
    return takes_ms(len(batch.rows) - len(prompts), sum(prompts)) / 1000


async def ask_in_turn(here: EngineHarness, lengths: Sequence[int]) -> None:
    """Asks for answers to prompts of these lengths, one every three iterations, and steps until all have ended. No
    prompt shares a prefix with another one, which would shorten its prefill."""
    here.backend.takes_s = clock_s
    tasks = []
    for length in lengths:
        tasks.append(here.ask([len(here.backend.launched), *range(1, length)], None, max_tokens=8)[1])
        await turn()
        for _ in range(3):
            here.backend.step()
            await turn()
    await here.until_done(tasks)


async def test_the_begin_of_every_iteration_is_predicted_also_after_prompts() -> None:
    async with in_harness(iteration_ms=model_ms, blocks=40, step_tokens=64) as here:
        await ask_in_turn(here, (5, 16, 9, 3, 12, 16, 2, 7))
        errors_s = here.metrics.begin_errors_s
        assert len(errors_s) > 20
        assert max(map(abs, errors_s)) < NEAR_S, errors_s


async def test_an_iteration_longer_than_expected_spoils_the_prediction_of_the_next_one_alone() -> None:
    """Predictions that start from earlier ones would all be too early from then on."""
    async with in_harness(iteration_ms=model_ms) as here:
        surprising = 9

        def takes_s(batch: Batch) -> float:
            return clock_s(batch) + (0.02 if here.backend.launched.index(batch) == surprising else 0.0)

        here.backend.takes_s = takes_s
        _, task = here.ask([1, 2, 3], None, max_tokens=30)
        await here.until_done([task])
        wrong = [index for index, error_s in enumerate(here.metrics.begin_errors_s) if abs(error_s) > NEAR_S]
        assert wrong == [surprising + 1]


@pytest.mark.parametrize("model", [wrong_model_ms, None])
async def test_iterations_correct_a_model_that_is_wrong_for_their_kind(model: Any) -> None:
    async with in_harness(iteration_ms=model, blocks=40, step_tokens=64) as here:
        await ask_in_turn(here, (16, 8, 4, 16, 8, 4))
        known = here.metrics.begin_errors_s
        here.metrics.begin_errors_s = []
        await ask_in_turn(here, (8, 16, 4, 16))
        errors_s = here.metrics.begin_errors_s
        assert max(map(abs, known)) > NEAR_S
        assert max(map(abs, errors_s)) < NEAR_S, errors_s


async def test_a_new_request_expects_its_prefill_after_the_two_iterations_under_way() -> None:
    """Its adapter's layers are ordered for this time as soon as it arrives, while the first of them still runs."""
    async with in_harness(iteration_ms=model_ms, mode="pipelined") as here:
        here.backend.takes_s = clock_s
        awaited: list[AwaitedPrefill] = []
        acquire = here.engine.catalog.manager.acquire

        def spy(adapter: Adapter, prefill: AwaitedPrefill) -> None:
            awaited.append(prefill)
            acquire(adapter, prefill)

        here.engine.catalog.manager.acquire = spy  # type: ignore[method-assign]
        here.ask([1] * 16, None, max_tokens=8)
        await turn()
        here.backend.step()
        await turn()
        began_s = here.backend.now_s
        here.backend.now_s += 0.002  # into the first of the two
        here.ask([1, 2, 3], "a0", max_tokens=2)
        assert awaited[0].begins_s == pytest.approx(began_s + 2 * takes_ms(1, 0) / 1000, abs=NEAR_S)
        here.backend.now_s = began_s


DECODE = IterationWork(4, 0, 0, 0, 0, 0)


def outcome(began_s: float, done_s: float, waited_ms: float = 0.0) -> StepResult:
    return StepResult((RowResult((7,), waited_ms=waited_ms),), began_s, done_s, began_s)


def launch(times: IterationTimes, now_s: float) -> None:
    times.launch(DECODE, DECODE.requests, now_s, now_s)


def test_an_iteration_that_waited_for_weights_changes_no_prediction() -> None:
    times = IterationTimes(model_ms)
    launch(times, 1.0)
    expected_s = times.next_begin_s(1.0)
    times.end(outcome(1.0, 1.5, waited_ms=480.0))
    launch(times, 1.5)
    assert times.next_begin_s(1.5) - 1.5 == pytest.approx(expected_s - 1.0)


def test_the_iteration_after_a_failed_one_begins_at_the_failure() -> None:
    times = IterationTimes(model_ms)
    launch(times, 1.0)
    launch(times, 1.0)
    times.fail(1.1)
    assert times.next_begin_s(1.1) == pytest.approx(1.1 + takes_ms(4, 0) / 1000)
