"""Guessed tokens are verified where that is expected to save time, and only then; on the fake backend."""

import random

import pytest

from caraserve.core.batch import Batch
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.speculation import draft_lengths
from tests.engine.test_interleavings import answer_to
from tests.engine_harness import EngineHarness, in_harness, turn
from tests.fake_backend import expected
from tests.guesses import guessing

TOKENS = 24


@pytest.mark.parametrize(
    ("chances", "rows", "cost", "lengths"),
    [
        ([1.0], 1, 0.1, [8]),  # free of doubt
        ([0.9], 1, 0.25, [6]),
        ([0.5], 1, 0.25, [1]),
        ([0.2], 1, 0.25, [0]),
        ([0.9], 4, 0.25, [0]),  # four rows take as long to compute as they are
        ([0.6, 0.0], 2, 0.1, [2, 0]),
        ([0.9, 0.8], 2, 0.05, [6, 2]),
    ],
)
def test_as_many_drafts_as_yield_the_most_tokens_for_their_time(
    chances: list[float], rows: int, cost: float, lengths: list[int]
) -> None:
    assert draft_lengths(chances, rows, cost, most=8) == lengths


async def answer(here: EngineHarness, *, requests: int = 1, draft_s: float) -> list[Batch]:
    """Answers requests, one of which warms the engine up; an iteration takes 1 s and `draft_s` for each draft. Returns
    the batches of the others."""
    here.backend.takes_s = lambda batch: 1.0 + draft_s * sum(len(row.drafts) for row in batch.rows)
    for count in (1, requests):
        here.backend.launched.clear()
        asked = [here.ask([5, 6 + index], None, max_tokens=TOKENS) for index in range(count)]
        await here.until_done([task for _, task in asked])
        for one, _ in asked:
            one.check()
    return here.backend.launched


async def test_right_guesses_save_iterations() -> None:
    with guessing(answer_to, random.Random(0), wrong=0.0):
        async with in_harness(draft_tokens=8) as here:
            assert len(await answer(here, draft_s=0.1)) <= 2 + TOKENS // 8
            assert here.metrics.accepted == here.metrics.drafted > TOKENS


async def test_a_text_that_the_client_expects_is_looked_up_too() -> None:
    async with in_harness(draft_tokens=8) as here:
        await answer(here, draft_s=0.1)
        assert here.metrics.accepted == 0
        asked, task = here.ask([5, 8], None, max_tokens=TOKENS, predicted=expected([5, 8], None, TOKENS))
        await here.until_done([task])
        asked.check()
        assert here.metrics.accepted > TOKENS // 2


async def test_drafts_that_take_longer_than_they_save_are_not_verified_again() -> None:
    with guessing(answer_to, random.Random(0), wrong=0.0):
        async with in_harness(draft_tokens=8) as here:
            launched = await answer(here, draft_s=1.5)
            assert 0 < here.metrics.drafted <= 8
            assert len(launched) >= TOKENS


async def test_requests_without_guesses_are_not_slowed_down_by_much() -> None:
    """A draft may add a quarter to the time of an iteration with rows that have none."""

    def answer_to_one(active: ActiveRequest) -> list[int]:
        return answer_to(active) if active.request.inputs.prompt_ids == (5, 6) else []

    with guessing(answer_to_one, random.Random(0), wrong=0.0):
        async with in_harness(draft_tokens=8) as here:
            launched = await answer(here, requests=2, draft_s=0.1)
            mixed = [batch for batch in launched if len(batch.rows) == 2]
            assert max(sum(len(row.drafts) for row in batch.rows) for batch in mixed) == 2


async def test_without_guesses_the_next_iteration_is_launched_ahead() -> None:
    with guessing(answer_to, random.Random(0), wrong=1.0):
        async with in_harness(draft_tokens=8) as here:
            _, task = here.ask([5, 6], None, max_tokens=TOKENS)
            for _ in range(4):
                await turn()
                assert len(here.backend.lane) == 2
                here.backend.step()
            await here.until_done([task])


async def test_a_model_with_a_state_verifies_no_guess() -> None:
    with guessing(answer_to, random.Random(0), wrong=0.0):
        async with in_harness(draft_tokens=8, state_bytes=1) as here:
            await answer(here, draft_s=0.0)
            assert here.metrics.drafted == 0
