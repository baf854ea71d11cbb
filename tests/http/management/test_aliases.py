"""Aliases over HTTP: pointed at an adapter, switched, rolled back, listed, kept over restarts."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caraserve.lora.registry import Registry, Setting
from tests.cluster.nodes import until
from tests.http.managed import serving
from tests.http.serving import Client
from tests.lora.folders import write_adapter
from tests.lora.uploads import Receiver


async def add(receiver: Receiver, *names: str) -> None:
    """Loads an adapter under each name."""
    write_adapter(receiver.root / "any")
    for name in names:
        await receiver.catalog.load(name, "any", inplace=False)


async def point(client: Client, name: str, adapter: str) -> int:
    return (await client.request("PUT", f"/v1/aliases/{name}", json={"adapter": adapter})).status


async def answering(client: Client, model: str) -> str:
    """Returns the adapter that answers for a model's name."""
    return str((await client.get(f"/v1/models/{model}")).json["root"])


async def test_an_alias_is_switched_and_rolled_back(tmp_path: Path) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        for name in ("v1", "v2"):
            write_adapter(receiver.root / name)
            await receiver.catalog.load(name, name, inplace=False)
        assert await point(client, "prod", "v1") == 201
        assert (await answering(client, "prod")).endswith("/v1")
        assert await point(client, "prod", "v2") == await point(client, "prod", "v2") == 200
        alias = {"object": "alias", "name": "prod", "adapter": "v2", "previous": "v1"}
        assert (await client.get("/v1/aliases/prod")).json == alias
        assert (await client.get("/v1/aliases")).json == {"object": "list", "data": [alias]}
        assert (await client.complete(model="prod")).json["model"] == "prod"
        back = await client.post("/v1/aliases/prod/rollback")
        assert (back.status, back.json["adapter"], back.json["previous"]) == (200, "v1", "v2")
        assert (await answering(client, "org%2Fbase:prod")).endswith("/v1")
        assert (await client.request("DELETE", "/v1/aliases/prod")).json["deleted"] is True
        assert (await client.get("/v1/models/prod")).status == 404


async def test_models_list_aliases_as_they_change(tmp_path: Path) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await add(receiver, "a", "b")

        async def ids() -> list[str]:
            return [card["id"] for card in (await client.get("/v1/models")).json["data"]]

        await point(client, "prod", "b")
        assert await ids() == ["org/base", "a", "b", "prod"]
        await client.request("DELETE", "/v1/aliases/prod")
        assert await ids() == ["org/base", "a", "b"]


async def test_an_alias_of_an_unloaded_adapter_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await add(receiver, "a")
        await point(client, "prod", "a")
        await receiver.catalog.unload("a")
        answer = await client.complete(model="prod")
        assert (answer.status, answer.error["param"]) == (404, "model")
        assert "stands for the adapter 'a', which is not loaded" in answer.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("PUT", "prod", {"adapter": "absent"}, 404, "adapter"),
        ("PUT", "prod", {"adapter": "other"}, 404, "adapter"),
        ("PUT", "prod", {}, 400, "adapter"),
        ("PUT", "prod", {"adapter": 3}, 400, "adapter"),
        ("PUT", "prod", {"adaptor": "a"}, 400, "adaptor"),
        ("PUT", "a", {"adapter": "a"}, 400, "name"),
        ("PUT", ".x", {"adapter": "a"}, 400, "name"),
        ("POST", "other/rollback", None, 400, "name"),
        ("POST", "absent/rollback", None, 404, "name"),
        ("DELETE", "absent", None, 404, "name"),
        ("GET", "absent", None, 404, "name"),
    ],
)
async def test_refused_changes(tmp_path: Path, method: str, path: str, body: Any, status: int, param: str) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await add(receiver, "a")
        await point(client, "other", "a")
        answer = await client.request(method, f"/v1/aliases/{path}", json=body)
        assert (answer.status, answer.error["param"]) == (status, param)


async def test_no_adapter_takes_the_name_of_an_alias(tmp_path: Path) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await add(receiver, "a")
        await point(client, "prod", "a")
        loaded = await client.post("/v1/load_lora_adapter", {"lora_name": "prod", "lora_path": "any"})
        uploaded = await client.request("PUT", "/v1/adapters/prod", data=b"")
        assert (loaded.status, uploaded.status) == (400, 400)
        assert "is an alias" in loaded.error["message"] == uploaded.error["message"]


async def test_no_alias_takes_the_name_of_an_adapter_that_is_arriving(tmp_path: Path) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await add(receiver, "a")
        async with receiver.catalog.changing("prod"):
            pointing = asyncio.create_task(point(client, "prod", "a"))
            await until(lambda: len(receiver.catalog._changes._waiting) == 1)
            info = replace(receiver.catalog.get("a"), name="prod")
            await receiver.catalog._register(info, receiver.catalog.folders.at(Path(info.path)))
        assert await pointing == 400
        await receiver.catalog.unload("prod")
        assert await point(client, "prod", "a") == 201


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_an_alias_is_not_changed_while_its_rollback_waits(tmp_path: Path, method: str) -> None:
    async with serving(tmp_path / "root") as (client, receiver):
        await add(receiver, "v1", "v2", "v3")
        for version in ("v1", "v2"):
            await point(client, "prod", version)
        waits = receiver.catalog._changes._waits
        async with receiver.catalog.changing("v1"):
            back = asyncio.create_task(client.post("/v1/aliases/prod/rollback"))
            await until(lambda: waits("v1") == 1)
            change = asyncio.create_task(client.request(method, "/v1/aliases/prod", json={"adapter": "v3"}))
            await until(lambda: change.done() or waits("prod") == 1)
        assert ((await back).status, (await back).json["adapter"]) == (200, "v1")
        assert (await change).status == 200
        left = [(one["adapter"], one["previous"]) for one in (await client.get("/v1/aliases")).json["data"]]
        assert left == ([("v3", "v1")] if method == "PUT" else [])


async def test_a_rollback_leads_to_no_adapter_that_is_deleted_meanwhile(tmp_path: Path) -> None:
    """It waits for the adapter to which it then leads, not for the one that was to be it when it began."""
    async with serving(tmp_path / "root") as (client, receiver):
        await add(receiver, "v1", "v2", "v3")
        for version in ("v1", "v2"):
            await point(client, "z", version)
        catalog, waits = receiver.catalog, receiver.catalog._changes._waits
        async with catalog.changing("v1"):
            back = asyncio.create_task(client.post("/v1/aliases/z/rollback"))
            await until(lambda: waits("v1") == 1)
            await point(client, "z", "v3")
            deletion = catalog.changing("v2")
            await deletion.__aenter__()
        await until(lambda: back.done() or waits("v2") == 1)
        await catalog.unregister("v2")
        await deletion.__aexit__(None, None, None)
        assert (await back).status == 404
        assert (await client.get("/v1/aliases/z")).json["adapter"] == "v3"


async def test_a_long_list_of_aliases_is_made_in_turns_of_the_event_loop(tmp_path: Path, rests: list[float]) -> None:
    registry = Registry(None)
    registry.put_settings([Setting("alias", f"alias{number}", '{"adapter": "a"}') for number in range(2000)])
    async with serving(tmp_path / "root", registry=registry) as (client, _):
        assert not rests
        assert len((await client.get("/v1/aliases")).json["data"]) == 2000
    assert rests


async def test_aliases_outlive_the_server_in_its_registry(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    with closing(Registry(file)) as registry:
        async with serving(tmp_path / "root", registry=registry) as (client, receiver):
            await add(receiver, "a", "b")
            await point(client, "prod", "a")
            await point(client, "prod", "b")
            await point(client, "gone", "b")
            await client.request("DELETE", "/v1/aliases/gone")
    with closing(Registry(file)) as registry:
        registry._connection.execute("""INSERT INTO settings VALUES ('alias', 'bad', '{"adapter": 7}')""")
    with closing(Registry(file)) as registry:
        async with serving(tmp_path / "root", registry=registry) as (client, _):
            (alias,) = (await client.get("/v1/aliases")).json["data"]
            assert alias == {"object": "alias", "name": "prod", "adapter": "b", "previous": "a"}
            assert ["alias 'bad'" in complaint for complaint in registry.complaints] == [True]


async def test_only_an_admin_key_changes_aliases(tmp_path: Path) -> None:
    async with serving(tmp_path / "root", api_key=("user",), admin_key=("admin",)) as (client, receiver):
        await add(receiver, "a")
        headers = {"Authorization": "Bearer user"}
        for method, path in (("PUT", "prod"), ("POST", "prod/rollback"), ("DELETE", "prod")):
            answer = await client.request(method, f"/v1/aliases/{path}", json={"adapter": "a"}, headers=headers)
            assert answer.status == 403
        assert (await client.get("/v1/aliases", headers=headers)).json["data"] == []
