"""An instance that starts with thousands of adapters registers them, while its event loop stays responsive."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.cluster.membership.member import Member
from caraserve.cluster.routing.advertised import MODEL
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import DriftWatch
from caraserve.cluster.routing.publisher import Publisher
from caraserve.cluster.state.replicated_map import RegisteredAdapter, Tier
from caraserve.core.machine_profile import load
from caraserve.lora.registry import AdapterInfo
from tests.cluster.nodes import Instances
from tests.serving import PROFILE

COUNT = 3000


class Catalog:
    """The part of a catalog that a publisher needs."""

    def __init__(self) -> None:
        names = [f"n{index}" for index in range(COUNT)]
        self.infos = {name: AdapterInfo(name, f"d-{name}", "", 8, (), 10, created_s=0.0) for name in names}
        self.manager = SimpleNamespace(on_move=lambda report: None)

    def all(self) -> list[AdapterInfo]:
        return list(self.infos.values())

    def find_whole(self, name: str) -> AdapterInfo | None:
        return self.infos.get(name)


def publisher_of(
    node: Member, catalog: Catalog, on_wanted: Callable[[RegisteredAdapter], None] = lambda adapter: None
) -> Publisher:
    engine: Any = SimpleNamespace(catalog=catalog)
    return Publisher(node, engine, lambda: (0, 0), DriftWatch(load(PROFILE)), LinkSpeeds(), on_wanted)


async def test_other_tasks_run_while_all_adapters_are_announced(running: Instances) -> None:
    node = (await running.start("a")).member
    seen: set[int] = set()

    async def look() -> None:
        while True:
            seen.add(node.registry_version)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await publisher_of(node, Catalog()).announce()
    looking.cancel()
    assert seen - {0, node.registry_version}  # some of its names, and not yet all
    assert {adapter.name: adapter.digest for adapter in node.adapters()} == {
        f"n{index}": f"d-n{index}" for index in range(COUNT)
    }
    assert node.holders("d-n7") == {"a": Tier.DISK}


async def test_the_speed_is_advertised_after_all_adapters(running: Instances, monkeypatch: pytest.MonkeyPatch) -> None:
    node = (await running.start("a")).member
    known: list[int] = []
    monkeypatch.setattr(node, "advertise", lambda key, value: key == MODEL and known.append(len([*node.adapters()])))
    await publisher_of(node, Catalog()).announce()
    assert known == [COUNT]


async def test_changes_during_the_announcement_are_kept(running: Instances) -> None:
    node, catalog = (await running.start("a")).member, Catalog()
    publisher = publisher_of(node, catalog)

    async def change() -> None:
        assert node.adapter("n2998") is None
        del catalog.infos["n2998"]
        publisher.changed("n2998", None)
        catalog.infos["n2999"] = replace(catalog.infos["n2999"], digest="new")
        publisher.changed("n2999", catalog.infos["n2999"])

    changing = asyncio.create_task(change())
    await publisher.announce()
    await changing
    assert node.adapter("n2998") is None
    assert (adapter := node.adapter("n2999")) is not None
    assert adapter.digest == "new"


async def test_older_entries_of_the_cluster_do_not_replace_loaded_adapters(running: Instances) -> None:
    """Checks it for entries that arrive while names wait to be announced."""
    node, catalog = (await running.start("a")).member, Catalog()
    wanted: list[RegisteredAdapter] = []
    publisher = publisher_of(node, catalog, wanted.append)

    async def hear() -> None:
        assert node.adapter("n2998") is None
        older = RegisteredAdapter("n2999", "a" * 64, 8, 10)
        publisher.apply_registry_changes({"n2998": None, "n2999": older})

    hearing = asyncio.create_task(hear())
    await publisher.announce()
    await hearing
    assert wanted == []
    assert (kept := node.adapter("n2998")) is not None
    assert kept.digest == "d-n2998"


async def test_after_the_announcement_changes_of_others_are_applied(running: Instances) -> None:
    wanted: list[RegisteredAdapter] = []
    publisher = publisher_of((await running.start("a")).member, Catalog(), wanted.append)
    await publisher.announce()
    publisher.apply_registry_changes({"n2999": (newer := RegisteredAdapter("n2999", "b" * 64, 8, 10))})
    assert wanted == [newer]
