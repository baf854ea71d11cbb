"""Whatever ends first, every finished request has the tokens it would have had alone. Over a device that is a hash."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caraserve.adapters.catalog import Catalog, CatalogRules
from caraserve.adapters.loading import LAYERWISE_MODES, Loading
from caraserve.adapters.registry import AdapterInfo, Registry
from caraserve.adapters.residency import Residency
from caraserve.cpu.arena import Arena
from caraserve.errors import BackendFailed
from caraserve.loop import Engine
from caraserve.merging import MergeRule
from caraserve.model.backend import Limits
from caraserve.model.layout import aligned_bytes
from caraserve.request import Finish, GenerateRequest, SamplingParams, TokenDelta
from caraserve.stream import Stream
from tests.fake_backend import ADAPTER_BYTES, FakeBackend, FakeReader, FakeTokenizer, expected

CONTEXT = 48
MAX_IDLE_TURNS = 50


class _Metrics:
    preemptions = 0

    def observe_preemption(self) -> None:
        self.preemptions += 1

    def observe_iteration(self, num_tokens: int, ms: float) -> None: ...
    def observe_first_token(self, seconds: float) -> None: ...
    def observe_token_gap(self, seconds: float) -> None: ...
    def observe_finish(self, finish: Finish) -> None: ...


class _Costs:
    """A machine on which a token takes a tenth of a second."""

    def prefill_ms(self, tokens: int, rank: int) -> float:
        return 100.0 * tokens

    def cpu_lora_ms(self, tokens: int, rank: int, targets: str) -> float:
        return 10.0 * tokens


class _Catalog(Catalog):
    """Reads no disk: a path is its adapter's digest."""

    def _inspect(self, name: str, path: str, *, trusted: bool = False) -> AdapterInfo:
        return AdapterInfo(name, path, path, 8, ("q_proj",), ADAPTER_BYTES, 0.0)


@dataclass
class Asked:
    """A request under way and what came of it."""

    prompt: tuple[int, ...]
    digest: str | None
    params: SamplingParams
    stream: Stream
    deltas: list[TokenDelta] = field(default_factory=list)

    async def collect(self) -> "Asked":
        async for delta in self.stream:
            self.deltas.append(delta)
        return self

    @property
    def finish(self) -> Finish:
        assert self.deltas[-1].finish is not None
        return self.deltas[-1].finish

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    def check(self) -> None:
        """Never a wrong token: a request that did not come to its end has the beginning of the right ones."""
        right = expected(self.prompt, self.digest, min(self.params.max_tokens, CONTEXT - len(self.prompt)))
        assert self.tokens == right[: len(self.tokens)]
        if self.finish.reason == "length":
            assert self.tokens == right


@dataclass
class World:
    """An engine over a fake device, and the choice of what ends next."""

    engine: Engine
    backend: FakeBackend
    reader: FakeReader
    metrics: _Metrics
    rng: random.Random
    read_failures: float = 0.0
    plan_failures: float = 0.0
    copy_failures: float = 0.0

    def ask(self, prompt: Sequence[int], name: str | None, **params: Any) -> tuple[Asked, "asyncio.Task[Asked]"]:
        settings = SamplingParams(**{"temperature": 0.0} | params)
        digest = None if name is None else self.engine.adapter(name).digest
        request = GenerateRequest("r", tuple(prompt), name, settings, arrival_s=0.0)
        asked = Asked(tuple(prompt), digest, settings, self.engine.submit(request))
        return asked, asyncio.create_task(asked.collect())

    def end_something(self) -> bool:
        """Ends one read, copy or iteration; False when there is none."""
        ways = [way for way in (self.reader.reads, self.backend.copies, self.backend.lane) if way]
        if not ways:
            return False
        way = self.rng.choice(ways)
        if way is self.backend.lane:
            self.backend.fail_next = self.rng.random() < self.plan_failures
            self.backend.step()
            self.backend.fail_next = False
        elif way is self.reader.reads:
            self.reader.reads.pop(self.rng.randrange(len(self.reader.reads)))(self.rng.random() >= self.read_failures)
        else:
            copied = self.rng.random() >= self.copy_failures
            self.backend.copies.pop(self.rng.randrange(len(self.backend.copies)))(copied)
        return True

    async def until_done(self, tasks: "Sequence[asyncio.Task[Asked]]") -> None:
        idle = 0
        while not all(task.done() for task in tasks):
            for _ in range(self.rng.randrange(1, 6)):
                await asyncio.sleep(0)
            idle = 0 if self.end_something() else idle + 1
            assert idle < MAX_IDLE_TURNS, "nothing is under way, and yet requests wait"

    async def settle(self) -> None:
        """Ends all that is under way."""
        for _ in range(MAX_IDLE_TURNS):
            await asyncio.sleep(0)
            while self.end_something():  # noqa: ASYNC110
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def world(
    rng: random.Random,
    *,
    adapters: int = 4,
    device_adapters: int = 2,
    blocks: int = 14,
    step_tokens: int = 16,
    slots: int = 5,
    exclusive: bool = False,
    keep_on_device: bool = False,
    mode: str = "overlapped",
) -> AsyncIterator[World]:
    limits = Limits(
        num_blocks=blocks,
        block_tokens=4,
        num_slots=slots,
        adapter_slots=device_adapters + 2,
        max_step_tokens=step_tokens,
        max_context=CONTEXT,
    )
    backend = FakeBackend(limits, layerwise=mode in LAYERWISE_MODES)
    reader, metrics = FakeReader(), _Metrics()
    loop = asyncio.get_running_loop()
    device_bytes, arena = device_adapters * ADAPTER_BYTES, Arena(aligned_bytes(4 * ADAPTER_BYTES))
    residency = Residency(
        backend,
        device_bytes,
        arena,
        reader.read,
        lambda call: loop.call_soon(call) and None,
        lambda: backend.now_s,
        Loading(mode, layers=1, link_bytes_per_s=ADAPTER_BYTES / 3, costs=_Costs(), workers=1),
    )
    registry = Registry(None)
    rules = CatalogRules("base", None, device_bytes, arena.num_bytes, keep_on_device)
    catalog = _Catalog(None, registry, residency, reader, rules)  # type: ignore[arg-type]
    catalog.add_at_start([(f"a{index}", Path(f"digest-{index}")) for index in range(adapters)], lambda: None)
    config = type("Config", (), {"max_queue": 10_000, "seed": 0, "enable_prefix_caching": True})
    engine = Engine(
        base_name="base",
        backend=backend,
        catalog=catalog,
        tokenizer=FakeTokenizer(),  # type: ignore[arg-type]
        config=config,  # type: ignore[arg-type]
        metrics=metrics,
        exclusive_loads=exclusive,
        merging=MergeRule(slots, credits_each=2.0) if mode == "merged" else None,  # credits are soon used up
        now=lambda: backend.now_s,
    )
    running = asyncio.create_task(engine.run())
    try:
        yield World(engine, backend, reader, metrics, rng)
        engine.check()
        snapshot = engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.kv_used_blocks) == (0, 0, 0)
        assert backend.faults == []
        if running.done():
            await running
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        reader.close()
        registry.close()


async def random_run(
    seed: int, *, plan_failures: float = 0.0, read_failures: float = 0.0, copy_failures: float = 0.0, **kind: Any
) -> int:
    """Random requests, arrivals, cancellations and failures; returns how often somebody was preempted."""
    rng = random.Random(seed)
    stems = [[rng.randrange(97) for _ in range(24)] for _ in range(2)]
    async with world(rng, **kind) as here:
        here.plan_failures, here.read_failures, here.copy_failures = plan_failures, read_failures, copy_failures
        asked, tasks = [], []
        for _ in range(rng.randrange(3, 16)):
            prompt = rng.choice(stems)[: rng.choice((0, 4, 9, 16, 24))] + [rng.randrange(97)] * rng.randrange(1, 8)
            name = rng.choice([None, "a0", "a1", "a2", "a3"])
            scores = 0 if rng.random() < 0.2 else None
            one, task = here.ask(prompt, name, max_tokens=rng.randrange(1, 22), prompt_logprobs=scores)
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
            one.check()
            if one.finish.reason == "length" and one.params.prompt_logprobs is not None and len(one.prompt) > 1:
                told = [entry for delta in one.deltas for entry in delta.prompt_logprobs]
                assert told[0] is None
                assert [entry.token_id for entry in told[1:] if entry] == list(one.prompt[1:])
            if one.finish.error is not None and not read_failures and not copy_failures:
                assert isinstance(one.finish.error, BackendFailed)
        return here.metrics.preemptions


KINDS = {
    "step_tokens": st.sampled_from([5, 7, 16, 64]),
    "blocks": st.integers(13, 24),
    "device_adapters": st.sampled_from([1, 2, 4]),
    "exclusive": st.booleans(),
    "mode": st.sampled_from(["overlapped", "pipelined", "assisted", "auto", "merged"]),
}
bounded = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@bounded
@given(seed=st.integers(0, 2**32), **KINDS)
def test_no_interleaving_changes_a_token(seed: int, **kind: Any) -> None:
    asyncio.run(random_run(seed, **kind))


@bounded
@given(seed=st.integers(0, 2**32), **KINDS)
def test_a_failed_read_costs_its_own_requests_only(seed: int, **kind: Any) -> None:
    asyncio.run(random_run(seed, read_failures=0.3, **kind))


@bounded
@given(seed=st.integers(0, 2**32), **KINDS)
def test_a_copy_that_fails_under_running_requests_costs_only_them(seed: int, **kind: Any) -> None:
    asyncio.run(random_run(seed, copy_failures=0.3, **kind))


@bounded
@given(seed=st.integers(0, 2**32), **KINDS)
def test_a_failed_iteration_never_gives_anybody_a_wrong_token(seed: int, **kind: Any) -> None:
    asyncio.run(random_run(seed, plan_failures=0.1, **kind))


def test_the_small_pool_does_force_preemption() -> None:
    """Otherwise the tests above would not cover it."""
    assert sum(asyncio.run(random_run(seed, blocks=13)) for seed in range(20)) > 5


def test_five_hundred_requests_leave_nothing_behind() -> None:
    async def body() -> None:
        rng = random.Random(5)
        async with world(rng) as here:
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

    asyncio.run(body())


def test_two_hundred_adapters_share_room_for_three() -> None:
    async def body() -> None:
        async with world(random.Random(6), adapters=200, device_adapters=3) as here:
            tasks = [here.ask([index % 97, 3], f"a{index}", max_tokens=3)[1] for index in range(200)]
            await here.until_done(tasks)
            await here.settle()
            for task in tasks:
                task.result().check()
                assert task.result().finish.reason == "length"

    asyncio.run(body())


@pytest.mark.parametrize("seed", range(5))
def test_an_adapter_replaced_in_place_keeps_its_old_version_for_those_who_asked_before(seed: int) -> None:
    async def body() -> None:
        async with world(random.Random(seed)) as here:
            prompt = list(range(20))
            before, first = here.ask(prompt, "a0", max_tokens=12)
            await here.engine.load_adapter("a0", "digest-new", inplace=True)
            after, second = here.ask(prompt, "a0", max_tokens=12)
            await here.until_done([first, second])
            await here.settle()
            assert (before.digest, after.digest) == ("digest-0", "digest-new")
            before.check()
            after.check()

    asyncio.run(body())


def test_nothing_is_launched_while_a_load_is_under_way_when_loads_are_exclusive() -> None:
    async def body() -> None:
        async with world(random.Random(8), exclusive=True) as here:
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

    asyncio.run(body())


def test_an_adapter_whose_only_request_left_while_it_was_copied_gives_way_to_the_next() -> None:
    async def body() -> None:
        async with world(random.Random(9), device_adapters=1) as here:
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

    asyncio.run(body())


def test_a_request_that_found_blocks_of_an_iteration_that_then_failed_never_goes_on_with_them() -> None:
    async def body() -> None:
        async with world(random.Random(10), step_tokens=8) as here:
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

    asyncio.run(body())
