"""The composition of a server's parts when it is one instance of a fleet."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.node import Node, NodeConfig
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.state.persistence import ClusterRegistryFile
from caraserve.cluster.state.shared_settings import SharedSettings
from caraserve.config import ClusterConfig, LoraConfig
from caraserve.core.machine_profile import Profile, load
from caraserve.engine.stats import EngineLoad, EngineObservers
from caraserve.http.dispatch import ANSWERING_QUESTION, ClusterRouter
from caraserve.lora.registry import AdapterInfo, Registry
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.serve_cluster import ClusterCredentials, ClusterInstance, make_router
from tests.cluster.nodes import instances

PROFILE = Path(__file__).parent / "profile.json"
KEYS = Keyring((b"a secret of the tests",))


def cluster_config() -> ClusterConfig:
    parser = argparse.ArgumentParser()
    ClusterConfig.add_arguments(parser)
    return ClusterConfig.from_args(parser.parse_args(["--peers", "127.0.0.1:1"]))


def lora_config(*arguments: str) -> LoraConfig:
    parser = argparse.ArgumentParser()
    LoraConfig.add_arguments(parser)
    return LoraConfig.from_args(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("draining", "failure", "reason"), [(False, None, None), (True, None, "draining"), (False, "gone", "draining")]
)
async def test_a_draining_or_failed_instance_refuses_forwarded_requests(
    tmp_path: Path, draining: bool, failure: str | None, reason: str | None
) -> None:
    config = cluster_config()
    catalog = SimpleNamespace(find=lambda name: None)
    engine: Any = SimpleNamespace(draining=draining, failure=failure, catalog=catalog)
    async with asyncio.timeout(20), instances(tmp_path) as running:
        node = (await running.start("a")).node
        router = make_router(node, engine, config, ClusterCredentials(KEYS))
        try:
            refusal = router.selector.refusal(router.selector.arrival(None, 10, 10), force=True)
            assert (refusal.reason if refusal else None) == reason
        finally:
            await router.close()


@asynccontextmanager
async def prepared(
    infos: dict[str, AdapterInfo],
) -> AsyncIterator[tuple[Node, ClusterRouter, Callable[..., Awaitable[Any]]]]:
    """Yields a node that has not joined yet, its router, and a function that makes it join as `serve` does."""
    manager = SimpleNamespace(on_move=lambda report: None)
    catalog = SimpleNamespace(all=lambda: list(infos.values()), find=infos.get, find_whole=infos.get, manager=manager)
    work = EngineLoad(0, 0, {}, 0, 0, 1000, 1000, 10)
    engine: Any = SimpleNamespace(draining=False, failure=None, catalog=catalog, workload=lambda tokens: work)
    metrics: Any = SimpleNamespace(answers=lambda: (0, 0), show=lambda families: None)
    async with AsyncExitStack() as stack:
        node = Node(NodeConfig("tests", "a", "m", ("127.0.0.1:1",), KEYS), ClusterRegistryFile(None), rng=Random(1))
        stack.push_async_callback(node.close)
        config, credentials = cluster_config(), ClusterCredentials(KEYS)
        router = make_router(node, engine, config, credentials)
        stack.push_async_callback(router.close)

        async def join_it(accounting_begins: Callable[..., None], profile: Profile | None, lora: LoraConfig) -> None:
            pool: Any = SimpleNamespace(
                adopt=lambda adapter: None,
                on_holders_change=lambda: None,
                begin=accounting_begins,
                changed=lambda name, info: None,
                run=lambda: asyncio.sleep(60),
                families=None,
            )
            settings = SharedSettings(node, ReplicatedSettings(Registry(None)))
            removal: Any = SimpleNamespace(removed=lambda name, digest: None)
            parts = (config, lora, credentials, engine, EngineObservers(), node, pool, settings, router, None, removal)
            await ClusterInstance(*parts).join(stack, metrics, profile, "127.0.0.1", 1)

        yield node, router, join_it


@pytest.mark.parametrize(("kernel", "rank"), [("bgmv", None), ("bgmv-padded", 64)])
async def test_the_published_model_uses_the_rank_that_the_kernels_compute(kernel: str, rank: int | None) -> None:
    config = lora_config("--lora-kernel", kernel)
    profile = load(PROFILE)
    async with prepared({}) as (node, _, join_it):
        await join_it(lambda *parts: None, profile, config)
        (instance,) = node.instances()
        assert instance.model == PerfModel.of(profile, padded_rank=rank)


async def test_an_instance_says_which_forwarded_requests_it_still_answers() -> None:
    async with prepared({}) as (node, router, join_it):
        await join_it(lambda *parts: None, None, lora_config())
        question = ANSWERING_QUESTION, "id", 1
        assert node._listener.answer_query("b", question) == (0,)
        router._answering.add(("b", "id", 1))
        assert node._listener.answer_query("b", question) == (1,)
        assert node._listener.answer_query("c", question) == (0,)


async def test_accounting_begins_before_adapters_are_announced_and_forwarding_after() -> None:
    infos = {f"n{index}": AdapterInfo(f"n{index}", f"d{index}", "", 8, (), 10, created_s=0.0) for index in range(500)}
    async with prepared(infos) as (node, router, join_it):
        found: list[tuple[int, bool]] = []

        def accounting_begins(*parts: object) -> None:
            found.append((sum(1 for _ in node.adapters()), router.selector.joined))

        await join_it(accounting_begins, None, lora_config())
        assert found == [(0, False)]
        assert sum(1 for _ in node.adapters()) == len(infos)
        assert router.selector.joined
        assert 'task="cluster publisher"' in "".join(node.background.families(""))
