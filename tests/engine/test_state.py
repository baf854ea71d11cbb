"""Requests of models with a state beside KV blocks: whatever continues a request begins at its first token. On the fake
backend of hashes."""

from tests.engine.test_assisted_prefill import begin_side_batch, side_batches, with_harness
from tests.engine_harness import in_harness, turn

PROMPT = list(range(20))


async def test_equal_prompts_are_computed_each_from_the_first_token() -> None:
    """Without a state the second one finds the blocks of the first."""
    for state_bytes, starts in ((0, [0, 16]), (1, [0, 0])):
        async with in_harness(state_bytes=state_bytes, step_tokens=32) as here:
            for _ in range(2):
                asked, task = here.ask(PROMPT, None, max_tokens=1)
                await here.until_done([task])
                asked.check()
            assert [batch.rows[0].start for batch in here.backend.launched] == starts


async def test_a_preempted_request_begins_again_and_gets_the_same_tokens() -> None:
    async with in_harness(state_bytes=1, blocks=14, step_tokens=32) as here:
        sent = [here.ask(PROMPT, None, max_tokens=30) for _ in range(3)]
        await here.until_done([task for _, task in sent])
        begun = [row.slot for batch in here.backend.launched for row in batch.rows if row.start == 0]
        assert len(begun) > len(sent), "no request was preempted"
        for asked, _ in sent:
            asked.check()


async def test_a_side_batch_without_a_result_leads_to_the_first_token_again() -> None:
    """Some layers have advanced their states, and others have not."""
    async with with_harness(state_bytes=1, step_tokens=16) as here:
        asked, task = await begin_side_batch(here, prompt=PROMPT)
        here.backend.end_side_batch(0)
        await turn()
        assert [(batch.rows[0].start, batch.rows[0].count) for batch in side_batches(here)] == [(0, 16), (16, 4)]
        while not here.backend.side_batches:
            here.backend.step()
            await turn()
        here.backend.end_side_batch(0, "void")
        before = len(here.backend.launched)
        await here.until_done([task])
        assert here.backend.launched[before].rows[0].start == 0
        asked.check()
