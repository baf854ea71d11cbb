"""PATCH /v1/adapters/NAME: labels, pins and defaults of requests, their bounds, and how long they last."""

import asyncio
import json
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from caraserve.errors import CaraServeError
from caraserve.lora.registry import Registry, Setting
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.util.hybrid_clock import hlc_of
from tests.cluster.nodes import until
from tests.http.fleet import View, World
from tests.http.managed import serving
from tests.http.serving import Answer, Client, wrong
from tests.lora.folders import write_adapter
from tests.lora.uploads import Receiver

DEFAULTS = {"chat_template": "{{ messages[0]['content'] }}", "stop": ["\n\n"], "sampling": {"temperature": 0.5}}
DAMAGED: tuple[dict[str, Any], ...] = (
    {"labels": 7},
    {"labels": {"team": "x" * 257}},
    {"labels": {"no team": "x"}},
    {"labels": {f"l{number}": "x" for number in range(33)}},
    {"pinned": "disk"},
    {"chat_template": 1},
    {"stop": [""]},
    {"sampling": {"temperature": "hot"}},
    {"sampling": {"best": 1}},
)


async def load(receiver: Receiver, name: str) -> None:
    write_adapter(receiver.root / name)
    await receiver.catalog.load(name, name, inplace=True)


async def patch(client: Client, name: str, **fields: Any) -> Answer:
    return await client.request("PATCH", f"/v1/adapters/{name}", json=fields)


async def test_labels_and_pins_are_shown_and_changed_one_by_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, receiver):
        await load(receiver, "a")
        assert (await patch(client, "a", labels={"team": "search", "app/stage": "prod"})).status == 200
        assert (await patch(client, "a", pinned="device")).status == 200
        card = (await client.get("/v1/adapters/a")).json
        assert (card["labels"], card["pinned"]) == ({"team": "search", "app/stage": "prod"}, "device")
        assert (await patch(client, "a", labels={}, pinned="no")).json["labels"] == {}
        card = (await client.get("/v1/adapters/a")).json
        assert (card["labels"], card["pinned"]) == ({}, None)


async def test_the_table_of_the_page_has_labels_pins_and_whether_there_is_a_chat_template(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, receiver):
        for name in "ab":
            await load(receiver, name)
        await patch(client, "b", labels={"team": "search"}, pinned="host", chat_template=DEFAULTS["chat_template"])
        adapters = (await client.get("/stats/adapters")).json["adapters"]
        shown = {one["name"]: (one["labels"], one["pinned"], one["own_chat_template"]) for one in adapters}
        assert shown == {"a": ({}, None, False), "b": ({"team": "search"}, "host", True)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *wrong("pinned", "disk", True),
        *wrong("labels", ["a"], {"a": 1}, {"": "x"}, {"a b": "x"}, {"a": "x" * 257}),
        *wrong("labels", {f"a{number}": "" for number in range(33)}),
        ({"label": {}}, "label"),
        *wrong("chat_template", 1, "ä" * 32769),
        *wrong("stop", [""], {"a": 1}),
        ({"sampling": [1]}, "sampling"),
        ({"sampling": {"temperature": 101}}, "sampling.temperature"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"seed": 1}}, "sampling.seed"),
        ({"temperature": 1}, "temperature"),
        ({"seed": 1}, "seed"),
    ],
    ids=[
        *("tier", "type", "list", "number", "empty", "space", "long", "many", "misspelt"),
        *("template-type", "template-size", "stop-empty", "stop-type", "sampling-type", "sampling-bound"),
        *("sampling-least", "sampling-unknown", "outside", "no-default"),
    ],
)
async def test_what_is_not_a_setting_is_refused_and_changes_nothing(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async with serving(tmp_path) as (client, receiver):
        await load(receiver, "a")
        answer = await patch(client, "a", **fields)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert (await client.get("/v1/adapters/a")).json["labels"] == {}
        assert (await patch(client, "absent", labels={})).status == 404


async def test_an_unknown_field_is_refused_by_what_can_be_set_so_that_nothing_looks_done(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, receiver):
        await load(receiver, "a")
        for fields, message in (
            ({"foo": 1}, "Unknown field 'foo'; this route takes labels, pinned, chat_template, stop, sampling."),
            ({"lora_foo": None}, "Unknown field 'lora_foo'; this route takes labels"),
            ({"chat_templat": None}, "Unknown field 'chat_templat'; did you mean 'chat_template'?"),
            ({"temperature": None}, "temperature is not supported by this server; send it in sampling."),
        ):
            answer = await patch(client, "a", labels={"n": "1"}, **fields)
            assert (answer.status, answer.error["param"]) == (400, next(iter(fields)))
            assert answer.error["message"].startswith(message)
        assert (await client.get("/v1/adapters/a")).json["labels"] == {}
        pointed = await client.request("PUT", "/v1/aliases/prod", json={"adapter": "a", "foo": 1})
        assert (pointed.status, pointed.error["message"]) == (400, "Unknown field 'foo'; this route takes adapter.")


async def test_defaults_are_shown_and_changed_one_by_one_and_a_null_ends_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, receiver):
        await load(receiver, "a")
        nothing = dict.fromkeys(DEFAULTS)
        assert nothing.items() <= (await client.get("/v1/adapters/a")).json.items()
        for name, value in DEFAULTS.items():
            answer = await patch(client, "a", **{name: value})
            assert (answer.status, answer.json[name]) == (200, value)
        assert DEFAULTS.items() <= (await client.get("/v1/adapters/a")).json.items()
        for name in DEFAULTS:
            assert (await patch(client, "a", **{name: None})).json[name] is None
        await patch(client, "a", **DEFAULTS)
        await client.request("DELETE", "/v1/adapters/a")
        await load(receiver, "a")
        assert nothing.items() <= (await client.get("/v1/adapters/a")).json.items()


async def test_all_changes_of_one_request_are_written_together_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(registry: Registry, settings: Iterable[Setting], forgotten: object) -> None:
        written.extend(settings)
        raise CaraServeError("the disk is full")

    written: list[Setting] = []
    changes = DEFAULTS | {"labels": {"team": "search"}, "pinned": "host"}
    async with serving(tmp_path) as (client, receiver):
        await load(receiver, "a")
        before = (await client.get("/v1/adapters/a")).json
        with monkeypatch.context() as patched:
            patched.setattr(Registry, "put_settings", fail)
            assert (await patch(client, "a", **changes)).status == 500
        assert [json.loads(one.text or "{}").items() >= changes.items() for one in written] == [True]
        assert (await client.get("/v1/adapters/a")).json == before
        assert (await patch(client, "a", **changes)).status == 200
        assert changes.items() <= (await client.get("/v1/adapters/a")).json.items()


async def test_at_most_half_of_a_cache_is_pinned(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, receiver):
        names = [f"a{number}" for number in range(3)]
        for number, name in enumerate(names):
            write_adapter(receiver.root / name, {"lora_alpha": number + 1})
            await receiver.catalog.load(name, name, inplace=True)
        one = receiver.catalog.get("a0").num_bytes
        object.__setattr__(receiver.catalog.rules, "host_bytes", 4 * one)
        statuses = [(await patch(client, name, pinned="host")).status for name in names]
        assert statuses == [200, 200, 400]
        assert (await patch(client, "a0", pinned="no")).status == 200
        assert (await patch(client, "a2", pinned="host")).status == 200


async def test_a_pin_follows_the_name_to_another_version_and_ends_with_its_deletion(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, receiver):
        await load(receiver, "a")
        await patch(client, "a", pinned="host", labels={"team": "x"})
        manager = receiver.catalog.manager
        first = manager.find(receiver.catalog.get("a").digest)
        held = receiver.catalog.pin("a")
        write_adapter(receiver.root / "a", {"lora_alpha": 9})
        await receiver.catalog.load("a", "a", inplace=True)
        second = manager.find(receiver.catalog.get("a").digest)
        assert first is held
        assert second is not None
        assert (held.pinned, second.pinned) == (None, "host")
        manager.unpin(held)
        await client.request("DELETE", "/v1/adapters/a")
        await load(receiver, "a")
        card = (await client.get("/v1/adapters/a")).json
        assert (card["pinned"], card["labels"]) == (None, {})


def written_elsewhere(name: str) -> Setting:
    """Returns settings that another instance has written just now."""
    return Setting("adapter", name, '{"labels": {"team": "x"}}', hlc_of(int(time.time() * 1000) + 1000), "b")


async def test_settings_that_another_instance_wrote_before_it_heard_of_a_deletion_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the name stands for an adapter again."""
    monkeypatch.setattr("caraserve.lora.settings._HEARD_S", 0.2)
    replicated = ReplicatedSettings(Registry(None))
    async with serving(tmp_path, replicated=replicated, cluster=View("a", World())) as (client, receiver):
        for name in ("again", "gone"):
            await load(receiver, name)
            assert (await client.request("DELETE", f"/v1/adapters/{name}")).status == 200
        await load(receiver, "again")
        replicated.merge(map(written_elsewhere, ("again", "gone")))
        await until(lambda: [one.name for one in replicated.all() if one.text is not None] == ["again"])


async def test_settings_of_another_adapter_that_took_the_name_during_its_deletion_stay(tmp_path: Path) -> None:
    replicated = ReplicatedSettings(Registry(None))
    async with serving(tmp_path, replicated=replicated) as (client, receiver):
        await load(receiver, "a")
        running = receiver.catalog.pin("a")
        deletion = asyncio.create_task(client.request("DELETE", "/v1/adapters/a"))
        await until(lambda: receiver.catalog.find("a") is None)
        receiver.catalog.adopt("a", "f" * 64, 8, 1000)
        replicated.merge([written_elsewhere("a")])
        receiver.catalog.manager.unpin(running)
        assert (await deletion).status == 200
        assert (await client.get("/v1/adapters/a")).json["labels"] == {"team": "x"}


async def test_settings_outlive_the_server_in_its_registry(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    with closing(Registry(file)) as registry:
        async with serving(tmp_path / "root", registry=registry) as (client, receiver):
            await load(receiver, "a")
            await patch(client, "a", pinned="host", labels={"team": "x"}, **DEFAULTS)
        for number, fields in enumerate(DAMAGED):
            row = (f"bad{number}", json.dumps({"labels": {}} | fields))
            registry._connection.execute("INSERT INTO settings VALUES ('adapter', ?, ?)", row)
    with closing(Registry(file)) as registry:
        async with serving(tmp_path / "root", registry=registry) as (client, receiver):
            await load(receiver, "a")
            card = (await client.get("/v1/adapters/a")).json
            assert (card["pinned"], card["labels"]) == ("host", {"team": "x"})
            adapter = receiver.catalog.manager.find(card["digest"])
            assert adapter is not None
            assert adapter.pinned == "host"
            assert {name: card[name] for name in DEFAULTS} == DEFAULTS
            assert len(registry.complaints) == len(DAMAGED)
            assert all("settings of adapter 'bad" in complaint for complaint in registry.complaints)
