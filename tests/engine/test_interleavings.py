"""In any order of events, a finished request has the tokens that it would have alone. On the fake backend of hashes."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caraserve.core.request import GenerateRequest, SamplingParams
from caraserve.engine import token_stream, unread
from caraserve.engine.active_request import ActiveRequest
from caraserve.errors import BackendFailed
from tests.engine_harness import EngineHarness, SentRequest, harness
from tests.fake_backend import expected
from tests.guesses import drafting


async def random_run(
    seed: int,
    *,
    plan_failures: float = 0.0,
    read_failures: float = 0.0,
    copy_failures: float = 0.0,
    side_batch_failures: float = 0.0,
    most_rests: int = 0,
    clients: str = "",
    wrong_images: float | None = None,
    **kind: Any,
) -> EngineHarness:
    """Runs random requests, arrivals, cancellations and failures. Returns the harness after their end."""
    rng = random.Random(seed)
    stems = [[rng.randrange(97) for _ in range(24)] for _ in range(2)]
    async with harness(rng, **kind) as here:
        here.plan_failures, here.side_batch_failures = plan_failures, side_batch_failures
        here.read_failures, here.copy_failures = read_failures, copy_failures
        here.most_rests = most_rests
        if wrong_images is not None:
            here.reader.is_wrong = lambda: rng.random() < wrong_images
        asked, tasks = [], []
        for _ in range(rng.randrange(3, 16)):
            prompt = rng.choice(stems)[: rng.choice((0, 4, 9, 16, 24))] + [rng.randrange(97)] * rng.randrange(1, 8)
            name = rng.choice([None, "a0", "a1", "a2", "a3"])
            scores = 0 if rng.random() < 0.2 else None
            client = rng.choice(clients) if clients else ""
            if rng.random() < 0.2:
                one, task = here.ask(prompt, name, embeds=True, client=client, max_tokens=0)
            else:
                tokens = rng.randrange(1, 22)
                one, task = here.ask(prompt, name, client=client, max_tokens=tokens, prompt_logprobs=scores)
            asked.append(one)
            tasks.append(task)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
                here.end_something()
            if rng.random() < 0.2:
                rng.choice(asked).stream.cancel()
        await here.until_done(tasks)
        await here.settle()
        for one in asked:
            one.check(is_wrong=bool(wrong_images))
            phases = one.finish.phases
            assert phases.stalled_ms + phases.interrupted_ms <= phases.prefill_ms + phases.decode_ms + 1e-6
            if one.finish.reason == "length" and one.params.prompt_logprobs is not None and len(one.prompt) > 1:
                scores = [entry for delta in one.deltas for entry in delta.prompt_logprobs]
                assert scores[0] is None
                assert [entry.token_id for entry in scores[1:] if entry] == list(one.prompt[1:])
            if one.finish.error is not None and not (read_failures or copy_failures or wrong_images):
                assert isinstance(one.finish.error, BackendFailed)
        return here


KINDS = {
    "step_tokens": st.sampled_from([5, 7, 16, 64]),
    "blocks": st.integers(13, 24),
    "device_adapters": st.sampled_from([1, 2, 4]),
    "exclusive": st.booleans(),
    "mode": st.sampled_from(["overlapped", "pipelined", "assisted", "auto", "merged"]),
    "spare_bytes": st.sampled_from([None, None, 0, 70, 150, 500]),
    "assisted_batches": st.sampled_from([0, 1, 3]),
    "streamed_batches": st.sampled_from([0, 0, 1, 2]),
    "just_in_time": st.booleans(),
    "clock_step_s": st.sampled_from([0.0, 0.003]),  # with 3 ms, other tasks run between two results of an iteration
}
ASSISTED = {"mode": st.just("assisted"), "assisted_batches": st.sampled_from([1, 3])}
STREAMED = {"mode": st.sampled_from(["pipelined", "assisted", "auto"]), "streamed_batches": st.sampled_from([1, 2])}
# What fails and how often, or who reads slowly; and the kinds of engines beside `KINDS`.
RUNS: dict[str, tuple[dict[str, Any], dict[str, st.SearchStrategy[Any]]]] = {
    "nothing fails": ({}, {}),
    "reads fail": ({"read_failures": 0.3}, {}),
    "copies fail": ({"copy_failures": 0.3}, {}),
    "iterations fail": ({"plan_failures": 0.1}, {}),
    "side batches fail": ({"side_batch_failures": 0.4}, ASSISTED),
    "assisted": ({"plan_failures": 0.1, "copy_failures": 0.2, "side_batch_failures": 0.2}, ASSISTED),
    "streamed": ({"read_failures": 0.2, "copy_failures": 0.2, "side_batch_failures": 0.2}, STREAMED),
    "slow readers": ({"side_batch_failures": 0.2, "most_rests": 40}, {}),
    "answers are guessed": ({"plan_failures": 0.03}, {"draft_tokens": st.just(8)}),
    "images are wrong": ({"wrong_images": 0.4, "copy_failures": 0.1, "side_batch_failures": 0.1}, {}),
    "clients take turns": ({"side_batch_failures": 0.2, "clients": "aaaabc", "slots": 3}, {}),
}


@contextmanager
def small_shares() -> Iterator[None]:
    """Answers of which little is unread pause."""
    with patch.multiple(unread, FREE_BYTES=500, _SHARE_BYTES=900), patch.object(token_stream, "FREE_BYTES", 500):
        yield


def answer_to(active: ActiveRequest) -> list[int]:
    digest = None if active.adapter is None else active.adapter.digest
    return expected(active.request.inputs.prompt_ids, digest, 48)


@pytest.mark.parametrize("run", RUNS)
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), data=st.data())
def test_no_interleaving_changes_a_token_and_a_failure_fails_only_its_own_requests(
    run: str, seed: int, data: st.DataObject
) -> None:
    options, kinds = RUNS[run]
    kind = data.draw(st.fixed_dictionaries(KINDS | kinds))
    with small_shares() if "most_rests" in options else drafting(answer_to, random.Random(seed)):
        asyncio.run(random_run(seed, **options, **kind))


def test_the_time_to_plan_is_waited_for() -> None:
    """Otherwise the test above would not cover it."""
    ended = [asyncio.run(random_run(seed, just_in_time=True)) for seed in range(10)]
    assert sum(here.alarm.settings for here in ended) > 100


def test_slow_readers_do_cause_pauses() -> None:
    """Otherwise the test above would not cover it."""
    with small_shares():
        assert sum(asyncio.run(random_run(seed, most_rests=40)).engine.unread.paused for seed in range(20)) > 20


def test_some_streamed_prefills_do_end_and_some_are_recalled() -> None:
    """Otherwise the tests above would not cover it."""
    ended = [asyncio.run(random_run(seed, mode="assisted", blocks=13, streamed_batches=2)) for seed in range(20)]
    outcomes = sum((here.backend.outcomes for here in ended), start=Counter[str]())
    assert min(outcomes["done"], outcomes["void"]) > 5


def test_guessed_tokens_are_verified_and_some_are_wrong() -> None:
    """Otherwise the tests above would not cover it."""
    with drafting(answer_to, random.Random(0)):
        metrics = [asyncio.run(random_run(seed, draft_tokens=8)).metrics for seed in range(10)]
    drafted, accepted = (sum(getattr(one, name) for one in metrics) for name in ("drafted", "accepted"))
    assert min(accepted, drafted - accepted) > 50


def test_a_small_pool_does_cause_preemptions() -> None:
    """Otherwise the tests above would not cover it."""
    assert sum(asyncio.run(random_run(seed, blocks=13)).metrics.preemptions for seed in range(20)) > 5


async def test_five_hundred_requests_release_all_they_held() -> None:
    rng = random.Random(5)
    async with harness(rng) as here:
        tasks = []
        for _ in range(500):
            prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 30))]
            one, task = here.ask(prompt, rng.choice([None, "a0", "a1", "a2", "a3"]), max_tokens=rng.randrange(1, 8))
            tasks.append(task)
            if rng.random() < 0.4:
                one.stream.cancel()
            await asyncio.sleep(0)
            here.end_something()
        await here.until_done(tasks)
        await here.settle()
        for task in tasks:
            task.result().check()


async def test_two_hundred_adapters_are_served_with_memory_for_three() -> None:
    async with harness(random.Random(6), adapters=200, device_adapters=3) as here:
        tasks = [here.ask([index % 97, 3], f"a{index}", max_tokens=3)[1] for index in range(200)]
        await here.until_done(tasks)
        await here.settle()
        for task in tasks:
            task.result().check()
            assert task.result().finish.reason == "length"


@pytest.mark.parametrize("seed", range(5))
async def test_requests_before_an_in_place_load_keep_the_old_adapter(seed: int) -> None:
    async with harness(random.Random(seed)) as here:
        prompt = list(range(20))
        before, first = here.ask(prompt, "a0", max_tokens=12)
        await here.engine.load_adapter("a0", "digest-new", inplace=True)
        after, second = here.ask(prompt, "a0", max_tokens=12)
        await here.until_done([first, second])
        await here.settle()
        assert (before.digest, after.digest) == ("digest-0", "digest-new")
        before.check()
        after.check()


def requests_of_one_response(count: int, name: str | None) -> list[GenerateRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return [GenerateRequest(f"r{index}", tuple(range(20)), name, params, arrival_s=0.0) for index in range(count)]


async def test_the_requests_of_one_response_use_one_adapter_despite_in_place_loads_between_them() -> None:
    async with harness(random.Random(1)) as here:
        requests = requests_of_one_response(2, "a0")
        submitted = here.engine.submit_each(requests)
        for stream in submitted:  # the first one has ended, and its name has another adapter, before the next
            asked = SentRequest(requests[0].prompt_ids, "digest-0", requests[0].params, stream)
            await here.until_done([asyncio.create_task(asked.collect())])
            await here.engine.load_adapter("a0", "digest-new", inplace=True)
            asked.check()
            assert asked.finish.reason == "length"
        await here.settle()
        here.engine.check()


async def test_thousands_of_requests_cancelled_together_end_over_several_turns() -> None:
    async with harness(random.Random(2)) as here:
        streams = list(here.engine.submit_each(requests_of_one_response(1000, None)))
        for stream in streams:
            stream.cancel()
        waiting = [len(here.engine.waiting())]
        while waiting[-1]:
            here.end_something()
            await asyncio.sleep(0)
            waiting.append(len(here.engine.waiting()))
        assert max(before - after for before, after in pairwise(waiting)) <= 100
        await here.settle()
        here.engine.check()


async def test_with_exclusive_loads_no_iteration_is_launched_during_a_load() -> None:
    async with harness(random.Random(8), exclusive=True) as here:
        _, warm = here.ask([1, 2, 3], None, max_tokens=20)
        for _ in range(10):
            await asyncio.sleep(0)
        _, cold = here.ask([1, 2, 3], "a0", max_tokens=2)
        for _ in range(10):
            await asyncio.sleep(0)
        launched = len(here.backend.launched)
        while here.backend.lane:
            here.backend.step()
            for _ in range(10):
                await asyncio.sleep(0)
        assert len(here.backend.launched) == launched
        await here.until_done([warm, cold])
        await here.settle()


async def test_an_adapter_whose_only_request_was_cancelled_during_the_copy_is_evicted_for_the_next() -> None:
    async with harness(random.Random(9), device_adapters=1) as here:
        left, first = here.ask([1, 2, 3], "a0", max_tokens=2)
        await asyncio.sleep(0)
        here.reader.reads.pop()(True)
        here.backend.copies.pop()(True)
        _, second = here.ask([1, 2, 3], "a1", max_tokens=2)
        for _ in range(5):
            await asyncio.sleep(0)
        here.reader.reads.pop()(True)
        left.stream.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        await here.until_done([first, second])
        await here.settle()
        assert second.result().finish.reason == "length"


async def test_a_request_never_continues_with_reused_blocks_of_a_failed_iteration() -> None:
    async with harness(random.Random(10), step_tokens=8) as here:
        prompt = list(range(17))
        _, first = here.ask(prompt, None, max_tokens=4)
        await asyncio.sleep(0)
        reader, second = here.ask([*prompt, 5], None, max_tokens=4)
        here.backend.step()
        for _ in range(5):
            await asyncio.sleep(0)
        written, found = here.backend.launched[1].grants[0], here.backend.launched[2].grants[0]
        assert set(written.blocks) < set(found.blocks), "the second request reuses what is still being computed"
        here.backend.fail_next = True
        here.backend.step()
        await here.until_done([first, second])
        await here.settle()
        reader.check()
