"""Publishing one engine's load, speed and adapters, and applying registry changes of other instances."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from caraserve import demo
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import DriftWatch, PerfModel
from caraserve.cluster.routing.publisher import Publisher
from caraserve.cluster.state.replicated_map import RegisteredAdapter, Tier
from caraserve.core.machine_profile import load
from caraserve.engine.stats import EngineObservers
from caraserve.loop import Engine
from tests.cluster.nodes import Instances, instances, until
from tests.serving import PROFILE, engine_config, lora_config, model_config, running, submit

PROMPT = tuple(range(5, 45))
ADAPTERS = {name: demo.adapters_folder() / name for name in ("poet", "chef")}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """The first engine on a machine compiles kernels, for longer than a coroutine's test may take."""

    async def body() -> None:
        async with running(model_config(demo.model_folder()), lora_config({}), engine_config(seqs=2)):
            pass

    asyncio.run(body())


@asynccontextmanager
async def published(folder: Path) -> AsyncIterator[tuple[Engine, Publisher, Instances]]:
    """Instance a has an engine and two adapters; b is in the cluster and has none."""
    observers = EngineObservers()
    lora = lora_config(ADAPTERS, adapters_dir=demo.adapters_folder(), mode="overlapped")
    lora.lora_modules[:] = [module for module in lora.lora_modules if module.name in ADAPTERS]
    async with (
        running(model_config(demo.model_folder()), lora, engine_config(seqs=2), observers) as engine,
        instances(folder) as group,
    ):
        a = await group.start("a")
        publisher = Publisher(a.member, engine, lambda: (0, 0), DriftWatch(load(PROFILE)), LinkSpeeds())
        a.handlers.current_load, a.handlers.on_registry_change = (
            publisher.current_load,
            publisher.apply_registry_changes,
        )
        observers.adapters.append(publisher.changed)
        observers.iterations.append(publisher.watch)
        await publisher.announce()
        await group.start("b")
        await until(group.agree)
        yield engine, publisher, group


async def test_other_instances_receive_adapters_and_the_performance_model(tmp_path: Path) -> None:
    async with published(tmp_path) as (engine, _, group):
        b, views = group.running["b"].member, group.running["b"].views
        poet = engine.adapter("poet")
        expected = RegisteredAdapter("poet", poet.digest, poet.rank, poet.num_bytes, poet.facts)
        await until(lambda: b.adapter("poet") == expected)
        await until(lambda: b.holders(poet.digest) == {"a": Tier.DISK})
        await until(lambda: [one.model for one in views.instances()] == [PerfModel.of(load(PROFILE))])
        await engine.unload_adapter("poet")
        await until(lambda: b.adapter("poet") is None)


async def test_other_instances_learn_in_which_cache_an_adapter_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caraserve.cluster.routing.publisher._HOLDINGS_S", 0.01)
    async with published(tmp_path) as (engine, publisher, group):
        b, manager = group.running["b"].member, engine.catalog.manager
        digest = engine.adapter("poet").digest
        publishing = asyncio.create_task(publisher.run())
        manager.prefetch(adapter := engine.catalog.pin("poet"))
        await until(lambda: b.holders(digest) == {"a": Tier.HOST})
        publisher.withdraw(digest)
        await until(lambda: b.holders(digest) == {})
        publisher.advertise(digest, Tier.DISK)  # it is in the host cache already
        await until(lambda: b.holders(digest) == {"a": Tier.HOST})
        await submit(engine, PROMPT, "poet", max_tokens=1)
        await until(lambda: b.holders(digest) == {"a": Tier.DEVICE})
        manager.device_loader.drop(adapter)
        manager._host_loader.evict(digest)
        await until(lambda: b.holders(digest) == {"a": Tier.DISK})
        publishing.cancel()


async def test_names_removed_by_others_are_unloaded_and_new_ones_wanted(tmp_path: Path) -> None:
    async with published(tmp_path) as (engine, publisher, group):
        wanted: list[RegisteredAdapter] = []
        publisher._on_wanted = wanted.append
        b = group.running["b"].member
        await until(lambda: b.adapter("chef") is not None)
        b.remove("chef")
        await until(lambda: [info.name for info in engine.adapters()].count("chef") == 0)
        b.register(RegisteredAdapter("new", "d" * 64, 8, 1))
        await until(lambda: wanted == [RegisteredAdapter("new", "d" * 64, 8, 1)])


@pytest.mark.parametrize("asked_for", [False, True])
async def test_a_folder_that_is_only_present_does_not_restore_a_removed_name(tmp_path: Path, asked_for: bool) -> None:
    lora = lora_config(ADAPTERS if asked_for else {}, adapters_dir=demo.adapters_folder(), mode="overlapped")
    removed_s = time.time()
    async with instances(tmp_path) as group:
        a = (await group.start("a")).member
        a.register(RegisteredAdapter("poet", "d" * 64, 8, 1))
        a.remove("poet")
        async with running(model_config(demo.model_folder()), lora, engine_config(seqs=2)) as engine:
            assert (engine.adapter("poet").created_s < removed_s) is not asked_for
            await Publisher(a, engine, lambda: (0, 0), None, LinkSpeeds()).announce()
            if asked_for:
                assert a.adapter("poet") is not None
            else:
                await until(lambda: "poet" not in {info.name for info in engine.adapters()})
                assert a.adapter("poet") is None


async def test_an_unexpected_error_of_an_unload_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(name: str, is_wanted: object) -> None:
        raise ZeroDivisionError(name)

    async with published(tmp_path) as (engine, publisher, _):
        monkeypatch.setattr(engine, "unload_adapter", broken)
        publisher.apply_registry_changes({"chef": None})
        await until(lambda: "has stopped" in caplog.text)
        assert "ZeroDivisionError: chef" in caplog.text


async def test_a_load_counts_running_and_queued_requests(tmp_path: Path) -> None:
    async with published(tmp_path) as (engine, publisher, _):
        ranks = {name: engine.adapter(name).rank for name in ADAPTERS}
        tasks = [submit(engine, PROMPT, name, max_tokens=2) for name in ("poet", "poet", "chef", None)]
        await asyncio.sleep(0)
        said = publisher.current_load(0.0)
        assert said.running + said.queued == 4
        assert dict(said.ranks) == {0: 1, ranks["poet"]: 2, ranks["chef"]: 1}
        assert said.queued_tokens == 4 * len(PROMPT)
        assert said.queued_token_ranks == len(PROMPT) * (2 * ranks["poet"] + ranks["chef"])
        assert said.kv_free_tokens < said.kv_tokens - said.queued_tokens
        await asyncio.gather(*tasks)
        idle = publisher.current_load(0.0)
        assert (idle.running, idle.queued, idle.ranks, idle.queued_tokens) == (0, 0, (), 0)
        assert idle.kv_free_tokens == idle.kv_tokens


async def test_an_instance_whose_device_has_failed_is_draining(tmp_path: Path) -> None:
    async with published(tmp_path) as (engine, publisher, _):
        assert publisher.current_load(0.0).status == "serving"
        engine.failure = "out of its bus"
        assert publisher.current_load(0.0).status == "draining"


async def test_predicted_and_observed_times_are_exported(tmp_path: Path) -> None:
    async with published(tmp_path) as (engine, publisher, _):
        await submit(engine, PROMPT, "poet", max_tokens=10)
        values = {}
        for line in "".join(publisher.families('x="y"')).splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        for phase in ("decode", "prefill"):
            for kind in ("predicted", "observed"):
                assert values[f'caraserve:{kind}_iteration_seconds_total{{phase="{phase}",x="y"}}'] > 0
