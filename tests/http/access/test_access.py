"""API keys, admin keys, and keys as a browser's password."""

import base64
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from caraserve.bench.cli import without_keys
from caraserve.bench.servers import api_key_in
from caraserve.cli.options import OptionParser
from caraserve.config import HttpConfig
from caraserve.errors import ConfigError
from caraserve.http.access.api_keys import key_name
from caraserve.http.app import add_peer_routes, make_app, start_http
from caraserve.http.client import CLIENT, Client
from caraserve.http.generation_routes import GENERATION_ROUTES
from caraserve.http.management.page import PAGE_PATHS
from caraserve.util import tasks
from tests.http.fake_engine import FakeEngine
from tests.http.fleet import fleet
from tests.http.serving import Answer, OneOff, http_config, new_metrics, serving

KEY, OTHER, ADMIN = "sk-päss", "sk-other", "sk-admin"
PROBES = {"/health", "/ready", "/ping"}
LOAD = {"lora_name": "c", "lora_path": "/c"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(key: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY, "Bearer ÿ"])
async def test_wrong_keys(header: str | None) -> None:
    answer = await OneOff(fake := FakeEngine(), api_key=(KEY, OTHER)).complete(
        headers=None if header is None else {"Authorization": header}
    )
    assert (answer.status, answer.error["type"]) == (401, "authentication_error")
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert not fake.streams


@pytest.mark.parametrize("headers", [bearer(KEY), bearer(OTHER), bearer(ADMIN), {"X-Api-Key": OTHER}], ids=str)
async def test_any_of_the_keys_gives_access(headers: dict[str, str]) -> None:
    assert (await OneOff(api_key=(KEY, OTHER), admin_key=(ADMIN,)).complete(headers=headers)).status == 200


@pytest.mark.parametrize("keys", [{"api_key": (KEY,)}, {"admin_key": (ADMIN,)}], ids=str)
async def test_with_any_key_every_route_but_the_probes_needs_one(keys: dict[str, Any]) -> None:
    """Checks the whole table of routes, including routes for other instances, which need the cluster's signature."""
    async with fleet("a") as running:
        server, config = running["a"], http_config(**keys)
        app = make_app(
            server.engine,
            config,
            new_metrics(),
            allow_lora_updates=True,
            cluster=server.view,
            router=server.router,
        )
        node: Any = server.view
        add_peer_routes(app, node, server.router)
        runner, port = await start_http(app, config)
        statuses: dict[tuple[str, str], int] = {}
        for route in app.router.routes():
            assert route.resource is not None
            path = route.resource.canonical.replace("{model}", "a").replace("{file}", "main.js")
            async with server.client.session.request(route.method, f"http://127.0.0.1:{port}{path}") as answer:
                statuses[route.method, path] = answer.status
        await runner.cleanup()
    probes = {method_path: statuses.pop(method_path) for method_path in list(statuses) if method_path[1] in PROBES}
    peers = {path: statuses.pop((method, path)) for method, path in list(statuses) if path.startswith("/cluster/")}
    page = {path: statuses.pop((method, path)) for method, path in list(statuses) if path in PAGE_PATHS}
    assert page == {"/": 200, "/page/main.js": 200}  # they hold no data; the page asks for the key
    assert len(probes) == 7
    assert 401 not in probes.values()
    forwarded = {f"/cluster{path}": 403 for path in GENERATION_ROUTES}
    assert peers == {"/cluster/ws": 503} | forwarded
    assert len(statuses) >= 20
    assert set(statuses.values()) == {401}


def test_the_documentation_and_the_help_say_what_needs_no_key() -> None:
    text = (Path(__file__).parents[3] / "docs" / "tenants.md").read_text(encoding="utf-8")
    section = text.split("## Without a key\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(/[^`]*)`", section)) == PROBES | {"/", "/page/…", "/cluster/…"}
    (option,) = [field for field in fields(HttpConfig) if field.name == "api_key"]
    assert all(path in option.metadata["help"] for path in (*PROBES, "the files of the web page"))


async def test_an_unknown_route_needs_the_key_too() -> None:
    assert (await OneOff(api_key=(KEY,)).get("/nothing")).status == 401


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
async def test_a_browser_shows_the_key_as_a_password(path: str) -> None:
    async with serving(FakeEngine(), api_key=(KEY,)) as client:
        assert (await client.get(path)).headers["WWW-Authenticate"].startswith("Basic ")
        assert (await client.get(path, headers=basic("wrong"))).status == 401
        assert (await client.get(path, headers={"Authorization": "Basic %"})).status == 401
        assert (await client.get(path, headers=basic(KEY))).status == 200


async def test_passwords_that_browsers_send_cannot_change_anything() -> None:
    """A page of another site can make a browser send a password that it has stored."""
    async with serving(FakeEngine(), admin_key=(ADMIN,)) as client:
        assert (await client.post("/v1/load_lora_adapter", LOAD, headers=basic(ADMIN))).status == 401
        assert (await client.complete(headers=basic(ADMIN))).status == 401


async def load(headers: dict[str, str], **keys: Any) -> Answer:
    return await OneOff(**keys).post("/v1/load_lora_adapter", LOAD, headers=headers)


async def test_only_an_admin_key_loads_and_unloads() -> None:
    both = {"api_key": (KEY,), "admin_key": (ADMIN,)}
    assert (await load(bearer(ADMIN), **both)).status == 200
    refused = await load(bearer(KEY), **both)
    assert (refused.status, refused.error["type"]) == (403, "permission_error")
    assert "--admin-key" in refused.error["message"]
    async with serving(FakeEngine(), **both) as client:
        for key, status in ((KEY, 403), (ADMIN, 200)):
            answer = await client.post("/v1/unload_lora_adapter", {"lora_name": "a"}, headers=bearer(key))
            assert answer.status == status


async def test_with_keys_but_no_admin_key_loads_are_refused_with_advice() -> None:
    refused = await load(bearer(KEY), api_key=(KEY,))
    assert (refused.status, "start the server with --admin-key" in refused.error["message"]) == (403, True)


async def test_a_client_has_a_name_derived_from_its_key_or_its_address() -> None:
    seen: list[Client] = []

    async def note(request: web.Request) -> web.Response:
        seen.append(request[CLIENT])
        return web.Response()

    for keys in ({"api_key": (KEY, OTHER), "admin_key": (ADMIN,)}, {}):
        config = http_config(**keys)
        app = make_app(FakeEngine(), config, new_metrics(), allow_lora_updates=False)
        app.router.add_get("/note", note)
        runner, port = await start_http(app, config)
        async with serving(FakeEngine()) as client:
            for key in (KEY, KEY, OTHER, ADMIN):
                await client.session.get(f"http://127.0.0.1:{port}/note", headers=bearer(key))
        await runner.cleanup()
    first, again, other, admin = seen[:4]
    assert first == again
    assert len({first.name, other.name, admin.name}) == 3
    assert [one.is_admin for one in (first, other, admin)] == [False, False, True]
    assert all(one.name.startswith("key-") and one.name[4:] not in KEY + OTHER + ADMIN for one in seen[:4])
    assert seen[4:] == [Client("127.0.0.1", is_admin=True)] * 4


def parsed(*arguments: str) -> HttpConfig:
    (config,) = OptionParser((HttpConfig,)).parse_args(arguments).configs
    assert isinstance(config, HttpConfig)
    return config


def test_flags_take_several_values_and_may_be_repeated() -> None:
    config = parsed("--api-key", "a", "b", "--api-key", "c", "--admin-key", "d")
    assert (list(config.api_key), config.needs_keys) == (["a", "b", "c"], True)
    assert list(config.admin_key) == ["d"]


@pytest.mark.parametrize("arguments", [["--api-key", ""], ["--admin-key", " "], ["--allowed-origins", "chat.example"]])
def test_values_without_the_intended_effect_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        parsed(*arguments)


def test_a_benchmarks_report_contains_no_api_key() -> None:
    given = ["--api-key", "k1", "k2", "--port", "1", "--admin-key=k3", "--seed", "4"]
    assert without_keys(given) == ["--api-key", "…", "…", "--port", "1", "--admin-key=…", "--seed", "4"]
    assert api_key_in(given) == "k1"


async def test_long_loops_over_bodies_go_on_in_the_turns_of_their_client(monkeypatch: pytest.MonkeyPatch) -> None:
    owners: set[str] = set()

    async def note() -> None:
        owners.add(tasks.TURN_OWNER.get())

    monkeypatch.setattr(tasks, "_shared_turn", note)
    async with serving(FakeEngine(), api_key=(KEY, OTHER)) as client:
        for key in (KEY, OTHER):
            answer = await client.complete(prompt=[1] * 100_000, headers=bearer(key))
            assert answer.error["code"] == "context_length_exceeded"
    assert owners == {key_name(KEY), key_name(OTHER)}
