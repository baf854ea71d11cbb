"""The composition of a server's parts when it is one instance of a fleet."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.member import Member, MemberConfig
from caraserve.cluster.node import LocalParts, Node, drift_of, link_speeds, make_selector
from caraserve.cluster.routing.advertised import InstanceViews
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.publisher import Publisher
from caraserve.cluster.state.persistence import ClusterRegistryFile
from caraserve.config import ClusterConfig, LoraConfig
from caraserve.core.machine_profile import Profile, load
from caraserve.engine.stats import EngineLoad, EngineObservers
from caraserve.http.dispatch import ANSWERING_QUESTION, ClusterRouter
from caraserve.lora.registry import AdapterInfo, Registry
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.serve_cluster import ClusterCredentials, make_router
from tests.cluster.nodes import instances

PROFILE = Path(__file__).parent / "profile.json"
KEYS = Keyring((b"a secret of the tests",))
CLUSTER = ClusterConfig(peers=("127.0.0.1:1",))


@pytest.mark.parametrize(
    ("draining", "failure", "reason"), [(False, None, None), (True, None, "draining"), (False, "gone", "draining")]
)
async def test_a_draining_or_failed_instance_refuses_forwarded_requests(
    tmp_path: Path, draining: bool, failure: str | None, reason: str | None
) -> None:
    catalog = SimpleNamespace(find=lambda name: None)
    engine: Any = SimpleNamespace(draining=draining, failure=failure, catalog=catalog)
    async with asyncio.timeout(20), instances(tmp_path) as running:
        one = await running.start("a")
        selector = make_selector(one.member, one.views, engine, CLUSTER, None)
        refusal = selector.refusal(selector.arrival(None, 10, 10), force=True)
        assert (refusal.reason if refusal else None) == reason


@asynccontextmanager
async def prepared(
    infos: dict[str, AdapterInfo],
) -> AsyncIterator[tuple[Member, ClusterRouter, Callable[..., Awaitable[Any]]]]:
    """Yields a member that has not joined yet, its router, and a function that makes it join as `serve` does."""
    manager = SimpleNamespace(on_move=lambda report: None)
    catalog = SimpleNamespace(all=lambda: list(infos.values()), find=infos.get, find_whole=infos.get, manager=manager)
    work = EngineLoad(0, 0, {}, 0, 0, 1000, 1000, 10)
    engine: Any = SimpleNamespace(draining=False, failure=None, catalog=catalog, workload=lambda tokens: work)
    metrics: Any = SimpleNamespace(answers=lambda: (0, 0), show=lambda families: None)
    async with AsyncExitStack() as stack:
        member = Member(
            MemberConfig("tests", "a", "m", ("127.0.0.1:1",), KEYS), ClusterRegistryFile(None), rng=Random(1)
        )
        stack.push_async_callback(member.close)
        config, views = CLUSTER, InstanceViews(member)
        selector = make_selector(member, views, engine, config, None)
        router = make_router(member, selector, engine, ClusterCredentials(KEYS))
        stack.push_async_callback(router.close)

        async def join_it(accounting_begins: Callable[[], None], profile: Profile | None, lora: LoraConfig) -> None:
            pool: Any = SimpleNamespace(
                on_holders_change=lambda: None,
                begin=accounting_begins,
                changed=lambda name, info: None,
                run=lambda: asyncio.sleep(60),
                families=None,
                store=SimpleNamespace(answer=None),
            )
            removal: Any = SimpleNamespace(removed=lambda name, digest: None, answer=None)
            settings, none = ReplicatedSettings(Registry(None)), cast(Any, None)
            local = LocalParts(engine, EngineObservers(), none, settings, none, none, "m", profile, metrics)
            drift = drift_of(profile, lora)
            publisher = Publisher(member, engine, metrics.answers, drift, link_speeds(profile, lora))
            node = Node(config, lora, local, member, publisher, pool, removal, selector, None)
            answers = {ANSWERING_QUESTION: router.answer_query}
            await node.join(stack, "127.0.0.1:1", lambda record: None, answers)

        yield member, router, join_it


@pytest.mark.parametrize(("kernel", "rank"), [("bgmv", None), ("bgmv-padded", 64)])
async def test_the_published_model_uses_the_rank_that_the_kernels_compute(kernel: str, rank: int | None) -> None:
    config = LoraConfig(lora_kernel=kernel)
    profile = load(PROFILE)
    async with prepared({}) as (member, _, join_it):
        await join_it(lambda: None, profile, config)
        (instance,) = InstanceViews(member).instances()
        assert instance.model == PerfModel.of(profile, padded_rank=rank)


async def test_an_instance_says_which_forwarded_requests_it_still_answers() -> None:
    async with prepared({}) as (member, router, join_it):
        await join_it(lambda: None, None, LoraConfig())
        question = ANSWERING_QUESTION, "id", 1
        assert member._listener.answer_query("b", question) == (0,)
        router._answering.add(("b", "id", 1))
        assert member._listener.answer_query("b", question) == (1,)
        assert member._listener.answer_query("c", question) == (0,)
        assert member._listener.answer_query("c", ()) == ()


async def test_accounting_begins_before_adapters_are_announced_and_forwarding_after() -> None:
    infos = {f"n{index}": AdapterInfo(f"n{index}", f"d{index}", "", 8, (), 10, created_s=0.0) for index in range(500)}
    async with prepared(infos) as (member, router, join_it):
        found: list[tuple[int, bool]] = []

        def accounting_begins() -> None:
            found.append((sum(1 for _ in member.adapters()), router.selector.joined))

        await join_it(accounting_begins, None, LoraConfig())
        assert found == [(0, False)]
        assert sum(1 for _ in member.adapters()) == len(infos)
        assert router.selector.joined
        assert 'task="cluster publisher"' in "".join(member.background.families(""))
