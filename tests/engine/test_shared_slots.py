"""Slots that a client without any takes from a client with several."""

from collections import Counter

from tests.engine_harness import EngineHarness, asked_for, in_harness, turn


def slots(here: EngineHarness) -> Counter[str]:
    """Returns the slots of each client."""
    queues = here.engine._queues
    return Counter(one.request.inputs.tenant.client for one in (*queues.loading, *queues.running))


async def end_iterations(here: EngineHarness, count: int) -> None:
    for _ in range(count):
        here.end_something()
        await turn()


async def test_a_client_without_a_slot_gets_one_of_a_client_with_several() -> None:
    async with in_harness(slots=3) as here:
        greedy = [here.ask([number], "a0", client="greedy", max_tokens=40) for number in range(6)]
        await end_iterations(here, 8)
        assert slots(here) == {"greedy": 3}
        asked, task = here.ask([9, 9], "a1", client="other", max_tokens=4)
        await end_iterations(here, 4)
        assert slots(here) == {"greedy": 2, "other": 1}
        others = [here.ask([number], None, client="other", max_tokens=4) for number in range(3)]
        await end_iterations(here, 4)
        assert slots(here)["greedy"] == 2  # one slot is enough for each client that has none
        await here.until_done([task])
        asked.check()
        await here.until_done([reading for _, reading in greedy + others])
        for one, _ in greedy + others:
            one.check()


async def test_the_request_that_lost_its_slot_is_its_clients_next_one() -> None:
    async with in_harness(slots=2) as here:
        asked = [here.ask([number], None, client="greedy", max_tokens=30) for number in range(4)]
        await end_iterations(here, 4)
        first, second = here.engine._queues.running
        here.ask([9], None, client="other", max_tokens=2)
        await end_iterations(here, 3)
        assert first in here.engine._queues.running
        assert next(iter(here.engine._queues.waiting)) is second  # the newest of the running ones, before the others
        await here.until_done([reading for _, reading in asked])
        for one, _ in asked:
            one.check()


async def test_no_client_loses_its_only_slot() -> None:
    async with in_harness(slots=2) as here:
        asked = [here.ask([number], None, client=client, max_tokens=20) for number, client in enumerate("ab")]
        await end_iterations(here, 4)
        asked += [here.ask([number], None, client="c", max_tokens=20) for number in range(2)]
        await end_iterations(here, 4)
        assert slots(here) == {"a": 1, "b": 1}
        await here.until_done([reading for _, reading in asked])
        for one, _ in asked:
            one.check()


async def test_requests_that_wait_for_their_adapter_give_their_places_up_too() -> None:
    async with in_harness(slots=2) as here:
        streams = list(here.engine.submit_each([asked_for([number], "a0", client="greedy") for number in range(4)]))
        await turn()
        assert slots(here) == {"greedy": 2}
        assert len(here.engine._queues.loading) == 2  # nothing has been read yet
        asked, task = here.ask([9], None, client="other", max_tokens=4)
        await end_iterations(here, 2)
        assert slots(here) == {"greedy": 1, "other": 1}
        await here.until_done([task])
        asked.check()
        for stream in streams:
            stream.cancel()
