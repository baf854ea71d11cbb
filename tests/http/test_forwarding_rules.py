"""Tests of the rules of forwarding: which instance answers, which senders are accepted, and what is counted."""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caraserve.cluster.routing.cost import Backlog, LinkSpeeds
from caraserve.cluster.routing.forward_auth import CLAIMS_HEADER, INSTANCE_HEADER, PREFIX, SIGNATURE_HEADER
from caraserve.cluster.routing.router import Instance
from caraserve.cluster.routing.selector import LOCAL, LatencyTargets
from caraserve.cluster.state.replicated_map import RegisteredAdapter, Tier
from caraserve.config import ROUTINGS
from caraserve.errors import Overloaded, Unreachable
from caraserve.http.body.sampling import read_defaults
from caraserve.lora.aliases import Aliases
from caraserve.lora.management import AdapterManagement
from caraserve.lora.registry import UPLOADING, AdapterInfo, Registry
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.lora.settings import SettingsStore
from tests.cluster.membership.test_admission import certificate, tls
from tests.http.fake_engine import FakeAdapter, FakeEngine, FakeStream
from tests.http.fleet import FULL, MODEL, Fleet, RawAnswer, fleet
from tests.http.serving import Answer

# --- adapters ---


async def test_a_remote_adapter_is_listed_and_answered_by_its_holder() -> None:
    async with fleet("a", "b") as running:
        c = await running.start("c", FakeEngine(loaded={"far": FakeAdapter("far", "/far", 16, digest="f")}))
        models = (await running["a"].client.get("/v1/models")).json["data"]
        assert [(model["id"], model["rank"]) for model in models] == [
            ("org/base", None),
            ("a", 8),
            ("b", 8),
            ("far", 16),
        ]
        assert (await running["a"].client.get("/v1/models/far")).json["root"] == "f"
        assert (await running["a"].client.complete(model="far")).json["model"] == "far"
        assert [request.adapter for request in c.engine.requests] == ["far"]
        assert [name for name, _ in running["a"].forwards] == ["c"]
        assert (await running["a"].client.complete(model="absent")).status == 404


async def test_an_adapter_without_reachable_holders_is_unavailable_not_unknown() -> None:
    async with fleet("a") as running:
        running.world.names["far"] = RegisteredAdapter("far", "f", 8, 1)
        running.world.held["f"] = {"z": Tier.HOST}
        answer = await running["a"].client.complete(model="far")
        assert (answer.status, answer.error["code"]) == (503, "adapter_unavailable")


class Cut:
    """A downloader that reaches no holder."""

    def __init__(self) -> None:
        self.asked = 0

    async def ensure(self, name: str) -> None:
        self.asked += 1
        raise Unreachable(f"the adapter {name} cannot be downloaded now", retry_after_s=5.0)

    def can_get(self, name: str) -> bool:
        return True  # expected, until a download is tried


@pytest.mark.parametrize("entry", ["a", "d"])
@pytest.mark.parametrize("held", [False, True])
async def test_after_a_failed_download_only_holders_are_tried(entry: str, held: bool, running: Fleet) -> None:
    cuts = {name: Cut() for name in "abcd"}
    for name, cut in cuts.items():
        await running.start(name, fetcher=cut)
    running.world.names["far"] = RegisteredAdapter("far", "f", 8, 1)
    if held:
        await running.start("e", FakeEngine(loaded={"far": FakeAdapter("far", "/far", digest="f")}))
    answer = await running[entry].client.complete(model="far")
    assert answer.status == (200 if held else 503)
    assert held or answer.error["code"] == "adapter_unavailable"
    assert {name: cut.asked for name, cut in cuts.items()} == {"a": 1, "b": 0, "c": 0, "d": 0}


async def test_an_instance_with_another_digest_for_the_name_refuses() -> None:
    async with fleet("b") as running:
        a = await running.start("a", FakeEngine(loaded={"poet": FakeAdapter("poet", "/old", digest="old")}))
        b = await running.start("c", FakeEngine(loaded={"poet": FakeAdapter("poet", "/new", digest="new")}))
        running.world.held["new"]["a"] = Tier.HOST  # a view of the past
        running["b"].engine.loaded["poet"] = FakeAdapter("poet", "/old", digest="old")
        assert (await running["b"].client.complete(model="poet")).status == 200
        assert [len(server.engine.requests) for server in (a, running["b"], b)] == [0, 0, 1]


async def test_an_instance_with_a_stale_digest_for_the_name_refuses() -> None:
    async with fleet("b") as running:
        a = await running.start("a", FakeEngine(loaded={"poet": FakeAdapter("poet", "/old", digest="old")}))
        a.view.names = dict(running.world.names)
        c = await running.start("c", FakeEngine(loaded={"poet": FakeAdapter("poet", "/new", digest="new")}))
        running.world.held["new"]["a"] = Tier.HOST
        assert (await running["b"].client.complete(model="poet")).status == 200
        assert [len(server.engine.requests) for server in (a, c)] == [0, 1]
        assert a.routing_metrics.refused == {"no-adapter": 1}


@pytest.mark.parametrize("routing", ["first-fit", LOCAL])
async def test_an_adapter_that_is_being_uploaded_is_answered_where_it_arrives(routing: str) -> None:
    async with fleet("a", "b", "c", routing=routing) as running:
        c = running["c"]
        c.engine.loaded["new"] = AdapterInfo("new", "0" * 64, "/new", 8, (), 1, 0.0, state=UPLOADING)  # type: ignore[assignment]
        running.world.uploads["new"] = {"c": RegisteredAdapter("new", "", 8, 1)}
        for name in "abc":
            assert (await running[name].client.complete(model="new")).status == 200
        assert [len(running[name].engine.requests) for name in "abc"] == [0, 0, 3]
        c.engine.loaded["new"] = FakeAdapter("new", "/new")  # it is complete, which the others do not know yet
        c.view.names = {"new": RegisteredAdapter("new", c.engine.loaded["new"].digest, 8, 1)}
        assert (await running["a"].client.complete(model="new")).status == 200
        assert len(c.engine.requests) == 4


@pytest.mark.parametrize("routing", ["first-fit", LOCAL])
async def test_an_upload_that_has_failed_where_it_arrives_is_an_unavailable_adapter(routing: str) -> None:
    async with fleet("a", "b", routing=routing) as running:
        running.add_absent("z")
        for name in "bz":
            running.world.uploads["new"] = {name: RegisteredAdapter("new", "", 8, 1)}
            answer = await running["a"].client.complete(model="new")
            assert (answer.status, answer.error["code"]) == (503, "adapter_unavailable")
        assert [name for name, _ in running["a"].forwards] == ["b", "z"]
        assert (await running["a"].client.get("/v1/adapters/new")).status == 200


async def managed(adapter: str) -> AdapterManagement:
    """Returns the settings of an instance on which the alias prod stands for an adapter."""
    replicated, no_uploads, no_catalog = ReplicatedSettings(Registry(None)), cast(Any, None), cast(Any, None)
    aliases = Aliases(replicated, lambda name: True)
    await aliases.point("prod", adapter)
    return AdapterManagement(no_uploads, aliases, SettingsStore(replicated, no_catalog, read_defaults))


async def test_an_alias_is_resolved_where_the_request_is_received_and_nowhere_else(running: Fleet) -> None:
    engine = FakeEngine(loaded={"v1": FakeAdapter("v1", "/v1", digest="1" * 64), "v2": FakeAdapter("v2", "/v2")})
    await running.start("a", engine, management=await managed("v2"))
    b = await running.start("b", FakeEngine(loaded={}), management=await managed("v1"))
    answer = await b.client.complete(model="prod")
    assert (answer.json["model"], answer.headers["x-caraserve-adapter"]) == ("prod", "v1@" + "1" * 64)
    statuses = [
        (await b.client.complete(model="prod", headers={"If-Match": f'"{digit * 64}"'})).status for digit in "1d"
    ]
    assert statuses == [200, 412]
    lines = [("If-Match", f'"{digit * 64}"') for digit in "d1"]
    assert (await b.client.complete(model="prod", headers=lines)).status == 200
    assert {request.adapter for request in engine.requests} == {"v1"}


class Switch:
    """A downloader before whose answer a name comes to stand for another version of its adapter."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def ensure(self, name: str) -> None:
        self._engine.loaded[name] = FakeAdapter(name, "/new", digest="new")

    def can_get(self, name: str) -> bool:
        return True


async def test_a_version_that_is_replaced_before_a_forwarded_request_starts_is_not_answered_by_another() -> None:
    async with fleet("b") as running:
        old = FakeEngine(loaded={"poet": FakeAdapter("poet", "/old", digest="old")})
        a = await running.start("a", old, fetcher=Switch(old))
        c = await running.start("c", FakeEngine(loaded={"poet": FakeAdapter("poet", "/old", digest="old")}))
        answer = await running["b"].client.complete(model="poet")
        assert (answer.status, answer.headers["x-caraserve-adapter"]) == (200, "poet@old")
        assert [stream.cancels for stream in a.engine.streams] == [1]
        assert len(c.engine.requests) == 1
        assert a.routing_metrics.refused == {"no-adapter": 1}


async def test_base_models_may_have_other_names_on_other_instances() -> None:
    async with fleet("b") as running:
        a = await running.start("a", FakeEngine(base_name="called/otherwise"))
        answer = await running["b"].client.complete(model="org/base")
        assert (answer.json["model"], len(a.engine.requests)) == ("org/base", 1)


async def test_an_instance_is_ready_when_it_has_the_clusters_registry() -> None:
    async with fleet("a") as running:
        early = await running["a"].client.get("/ready")
        assert (early.status, early.error["code"]) == (503, "not_ready")
        assert (await running["a"].client.get("/health")).status == 200
        running["a"].view.has_registry = True
        assert (await running["a"].client.get("/ready")).status == 200


# --- accepted senders ---


async def test_a_forwarded_request_must_be_signed_and_is_accepted_once() -> None:
    caught: list[tuple[str, Mapping[str, str], bytes]] = []

    async def catch(request: web.Request, seen: RawAnswer) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in (CLAIMS_HEADER, SIGNATURE_HEADER, "Content-Type")}
        caught.append((request.path, headers, seen.bodies[-1]))
        return web.json_response({})

    async with fleet("b", "c", raw={"a": catch}) as running:
        for _ in range(2):
            await running["b"].client.complete()
        (path, headers, body), (_, others, _) = caught
        real = running.world.records.pop("a")
        running.world.loads.pop("a")
        a = await running.start("a")
        assert real.name == "a"

        async def post(to: str = path, body: bytes = body, **changes: str) -> int:
            answer = await a.client.request("POST", to, data=body, headers={**headers, **changes})
            assert (INSTANCE_HEADER in answer.headers) == (answer.status == 200)
            return answer.status

        assert await post(**{SIGNATURE_HEADER: "0" * 64}) == 403
        assert await post(**{CLAIMS_HEADER: headers[CLAIMS_HEADER].replace('"b"', '"c"')}) == 403
        assert await post(body=body.replace(b"ab", b"ba"), **others) == 403
        assert await post(f"{PREFIX}/v1/chat/completions") == 403
        assert (await running["c"].client.request("POST", path, data=body, headers=headers)).status == 403
        assert await post() == 200
        assert await post() == 403
        assert len(a.engine.requests) == 1


async def test_the_body_of_an_unsigned_request_is_not_read() -> None:
    async with fleet("a") as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running["a"].client.port)
        writer.write(
            f"POST {PREFIX}/v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n".encode()
        )
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 403")
        writer.close()


async def test_the_peer_port_uses_tls_and_has_no_client_routes(tmp_path: Path, running: Fleet) -> None:
    certificate(tmp_path, "ca")
    certificate(tmp_path, "member", tmp_path / "ca")
    member = tls(tmp_path, "member", "ca")
    assert member.listening is not None
    assert member.dialling is not None
    for name in "ab":
        await running.start(name, tls=(member.listening, member.dialling), api_key=("secret",))
    key = {"Authorization": "Bearer secret"}
    for stream in (False, True):
        assert (await running["b"].client.complete(headers=key, stream=stream)).status == 200
    assert len(running["a"].engine.requests) == 2
    url = f"https://{running.world.records['a'].address}/v1/completions"
    async with running["a"].client.session.post(url, json={"prompt": "x"}, ssl=member.dialling) as answer:
        assert answer.status == 401
    async with running["a"].client.session.post(url, json={}, headers=key, ssl=member.dialling) as answer:
        assert answer.status == 404


async def test_a_client_cannot_claim_that_its_request_was_forwarded() -> None:
    async with fleet("a", "b") as running:
        await running["b"].client.complete(headers={CLAIMS_HEADER: '{"id":"x"}', SIGNATURE_HEADER: "0" * 64})
        assert running["b"].forwards


async def test_local_routing_forwards_nothing() -> None:
    async with fleet("a", "b", routing="local") as running:
        await running["b"].client.complete()
        assert len(running["b"].engine.requests) == 1


async def test_a_request_over_the_slo_goes_elsewhere_and_at_last_to_the_best_instance() -> None:
    def loaded(requests: int) -> Backlog:
        return Backlog(requests)

    async with fleet("a", "b", routing="rank-aware", slo=LatencyTargets(tpot_ms=10)) as running:
        running.world.loads |= {"a": loaded(60), "b": loaded(90)}
        assert (await running["b"].client.complete()).status == 200
        assert len(running["a"].engine.requests) == 1


async def test_metrics_show_predicted_and_observed_latency() -> None:
    async with fleet("a", "b") as running:
        await running["b"].client.complete()
        running.world.loads["a"] = FULL
        await asyncio.sleep(0.03)
        await running["b"].client.complete(stream=True)
        routing_metrics = running["b"].routing_metrics
        assert set(routing_metrics.latencies) == {"a", "b"}
        text = "".join(routing_metrics.families('model_name="m"'))
        assert 'caraserve:forwarded_requests_total{instance="a",model_name="m"} 1' in text
        assert 'caraserve:routing_decision_seconds_count{model_name="m"} 2' in text


# --- dLoRA's rule: a waiting request moves to a less loaded instance ---


BUSY = Backlog(requests=40, queued_tokens=3000)
LOOK_S = 0.03  # until every instance has read the state of the others again


async def waiting_at_a(running: Fleet, entry: str) -> "tuple[asyncio.Task[Answer], FakeStream]":
    """Returns a request that waits at instance a, which was idle when it arrived and is now the busiest."""
    running.world.loads |= {"a": Backlog(), "b": BUSY, "c": BUSY}
    asked = asyncio.create_task(running[entry].client.complete(model="b", stream=True))
    (stream,) = await running["a"].engine.submitted()
    stream.taken = 0  # the stream was looked at; nothing came
    running.world.loads |= {"a": BUSY, "b": Backlog(), "c": Backlog(requests=5)}
    await asyncio.sleep(LOOK_S)
    return asked, stream


async def start_three(running: Fleet) -> None:
    await running.start("a", FakeEngine(script=None))
    await running.start("b")
    await running.start("c")


@pytest.mark.parametrize("entry", ["a", "c"])
async def test_a_waiting_request_moves(entry: str) -> None:
    async with fleet(routing="dlora") as running:
        await start_three(running)
        asked, stream = await waiting_at_a(running, entry)
        running["a"].router.rebalancer.rebalance()
        await stream.cancelled.wait()
        stream.end(0, "cancelled")
        answer = await asked
        assert answer.status == 200
        (there,) = running["b"].engine.requests
        assert (there.adapter, there.params.seed) == ("b", stream.request.params.seed)
        assert running["a"].routing_metrics.moved == 1
        assert not running["c"].engine.requests


async def test_a_request_that_has_started_does_not_move() -> None:
    async with fleet(routing="dlora") as running:
        await start_three(running)
        asked, stream = await waiting_at_a(running, "c")
        stream.taken = 1
        running["a"].router.rebalancer.rebalance()
        assert not stream.cancelled.is_set()
        stream.end()
        assert (await asked).status == 200


async def test_requests_do_not_move_to_an_equally_loaded_instance() -> None:
    async with fleet(routing="dlora") as running:
        await start_three(running)
        asked, stream = await waiting_at_a(running, "c")
        running.world.loads |= dict.fromkeys("bc", BUSY)
        await asyncio.sleep(LOOK_S)
        running["a"].router.rebalancer.rebalance()
        assert not stream.cancelled.is_set()
        stream.end()
        await asked


async def test_a_moved_request_returns_when_no_other_instance_accepts_it() -> None:
    async with fleet(routing="dlora") as running:
        await start_three(running)
        asked, stream = await waiting_at_a(running, "a")
        running["a"].router.rebalancer.rebalance()
        for name in "bc":
            running.world.records.pop(name)
        stream.end(0, "cancelled")
        _, again = await running["a"].engine.submitted(2)
        again.end()
        assert (await asked).status == 200


# --- under any views of the cluster ---


NAMES = ("a", "b", "c", "d")  # d is believed in and does not exist


@st.composite
def views(draw: st.DrawFn) -> tuple[Instance, ...]:
    """Generates an instance's view: any instance, even itself, may be missing, loaded, or unable to answer."""
    seen = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return tuple(
        Instance(
            name,
            MODEL,
            Backlog(
                requests=draw(st.integers(0, 80)),
                rank_sum=8 * draw(st.integers(0, 80)),
                rank_max=8,
                queue_room=draw(st.sampled_from([0.0, 1.0, 100.0])),
            ),
            LinkSpeeds(fetch_latency_ms=draw(st.sampled_from([0.0, 50.0]))),
            draw(st.booleans()),
        )
        for name in seen
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    routing=st.sampled_from(ROUTINGS),
    believed=st.lists(views(), min_size=3, max_size=3),
    held=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(list(Tier))),
    full=st.sets(st.sampled_from(NAMES)),
    draining=st.sets(st.sampled_from(NAMES)),
    entry=st.sampled_from("abc"),
    model=st.sampled_from(["org/base", "poet"]),
)
def test_one_hop_under_any_views(
    routing: str,
    believed: list[tuple[Instance, ...]],
    held: dict[str, Tier],
    full: set[str],
    draining: set[str],
    entry: str,
    model: str,
) -> None:
    async def run() -> None:
        async with asyncio.timeout(10), fleet(routing=routing, slo=LatencyTargets(tpot_ms=10.0)) as running:
            await start_some(running, full)
            running.add_absent("d")
            running.world.held["p"] = held
            for name, seen in zip("abc", believed, strict=True):
                running[name].view.stale = seen
                running[name].engine.draining = name in draining
            answer = await running[entry].client.complete(model=model)
            served = sum(len(server.engine.requests) for server in running.servers.values())
            assert answer.status in (200, 429, 503)
            assert served == (answer.status == 200)
            assert all(not server.forwards for name, server in running.servers.items() if name != entry)
            assert len(running[entry].forwards) <= 7

    asyncio.run(run())


async def start_some(running: Fleet, full: set[str]) -> None:
    for name in "abc":
        refusals: dict[int, Exception] = {0: Overloaded("full", retry_after_s=1)} if name in full else {}
        engine = FakeEngine(refusals=refusals, loaded={"poet": FakeAdapter("poet", "/poet", digest="p")})
        await running.start(name, engine)
    with contextlib.suppress(KeyError):
        del running.world.held["d"]
