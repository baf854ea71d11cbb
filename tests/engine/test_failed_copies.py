"""An adapter whose copy to the device fails while requests use it. On the fake backend of hashes."""

import asyncio

from caraserve.lora.adapter import AdapterTier
from tests.engine_world import World, in_world, turn

PROMPT = [1, 2, 3, 4, 5]


def test_requests_that_come_before_a_failed_copy_is_reported_fail_too_and_none_runs_without_the_adapter() -> None:
    async def test(here: World) -> None:
        first, one = here.ask(PROMPT, "a0", max_tokens=20)
        await turn()
        here.reader.reads.pop()(True)
        here.backend.now_s += 1000.0  # long enough for its copy: the prefill begins
        await turn()
        version = here.engine.catalog.manager._names["a0"]
        here.backend.copies.pop()(False)
        while version.tier is AdapterTier.COPYING:
            here.backend.step()
            await asyncio.sleep(0)
        assert version.tier is AdapterTier.FAILED, "the engine has had no turn since"
        second, two = here.ask(PROMPT, "a0", max_tokens=2)
        await here.until_done([one, two])
        assert [first.finish.reason, second.finish.reason] == ["error", "error"]
        first.check()
        assert second.tokens == []

    in_world(test, mode="pipelined")
