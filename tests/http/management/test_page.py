"""The web page: its files, the rules by which a browser runs them, and the numbers that it reads."""

import dataclasses
import json
import re
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from caraserve.core.adapter_facts import AdapterFacts
from caraserve.engine.stats import RequestCounts
from caraserve.http.client import Client as Sender
from caraserve.http.management.page import PAGE_PATHS
from caraserve.lora.adapter import Adapter, AdapterTier, EndedLoad, PartialImage, RemoteSource, Source
from caraserve.lora.base_names import names_of_base
from caraserve.lora.served_base import ServedBase
from tests.engine.test_batch_timeline import row
from tests.http.fake_engine import FakeAdapter, FakeEngine
from tests.http.serving import Answer, Client, OneOff, serving

FOLDER = files("caraserve.http.management").joinpath("page")
SOURCES = {entry.name: entry.read_text(encoding="utf-8") for entry in FOLDER.iterdir()}
SCRIPTS = {name: text for name, text in SOURCES.items() if name.endswith(".js")}


async def get(path: str, **settings: Any) -> Answer:
    return await OneOff(**settings).get(path)


# --- files ---


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
async def test_every_file_is_served_without_a_key_and_runs_only_files_of_this_server(path: str) -> None:
    answer = await get(path, api_key=("k",))
    assert (answer.status, answer.headers["X-Content-Type-Options"]) == (200, "nosniff")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["Content-Security-Policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert {rules[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
    assert rules["frame-ancestors"] == "'none'"
    assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "'none'")


async def test_other_names_are_not_files_of_the_page() -> None:
    for path in ("/page/none.js", "/page/index.html", "/page/..%2Fpage.py", "/page/"):
        assert (await get(path)).status == 404
    assert (await get("/page/none.js", api_key=("k",))).status == 401


async def test_nothing_is_inlined_and_no_other_server_is_named() -> None:
    page = SOURCES["index.html"]
    assert not re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", page)
    for name, text in SOURCES.items():
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bFunction\(", text), name


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r'(?:href|src)="page/([\w.]+)"', SOURCES["index.html"]))
    named |= {name for text in SCRIPTS.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert named == SOURCES.keys() - {"index.html"}


def test_every_element_that_a_script_looks_up_exists() -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', SOURCES["index.html"]))
    for name, text in SCRIPTS.items():
        assert set(re.findall(r'(?:byId|setText)\("([\w-]+)"', text)) <= ids, name


def test_every_field_has_a_label() -> None:
    page = SOURCES["index.html"]
    labels = set(re.findall(r'<label for="([\w-]+)"', page))
    inside = set(re.findall(r'<label>[^<]*<(?:input|select) id="([\w-]+)"', page.replace("\n", " ")))
    fields = set(re.findall(r'<(?:input|select|textarea) id="([\w-]+)"', page))
    assert fields == labels | inside


# --- numbers ---


def fields_read() -> dict[str, list[str]]:
    """Returns the fields that the page requires of each route, from its own list."""
    table = re.search(r"const FIELDS = (\{.*?\n\});", SCRIPTS["api.js"], re.DOTALL)
    assert table is not None
    return dict(json.loads(re.sub(r",\s*([\]}])", r"\1", table[1])))


async def test_each_route_has_the_fields_that_the_page_reads(client: Client) -> None:
    for path, names in fields_read().items():
        assert set(names) <= (await client.get(f"/{path}")).json.keys(), path


def test_the_page_reads_no_field_that_is_not_in_its_list() -> None:
    read = {name for text in SCRIPTS.values() for name in re.findall(r"(?:\bstats|#latest)\.(\w+)", text)}
    assert read == set(fields_read()["stats"])


@pytest.mark.parametrize(
    ("sender", "allows", "may"),
    [
        (Sender("address", is_admin=True), True, {"admin": True, "base_model": True}),
        (Sender("key-1", base_model=False), False, {"admin": False, "base_model": False}),
    ],
    ids=["admin", "limited"],
)
async def test_stats_say_what_the_client_may_do(
    sender: Sender, allows: bool, may: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caraserve.http.app.authenticate", lambda *_: sender)
    management: Any = object()
    stats = (await OneOff(management=management, allow_lora_updates=allows).get("/stats")).json
    assert (stats["client"], stats["can_update"]) == (may, allows)
    assert (stats["max_model_len"], stats["can_chat"]) == (1000, True)


async def test_a_server_whose_adapters_are_not_managed_takes_no_changes() -> None:
    assert (await OneOff(allow_lora_updates=True).get("/stats")).json["can_update"] is False


@pytest.mark.parametrize("path", ["/stats", "/stats/adapters"])
async def test_numbers_need_a_key(path: str) -> None:
    answer = await get(path, api_key=("k",))
    assert (answer.status, answer.headers["WWW-Authenticate"][:6]) == (401, "Bearer")


def engine_with(count: int = 0, **tiers: AdapterTier) -> FakeEngine:
    """Returns an engine with adapters in these tiers and so many more on disk."""
    engine = FakeEngine(loaded={})
    for name, tier in {**tiers, **{f"adapter-{number}": AdapterTier.DISK for number in range(count)}}.items():
        source: Source = RemoteSource("d") if name.startswith("remote") else Path("/x")
        engine.loaded[name] = FakeAdapter(name, "/x", digest=f"digest of {name}")
        engine.catalog.adapters[f"digest of {name}"] = Adapter(name, source, 1024, tier)
    return engine


async def listed(client: Client, **query: str) -> tuple[dict[str, int], list[str]]:
    found = (await client.get("/stats/adapters", params=query)).json
    return {tier: count for tier, count in found["counts"].items() if count}, [one["name"] for one in found["adapters"]]


async def test_every_adapter_is_in_one_tier_the_loading_ones_first() -> None:
    tiers = {"a": AdapterTier.DEVICE, "b": AdapterTier.HOST, "c": AdapterTier.DISK, "d": AdapterTier.COPYING}
    async with serving(engine_with(**tiers, remote=AdapterTier.READING, remote2=AdapterTier.FAILED)) as client:
        counts, names = await listed(client)
        assert counts == {"device": 1, "host": 2, "disk": 1, "peer": 2, "loading": 2}
        assert names == ["d", "remote", "a", "b", "c", "remote2"]
        assert (await listed(client, tier="loading"))[1] == ["d", "remote"]
        assert (await listed(client, tier="peer", contains="MOTE2"))[1] == ["remote2"]


async def test_an_adapter_has_its_size_requests_rate_and_progress() -> None:
    engine = engine_with(a=AdapterTier.STREAMING, b=AdapterTier.DISK)
    adapter = engine.catalog.adapters["digest of a"]
    image: Any = type("Image", (), {"spec": type("Spec", (), {"layer_ends": (1, 2, 3, 4)})})
    adapter.partial = PartialImage(image, 0.0, layers=3)
    now_s = time.monotonic()
    for name, requests in (("a", 3), ("b", 1000)):
        for _ in range(requests):
            engine.request_counts.begin(name, now_s)
    for _ in range(1000):
        engine.request_counts.end("b")
    first, second = (await OneOff(engine).get("/stats/adapters")).json["adapters"]
    assert first == {
        "name": "a",
        "rank": 8,
        "num_bytes": 1024,
        "tier": "host",
        "loading": "downloading and copying",
        "layers": [3, 4],
        "pinned": None,
        "labels": {},
        "own_chat_template": False,
        "requests": 3,
        "per_minute": 2.1,
    }
    assert second["requests"] == 0
    assert 600 < second["per_minute"] <= 693.2  # 1000 · ln 2, less what has decayed meanwhile


async def test_names_of_one_adapter_have_counts_of_their_own() -> None:
    engine = engine_with(a=AdapterTier.DEVICE, b=AdapterTier.DEVICE)
    engine.loaded["b"] = FakeAdapter("b", "/x", digest="digest of a")
    engine.request_counts.begin("a", time.monotonic())
    found = (await OneOff(engine).get("/stats/adapters")).json["adapters"]
    assert [(one["name"], one["requests"]) for one in found] == [("a", 1), ("b", 0)]


def test_a_constant_rate_is_the_mean_of_recent_minutes() -> None:
    counts = RequestCounts()
    for second in range(1000):
        counts.begin("a", float(second))
        counts.end("a")
    assert counts.per_minute("a", 1000.0) == pytest.approx(60.0, rel=0.01)
    assert counts.unfinished("a") == 0


def test_names_without_requests_for_some_minutes_are_forgotten() -> None:
    counts = RequestCounts()
    for number in range(10_000):
        counts.begin(f"name {number}", float(number))
        counts.end(f"name {number}")
    counts.begin("kept", 0.0)
    assert len(counts._counts) < 5_000
    assert counts.unfinished("kept") == 1


async def test_thousands_of_adapters_give_a_short_list_and_all_counts() -> None:
    answer = await OneOff(engine_with(count=5000)).get("/stats/adapters", params={"contains": "adapter-1"})
    assert answer.json["counts"]["disk"] == 5000
    assert answer.json["matching"] == 1111
    assert [one["name"] for one in answer.json["adapters"]] == sorted(f"adapter-{number}" for number in range(5000))[
        1:101
    ]
    assert len(answer.body) < 20_000


@pytest.mark.parametrize("query", [{"contains": "x" * 201}, {"tier": "cloud"}], ids=str)
async def test_wrong_filters_are_refused(query: dict[str, str]) -> None:
    answer = await OneOff().get("/stats/adapters", params=query)
    assert (answer.status, answer.error["param"]) == (400, next(iter(query)))


async def test_stats_have_the_last_minute_of_batches_and_loads() -> None:
    engine, now_s = FakeEngine(), time.monotonic()
    engine.timeline.record([row("a", 0, 7), row(None, 12, 1)], now_s)
    engine.catalog.ended_loads = [EndedLoad("a", now_s - 2.0, now_s - 1.0, True), EndedLoad("b", 0.0, 1.0, True)]
    stats = (await OneOff(engine).get("/stats")).json
    shown = {one["adapter"]: sum(prefill for _, prefill, _ in one["cells"]) for one in stats["timeline"]["rows"]}
    assert shown == {"a": 7, "org/base": 0}
    (load,) = stats["loads"]
    assert (load["adapter"], load["succeeded"]) == ("a", True)
    assert load["ended"] - load["began"] == pytest.approx(2.0, abs=0.02)
    assert (stats["running"], stats["waiting"], stats["kv_used_blocks"], stats["kv_total_blocks"]) == (2, 1, 25, 100)


async def test_names_that_a_client_may_not_use_are_not_shown_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Sender("key-1", adapters=("sql-*",))
    monkeypatch.setattr("caraserve.http.app.authenticate", lambda *_: limited)
    engine, now_s = engine_with(**{"sql-1": AdapterTier.DISK, "secret": AdapterTier.DEVICE}), time.monotonic()
    engine.timeline.record([row("secret", 0, 7), row("sql-1", 0, 3)], now_s)
    engine.catalog.ended_loads = [EndedLoad("secret", now_s - 2.0, now_s, True)]
    async with serving(engine) as client:
        bodies = [(await client.get(path)).body for path in ("/stats", "/stats/adapters")]
    assert all(b"sql-1" in body and b"secret" not in body for body in bodies)
    assert b'"others":{"adapter":"","cells":[[' in bodies[0]


async def test_a_score_head_and_another_base_model_are_shown() -> None:
    engine = engine_with(a=AdapterTier.DISK, b=AdapterTier.DISK)
    engine.catalog.rules.base = ServedBase(names_of_base(["org/small"]))
    for name, facts in (("a", AdapterFacts("org/large", 3)), ("b", AdapterFacts("org/small"))):
        engine.loaded[name] = dataclasses.replace(engine.loaded[name], facts=facts)
    first, second = (await OneOff(engine).get("/stats/adapters")).json["adapters"]
    assert (first["trained_on"], first["num_classes"]) == ("org/large", 3)
    assert not {"trained_on", "num_classes"} & second.keys()
