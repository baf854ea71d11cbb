"""The lists of models, for clients with different rights, and of the cluster's adapters: complete, in order, not
computed twice, and without blocking the event loop."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import pytest
from aiohttp import web

from caraserve.cluster.membership.swim import MemberRecord
from caraserve.cluster.state.replicated_map import InstanceLoad, RegisteredAdapter, Tier
from caraserve.http.app import make_app
from caraserve.http.client import Client as Sender
from caraserve.http.context import CONTEXT
from caraserve.http.management import model_list
from caraserve.http.management.model_list import MODELS
from caraserve.lora.aliases import Aliases
from caraserve.lora.management import AdapterManagement
from caraserve.lora.registry import Registry, Setting
from caraserve.lora.replicated_settings import ReplicatedSettings
from tests.http.fake_engine import FakeAdapter, FakeEngine
from tests.http.serving import Client, http_config, new_metrics, serving

NAMES = [f"{team}-{number}" for number in range(40) for team in ("sql", "Sql", "sq", "law", "x:y")]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(loaded={name: FakeAdapter(name, f"/{name}") for name in NAMES})


@pytest.fixture
def app(engine: FakeEngine) -> web.Application:
    return make_app(engine, http_config(), new_metrics(), allow_lora_updates=False)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the adapters whose cards were encoded."""
    names: list[str] = []
    card = model_list.adapter_card

    def note(context: Any, adapter: Any, *, shows_path: bool) -> dict[str, Any]:
        names.append(adapter.name)
        return card(context, adapter, shows_path=shows_path)

    monkeypatch.setattr(model_list, "adapter_card", note)
    return names


async def listed(app: web.Application, *patterns: str, base_model: bool = True) -> list[str]:
    client = Sender("c", adapters=patterns, base_model=base_model)
    body = await app[MODELS].body(app[CONTEXT], client)
    return [card["id"] for card in json.loads(body)["data"]]


async def test_every_kind_of_pattern_lists_what_requests_may_use_in_the_order_of_the_adapters(
    app: web.Application,
) -> None:
    for patterns in (
        *("*", "sql-*", "sql-1 law-2", "law-2 sql-1", "sql-1 sql-* s*", "absent", "absent*", "*-1?", "?ql-3"),
        *("sql-[12]*", "sql-[!1]", "s[q]l-1", "[ x:y-3", "", "sq*", "z* *"),
    ):
        client = Sender("c", adapters=tuple(patterns.split(" ")))
        assert await listed(app, *client.adapters) == ["org/base", *filter(client.may_use, NAMES)]
    assert await listed(app, "law-2", base_model=False) == ["law-2"]


async def test_an_alias_is_listed_for_clients_of_the_adapter_that_it_stands_for_now(engine: FakeEngine) -> None:
    settings, nothing = ReplicatedSettings(Registry(None)), cast(Any, None)
    aliases = Aliases(settings, lambda name: name in engine.loaded)
    await aliases.point("prod", "sql-1")
    # Another instance has switched it to an adapter that is not known here yet.
    settings.merge([Setting("alias", "prod", '{"adapter": "sql-new", "previous": "sql-1"}', 1 << 61, "b")])
    management = AdapterManagement(nothing, aliases, nothing)
    app = make_app(engine, http_config(), new_metrics(), allow_lora_updates=False, management=management)
    assert await listed(app, "sql-1") == ["org/base", "sql-1", "prod"]
    assert await listed(app, "sql-new") == ["org/base"]
    await settings.close()


async def test_cards_are_encoded_once_for_any_number_of_sets_of_rights(
    app: web.Application, encoded: list[str]
) -> None:
    for number in range(40):
        assert len(await listed(app, f"*-{number}")) == 6
    assert encoded == NAMES


async def test_after_a_change_only_new_cards_are_encoded(
    app: web.Application, engine: FakeEngine, encoded: list[str]
) -> None:
    await listed(app, "*")
    encoded.clear()
    del engine.loaded["law-1"]
    engine.loaded["law-2"] = FakeAdapter("law-2", "/elsewhere")
    engine.loaded["law-new"] = FakeAdapter("law-new", "/new")
    assert set(await listed(app, "law-*")) == {"org/base", "law-new", *(name for name in NAMES if "law" in name)} - {
        "law-1"
    }
    assert encoded == ["law-2", "law-new"]


async def test_lists_beyond_the_bound_of_bytes_are_dropped_the_least_recently_used_first(
    app: web.Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(pattern: str) -> bytes:
        return await app[MODELS].body(app[CONTEXT], Sender("c", adapters=(pattern,)))

    one, two = await body("law-1"), await body("law-2")
    monkeypatch.setattr(model_list, "_MOST_BYTES", len(one) + len(two))
    assert await body("law-1") is one
    await body("law-3")
    assert await body("law-1") is one
    assert await body("law-2") is not two


# --- the cluster's adapters ---


class Cluster:
    """A cluster with so many adapters, each on one instance.

    It counts how often the next adapter and holders are requested without a pause in between.
    """

    name = "a"
    registry_version = 1

    def __init__(self, count: int) -> None:
        self._count = count
        self.asked = self.most_asked = 0

    def pause(self) -> None:
        self.most_asked, self.asked = max(self.most_asked, self.asked), 0

    def members(self) -> tuple[MemberRecord, ...]:
        return ()

    def load(self, name: str) -> tuple[InstanceLoad, float] | None:
        return None

    def adapters(self) -> Iterator[RegisteredAdapter]:
        for index in reversed(range(self._count)):
            self.asked += 1
            yield RegisteredAdapter(f"adapter-{index}", f"digest-{index}", 8, 100)

    def adapter(self, name: str) -> RegisteredAdapter | None:
        return None

    def uploads(self, name: str) -> dict[str, RegisteredAdapter]:
        return {}

    def holders(self, digest: str) -> Mapping[str, Tier]:
        self.asked += 1
        return {"b": Tier.HOST}

    def remove(self, name: str) -> None:
        raise AssertionError("nothing is removed by looking")


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 5000])
async def test_all_adapters_are_listed_by_name_with_their_holders(count: int) -> None:
    async with serving(FakeEngine(), cluster=Cluster(count)) as client:
        answer = await client.get("/v1/cluster/adapters")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    listed = answer.json
    assert listed["object"] == "list"
    assert [one["name"] for one in listed["data"]] == sorted(f"adapter-{index}" for index in range(count))
    for one in listed["data"]:
        digest = one["name"].replace("adapter", "digest")
        assert one == {"name": one["name"], "digest": digest, "rank": 8, "num_bytes": 100, "holders": {"b": "host"}}


async def test_a_server_without_peers_lists_no_instances(client: Client) -> None:
    assert (await client.get("/v1/cluster/adapters")).json == {"object": "list", "data": []}


async def test_listing_many_adapters_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraserve.util.tasks._TURN_S", 0.0)
    cluster = Cluster(5000)

    async def take_turns() -> None:
        while True:
            cluster.pause()
            await asyncio.sleep(0)

    async with serving(FakeEngine(), cluster=cluster) as client:
        turns = asyncio.create_task(take_turns())
        await client.get("/v1/cluster/adapters")
        turns.cancel()
        with suppress(asyncio.CancelledError):
            await turns
    assert 0 < cluster.most_asked <= 100
