"""Tests of the key file: which entries are taken, what a key may use, and reading the file again."""

import asyncio
import hashlib
import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from caraserve.errors import ConfigError
from caraserve.http.access.api_keys import ApiKeys, read_keys
from caraserve.http.client import Client, RateLimits
from caraserve.kv.block_pool import root_key
from tests.http.fake_engine import FakeAdapter, FakeEngine, FakeSnapshot
from tests.http.fleet import fleet
from tests.http.log_lines import LogLines, logged
from tests.http.serving import Client as HttpClient
from tests.http.serving import http_config, serving

BASE = "org/base"
SQL, BASE_ONLY, ADMIN = "sk-sql", "sk-base", "sk-admin"
ENTRIES: list[dict[str, Any]] = [
    {"name": "sql", "adapters": ["sql-*", "legal"], "base_model": False},
    {"name": "base", "adapters": []},
    {"name": "admin", "admin": True},
]


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(key: str = SQL, **fields: Any) -> dict[str, Any]:
    return {"name": "team", "sha256": sha256(key)} | fields


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def keys_file(path: Path) -> Path:
    """A file with a key for some adapters, a key for the base model, and an admin's key."""
    return written(path, *(one | {"sha256": sha256(f"sk-{one['name']}")} for one in ENTRIES))


def written(path: Path, *entries: Any) -> Path:
    return put(path, json.dumps({"keys": entries}))


def put(path: Path, text: str) -> Path:
    """Replaces a file in one step: another thread may be reading it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    return new.replace(path)


def remove(path: Path) -> None:
    path.unlink()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def engine() -> FakeEngine:
    names = ("sql-v1", "sql-v2", "legal", "secret")
    shown = FakeSnapshot(running_adapters=("secret",), device_adapters=frozenset({"secret"}), host_adapters=("secret",))
    return FakeEngine(loaded={name: FakeAdapter(name, f"/{name}") for name in names}, shown=shown)


# --- the file ---


def test_an_entry_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        f"""
        [[keys]]
        name = "team-a"
        sha256 = ["{sha256("old")}", "{sha256("new").upper()}"]
        adapters = ["sql-*"]
        base_model = false
        admin = true
        weight = 2
        requests_per_minute = 600
        tokens_per_minute = 1e5
        concurrency = 8
        """
    )
    client = Client("team-a", True, ("sql-*",), False, 2.0, RateLimits(600.0, 100_000.0, 8), owns_cache=True)
    keys = ApiKeys(http_config(api_key_file=path))
    assert [keys.client(key) for key in ("old", "new", "other", "")] == [client, client, None, None]


def test_an_entry_with_nothing_but_name_and_hash_allows_everything_but_administration(path: Path) -> None:
    (client,) = read_keys(written(path, entry()), "the file").values()
    assert client == Client("team", owns_cache=True)
    assert (client.may_use("any"), client.may_use(None), client.is_admin) == (True, True, False)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *(({"name": name}, "name") for name in (None, "", "a b", "x" * 65, 5)),
        *(({"sha256": value}, "sha256") for value in (None, "", "5", "g" * 64, [], ["x"], 7, sha256("k") + "0")),
        *(({"adapters": value}, "adapters") for value in ([5], [""], 5, {"a": 1})),
        *(({"admin": "yes"}, "admin"), ({"base_model": 1}, "base_model")),
        *(({"weight": value}, "weight") for value in (0, -1, True, "2", float("inf"), float("nan"))),
        *(({field: 0}, field) for field in ("requests_per_minute", "tokens_per_minute", "concurrency")),
        ({"concurrency": 1.5}, "concurrency"),
        ({"adaptors": ["a"]}, "adaptors"),
    ],
    ids=str,
)
def test_a_wrong_entry_is_refused_by_its_field(path: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"the file: keys\[1\].*{named}"):
        read_keys(written(path, entry("other", name="other"), entry() | fields), "the file")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"keys": {}}', '{"keys": []}', '{"keys": [5]}', '{"keys": [], "x": 1}']
)
def test_a_file_without_a_list_of_entries_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="the file"):
        read_keys(path, "the file")


def test_names_and_keys_are_unique(path: Path) -> None:
    for first, second in ((entry(), entry("other")), (entry(), entry(name="other"))):
        with pytest.raises(ConfigError, match="team"):
            read_keys(written(path, first, second), "the file")
    with pytest.raises(ConfigError, match="also given as --api-key"):
        ApiKeys(http_config(api_key=(SQL,), api_key_file=written(path, entry())))


def test_an_absent_file_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        ApiKeys(http_config(api_key_file=path))


def test_the_documented_command_makes_an_entry_for_the_key_that_it_shows(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "tenants.md").read_text(encoding="utf-8")
    command = text.split("```bash\n")[1].split("```")[0]
    shown = subprocess.run(["bash", "-euc", command], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    client = ApiKeys(http_config(api_key_file=tmp_path / "keys.toml")).client(shown.strip())
    assert client == Client("team-a", owns_cache=True)


# --- reading it again ---


@pytest.fixture
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraserve.util.watched_files._POLL_S", 0.0)


@pytest.fixture
def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraserve.util.watched_files._POLL_S", 1e6)


@pytest.fixture
def texts() -> Iterator[LogLines[str]]:
    with logged("caraserve.http", logging.LogRecord.getMessage) as found:
        yield found


@pytest.mark.usefixtures("quick_look")
async def test_a_changed_file_is_read_and_a_wrong_one_keeps_the_keys_from_before(
    path: Path, texts: LogLines[str]
) -> None:
    keys = ApiKeys(http_config(api_key=("fixed",), api_key_file=written(path, entry("old"))))
    watching = asyncio.create_task(keys.watch())
    written(path, entry("new"), entry("newer", name="newer"))
    assert "read again: 2 keys" in await texts.next()
    assert [keys.client(key) is not None for key in ("old", "new", "newer", "fixed")] == [False, True, True, True]
    put(path, "{")
    assert "the keys from before stay" in await texts.next()
    remove(path)
    assert "cannot be read" in await texts.next()
    assert keys.client("new") is not None
    written(path, entry("last"))
    assert "read again: 1 keys" in await texts.next()
    assert [keys.client(key) is not None for key in ("new", "last", "fixed")] == [False, True, True]
    assert texts.all == []
    watching.cancel()


@pytest.mark.usefixtures("no_look")
async def test_a_hangup_reads_the_file_at_once(path: Path, texts: LogLines[str]) -> None:
    keys = ApiKeys(http_config(api_key_file=written(path, entry("old"))))
    watching = asyncio.create_task(keys.watch())
    written(path, entry("new"))
    keys.reread()
    assert "read again" in await texts.next()
    assert keys.client("new") is not None
    watching.cancel()


# --- which adapters a key may use ---


async def ids(client: HttpClient, key: str) -> list[str]:
    answer = await client.get("/v1/models", headers=bearer(key))
    return [model["id"] for model in answer.json["data"]]


async def test_the_list_has_what_a_key_may_use(keys_file: Path) -> None:
    async with serving(engine(), api_key_file=keys_file) as client:
        for _ in range(2):
            assert await ids(client, SQL) == ["sql-v1", "sql-v2", "legal"]
            assert await ids(client, BASE_ONLY) == [BASE]
            assert await ids(client, ADMIN) == [BASE, "sql-v1", "sql-v2", "legal", "secret"]


async def test_a_change_of_the_adapters_reaches_every_list(keys_file: Path) -> None:
    fake = engine()
    async with serving(fake, api_key_file=keys_file) as client:
        assert await ids(client, SQL) == ["sql-v1", "sql-v2", "legal"]
        fake.loaded = {"sql-v3": FakeAdapter("sql-v3", "/sql-v3")}
        assert await ids(client, SQL) == ["sql-v3"]
        assert await ids(client, ADMIN) == [BASE, "sql-v3"]


@pytest.mark.parametrize(
    "way",
    [
        *({"model": name} for name in ("{}", f"{BASE}:{{}}")),
        *({field: "{}"} for field in ("lora_path", "adapter_id")),
        {"lora": [{"id": "{}"}]},
        {"lora": [{"id": "legal"}, {"id": "{}"}]},
        {"model": "sql-v2+{}"},
        {"model": "legal+{}*0"},
        {"model": "sql-v1", "lora_path": "{}"},
    ],
    ids=str,
)
async def test_an_adapter_that_a_key_may_not_use_is_404_as_an_unknown_one(keys_file: Path, way: dict[str, Any]) -> None:
    """The bodies of both answers are the same but for the adapter's name."""

    def naming(name: str) -> dict[str, Any]:
        filled: dict[str, Any] = json.loads(json.dumps(way).replace("{}", name))
        return filled

    async with serving(engine(), api_key_file=keys_file) as client:
        for path in ("/v1/completions", "/tokenize"):
            secret, absent, allowed = [
                await client.post(path, {"prompt": "x"} | naming(name), headers=bearer(SQL))
                for name in ("secret", "absent", "sql-v1")
            ]
            assert [answer.status for answer in (secret, absent, allowed)] == [404, 404, 200]
            assert secret.body.replace(b"secret", b"absent") == absent.body
        cards = [await client.get(f"/v1/models/{name}", headers=bearer(SQL)) for name in ("secret", "absent", "legal")]
    assert [card.status for card in cards] == [404, 404, 200]
    assert cards[0].body.replace(b"secret", b"absent") == cards[1].body


async def test_the_base_model_may_be_withheld(keys_file: Path) -> None:
    async with serving(engine(), api_key_file=keys_file) as client:
        for naming in ({}, {"model": BASE}, {"lora_path": BASE}):
            refused = await client.complete(**naming, headers=bearer(SQL))
            assert (refused.status, refused.error["param"]) == (404, "model")
        named = {"model": BASE, "lora_path": "sql-v1"}  # as SGLang's clients name an adapter
        assert (await client.complete(**named, headers=bearer(SQL))).status == 200
        assert (await client.get(f"/v1/models/{BASE}", headers=bearer(SQL))).status == 404
        assert (await client.complete(headers=bearer(BASE_ONLY))).status == 200


async def test_weights_by_which_the_base_model_would_answer_are_withheld_with_it(keys_file: Path) -> None:
    async with serving(engine(), api_key_file=keys_file) as client:
        for naming in ({"model": "sql-v1*1e-9"}, {"lora": [{"id": "sql-v1", "scale": 0.5}]}):
            refused = await client.complete(**naming, headers=bearer(SQL))
            assert (refused.status, refused.error["param"]) == (400, next(iter(naming)))
            assert "may not use the base model" in refused.error["message"]
        assert (await client.complete(model="sql-v1+legal", headers=bearer(SQL))).status == 200
        assert (await client.complete(model="sql-v1*0.5", headers=bearer(ADMIN))).status == 200


@pytest.mark.parametrize(
    ("name", "may_use"),
    [
        ("legal*0.5+sql-v1", True),
        ("sql-v1*0.5", True),
        ("secret+sql-v1", False),
        ("sql-v1+zecret*0.5", False),  # which the pattern sql-* matches as a text
        ("sql-v1+", False),
        ("sql-*", False),
    ],
)
def test_a_combination_is_shown_to_a_key_that_may_use_all_of_its_adapters(name: str, may_use: bool) -> None:
    assert Client("sql", adapters=("sql-*", "legal")).may_use(name) is may_use


async def test_no_page_shows_an_adapter_that_a_key_may_not_use(keys_file: Path) -> None:
    """Asks for every route that there is."""
    async with fleet() as running:
        server = await running.start("a", engine(), api_key_file=keys_file)
        for path in server.paths:
            if not path.startswith("/cluster/"):
                answer = await server.client.get(path.replace("{model}", "sql-v1"), headers=bearer(SQL))
                assert b"secret" not in answer.body, path
        for path in ("/metrics", "/v1/cluster/adapters"):
            assert (await server.client.get(path, headers=bearer(SQL))).status == 403
            assert (await server.client.get(path, headers=bearer(ADMIN))).status == 200


async def test_a_key_of_the_file_may_be_an_admins(keys_file: Path) -> None:
    async with serving(engine(), api_key_file=keys_file) as client:
        body = {"lora_name": "new", "lora_path": "/new"}
        assert (await client.post("/v1/load_lora_adapter", body, headers=bearer(SQL))).status == 403
        assert (await client.post("/v1/load_lora_adapter", body, headers=bearer(ADMIN))).status == 200


async def test_a_key_of_the_file_has_a_cache_of_its_own_and_keys_of_options_share_one(keys_file: Path) -> None:
    fake = engine()
    async with serving(fake, api_key_file=keys_file, api_key=("one", "two")) as client:
        for key in (BASE_ONLY, ADMIN, "one", "two"):
            assert (await client.complete(headers=bearer(key))).status == 200
            assert (await client.post("/v1/embeddings", {"input": "ab"}, headers=bearer(key))).status == 200
    roots = [root_key(None, request.cache_salt, request.tenant) for request in fake.requests]
    assert roots[::2] == roots[1::2]
    assert (len(set(roots)), roots[4], roots[6]) == (3, root_key(None, ""), root_key(None, ""))


async def test_with_a_file_every_client_needs_a_key(keys_file: Path) -> None:
    async with serving(engine(), api_key_file=keys_file, api_key=("of-the-option",)) as client:
        statuses = [
            (await client.complete(headers=bearer(key))).status for key in ("wrong", BASE_ONLY, "of-the-option")
        ]
    assert statuses == [401, 200, 200]


async def test_the_instance_that_a_request_is_forwarded_to_gets_the_tenant_and_checks_nothing(path: Path) -> None:
    """The other instance has no key file, so it knows nothing of the key."""
    only_b = FakeEngine(loaded={"sql-v1": FakeAdapter("sql-v1", "/sql-v1")})
    written(path, entry(adapters=["sql-*"], base_model=False, weight=2.5, concurrency=1))
    async with fleet() as running:
        a = await running.start("a", FakeEngine(loaded={}), api_key_file=path)
        b = await running.start("b", only_b)
        answer = await a.client.complete(model="sql-v1", headers=bearer(SQL))
        assert (answer.status, len(a.forwards)) == (200, 1)
        assert b.engine.requests[0].tenant == ("team", "", 2.5, True)
        assert (await a.client.complete(headers=bearer(SQL))).status == 404
