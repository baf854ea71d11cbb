"""An adapter whose copy to the device fails while requests use it. On the fake backend of hashes."""

import asyncio

from caraserve.lora.adapter import AdapterTier
from tests.engine_harness import in_harness, turn
from tests.fake_images import BASE

PROMPT = [1, 2, 3, 4, 5]


async def test_requests_that_come_before_a_failed_copy_is_reported_fail_too_and_none_runs_without_the_adapter() -> None:
    async with in_harness(mode="pipelined") as here:
        first, one = here.ask(PROMPT, "a0", max_tokens=20)
        await turn()
        here.reader.reads.pop()(True)
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


async def test_kv_blocks_of_a_failed_copy_are_not_reused_though_its_request_was_cancelled() -> None:
    """The request's full blocks are published when its iteration is launched, which then computes nothing of it."""
    prompt = list(range(1, 13))
    async with in_harness(mode="pipelined") as here:
        backend = here.backend
        other, zero = here.ask(PROMPT, None, max_tokens=30)  # so that iterations are under way
        await turn()
        lost, one = here.ask(prompt, "a0", max_tokens=4)
        await turn()
        here.reader.reads.pop()(True)
        version = here.engine.catalog.manager._names["a0"]
        while not any(version.slot in {row.adapter_slot for row in batch.rows} for batch in backend.launched):
            backend.step()
            await turn()
        lost.stream.cancel()
        backend.copies.pop()(False)
        fail_copy, compute = backend.lane.pop(), backend.lane.pop()

        def compute_without() -> None:
            backend.bound[version.slot] = BASE  # so that reused blocks give wrong tokens
            compute()

        backend.lane += [fail_copy, compute_without]
        while version.tier is AdapterTier.COPYING or not one.done():
            backend.step()
            await turn()
        again, two = here.ask(prompt, "a0", max_tokens=4)
        await here.until_done([zero, two])
        assert (lost.finish.reason, again.finish.reason) == ("cancelled", "length")
        for asked in (other, again):
            asked.check()
