"""PATCH /v1/adapters/NAME: labels and pins, their bounds, and how long they last."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from caraserve.lora.registry import Registry
from tests.http.managed import serving
from tests.http.serving import Answer, Client
from tests.lora.folders import write_adapter
from tests.lora.uploads import Receiver


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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pinned": "disk"}, "pinned"),
        ({"pinned": True}, "pinned"),
        ({"labels": ["a"]}, "labels"),
        ({"labels": {"a": 1}}, "labels"),
        ({"labels": {"": "x"}}, "labels"),
        ({"labels": {"a b": "x"}}, "labels"),
        ({"labels": {"a": "x" * 257}}, "labels"),
        ({"labels": {f"a{number}": "" for number in range(33)}}, "labels"),
        ({"label": {}}, "label"),
    ],
    ids=["tier", "type", "list", "number", "empty", "space", "long", "many", "misspelt"],
)
async def test_what_is_not_a_setting_is_refused_and_changes_nothing(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async with serving(tmp_path) as (client, receiver):
        await load(receiver, "a")
        answer = await patch(client, "a", **fields)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert (await client.get("/v1/adapters/a")).json["labels"] == {}
        assert (await patch(client, "nobody", labels={})).status == 404


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


async def test_settings_outlive_the_server_in_its_registry(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    with closing(Registry(file)) as registry:
        async with serving(tmp_path / "root", registry=registry) as (client, receiver):
            await load(receiver, "a")
            await patch(client, "a", pinned="host", labels={"team": "x"})
        registry._connection.execute("""INSERT INTO settings VALUES ('adapter', 'bad', '{"labels": 7}')""")
    with closing(Registry(file)) as registry:
        async with serving(tmp_path / "root", registry=registry) as (client, receiver):
            await load(receiver, "a")
            card = (await client.get("/v1/adapters/a")).json
            assert (card["pinned"], card["labels"]) == ("host", {"team": "x"})
            adapter = receiver.catalog.manager.find(card["digest"])
            assert adapter is not None
            assert adapter.pinned == "host"
            assert ["settings of 'bad'" in complaint for complaint in registry.complaints] == [True]
