"""Tests of the spans that a fake collector receives, of trace context across instances, and of what is dropped."""

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from caraserve.core.request import GenerateRequest, Phase, Phases, PhaseTime, Request, SamplingParams, TokenDelta
from caraserve.errors import BackendFailed, Displaced
from caraserve.http import tracing
from caraserve.http.deadline import HEADER
from caraserve.http.tracing import OtlpExporter, Tracer
from caraserve.lora.adapter import AdapterTier
from tests.engine_harness import EngineHarness, harness
from tests.http.fake_engine import DIGEST, PHASES, FakeEngine, finish, spell
from tests.http.fleet import FULL, fleet
from tests.http.serving import Answer, Client, serving
from tests.http.test_streaming import begun

TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{CALLER}-01"}


class Collector:
    """A collector that keeps the spans of every request, and answers with `status`."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.status = 200

    async def take(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/json"
        self.paths.add(request.path)
        for one in (await request.json())["resourceSpans"]:
            self.resources.append(facts(one["resource"]))
            self.spans += [span for scope in one["scopeSpans"] for span in scope["spans"]]
        return web.Response(status=self.status)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]


def facts(of: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a span or a resource."""
    return {one["key"]: next(iter(one["value"].values())) for one in of["attributes"]}


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, OtlpExporter]]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/{path:.*}", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    exporter = OtlpExporter(f"http://127.0.0.1:{runner.addresses[0][1]}", "me")
    try:
        yield collector, exporter
    finally:
        await exporter.close()
        await runner.cleanup()


def traced(engine: FakeEngine, exporter: OtlpExporter) -> AbstractAsyncContextManager[Client]:
    return serving(engine, tracer=Tracer(exporter, "auto"))


def phased(request: GenerateRequest) -> Iterable[TokenDelta]:
    """An answer whose request was queued, loaded its adapter, was computed, preempted and computed again."""
    began_s = time.monotonic()
    names = ("queued", "load", "prefill", "queued", "prefill", "decode")
    history = tuple(PhaseTime(name, began_s + at, began_s + at + 1) for at, name in enumerate(names))
    *deltas, last = spell(request)
    ended = dataclasses.replace(
        finish(request, 3), phases=dataclasses.replace(PHASES, history=history, loading_choice="pipelined")
    )
    return [*deltas, dataclasses.replace(last, finish=ended)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_its_phases_below_it(stream: bool) -> None:
    async with collecting() as (collector, exporter):
        async with traced(FakeEngine(script=phased), exporter) as client:
            before_ns = time.time_ns()
            answer = await client.complete(stream=stream, headers={"X-Request-Id": "my-id"})
        assert answer.status == 200
    (root,) = collector.named("llm_request")
    assert "parentSpanId" not in root
    assert before_ns <= int(root["startTimeUnixNano"]) <= int(root["endTimeUnixNano"]) <= time.time_ns()
    found = facts(root)
    expected = {
        "gen_ai.request.id": "my-id",
        "gen_ai.response.model": "org/base",
        "gen_ai.usage.prompt_tokens": "3",
        "gen_ai.usage.completion_tokens": "3",
        "gen_ai.latency.time_in_queue": 0.001,
        "http.response.status_code": "200",
        "caraserve.client": "127.0.0.1",
        "caraserve.loading_mode": "auto",
        "caraserve.loading_choice": "pipelined",
    }
    assert {name: found[name] for name in expected} == expected
    phases = [span for span in collector.spans if span is not root]
    assert [span["name"] for span in phases] == ["queued", "load", "prefill", "queued", "prefill", "decode"]
    assert {(span["traceId"], span["parentSpanId"]) for span in phases} == {(root["traceId"], root["spanId"])}
    starts = [int(span["startTimeUnixNano"]) for span in phases]
    assert all(later - earlier == pytest.approx(1e9, abs=1e6) for earlier, later in itertools.pairwise(starts))
    assert abs(starts[0] - before_ns) < 10e9
    assert len({span["spanId"] for span in collector.spans}) == 7
    assert collector.paths == {"/v1/traces"}
    assert collector.resources[0]["service.instance.id"] == "me"


@pytest.mark.parametrize(("tier", "shown"), [(AdapterTier.DEVICE, "device"), (AdapterTier.DISK, "disk")])
async def test_the_span_names_the_adapter_its_digest_and_where_it_was(tier: AdapterTier, shown: str) -> None:
    fake = FakeEngine()
    fake.catalog.adapters[fake.adapter("a").digest] = SimpleNamespace(tier=tier, source=None)
    async with collecting() as (collector, exporter), traced(fake, exporter) as client:
        assert (await client.complete(model="a")).status == 200
    found = facts(collector.named("llm_request")[0])
    assert found["gen_ai.response.model"] == "a"
    assert (found["caraserve.adapter.digest"], found["caraserve.adapter.tier"]) == (DIGEST, shown)


async def test_the_trace_of_the_caller_is_continued() -> None:
    async with collecting() as (collector, exporter), traced(FakeEngine(), exporter) as client:
        await client.complete(headers=SAMPLED)
    (root,) = collector.named("llm_request")
    assert (root["traceId"], root["parentSpanId"]) == (TRACE_ID, CALLER)


@pytest.mark.parametrize(
    "header", ["", "x", f"00-{'0' * 32}-{CALLER}-01", f"00-{TRACE_ID}-{'0' * 16}-01", f"ff-{TRACE_ID}-{CALLER}-01"]
)
async def test_a_malformed_context_begins_a_trace(header: str) -> None:
    async with collecting() as (collector, exporter), traced(FakeEngine(), exporter) as client:
        await client.complete(headers={"traceparent": header})
    (root,) = collector.named("llm_request")
    assert "parentSpanId" not in root
    assert root["traceId"] not in ("0" * 32, TRACE_ID)


async def test_what_the_caller_does_not_sample_and_what_generates_no_text_is_not_traced() -> None:
    async with collecting() as (collector, exporter), traced(FakeEngine(), exporter) as client:
        await client.complete(headers={"traceparent": f"00-{TRACE_ID}-{CALLER}-00"})
        await client.get("/v1/models")
        await client.complete(prompt=5)
    assert collector.spans == []


async def test_a_failure_is_marked() -> None:
    async with (
        collecting() as (collector, exporter),
        traced(FakeEngine(refusals={0: BackendFailed("the device failed")}), exporter) as client,
    ):
        assert (await client.complete()).status == 500
    (root,) = collector.named("llm_request")
    assert root["status"] == {"code": 2}
    assert facts(root)["error.type"] == "backend_failed"


async def phases_of_a_failure(
    end: Callable[[EngineHarness, asyncio.Task[Answer]], None], *, until: str, stream: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """Returns the names of phases, and the span's facts, of a request for a cold adapter that `end` ends in `until`."""
    async with collecting() as (collector, exporter), harness(random.Random(0), slots=1) as here:
        engine: Any = here.engine
        before = here.ask([1, 2, 3], None, max_tokens=40) if until == "queued" else None
        async with traced(engine, exporter) as client:
            headers = {HEADER: "10000"}
            body = {"prompt": [4, 5, 6], "model": "a0", "max_tokens": 40, "stream": stream}
            asking = asyncio.create_task(client.post("/v1/completions", body, headers=headers))
            await reached(here, until)
            end(here, asking)
            await asyncio.wait([asking])
            await here.settle()
        if before is not None:
            await before[1]
    (root,) = collector.named("llm_request")
    assert root["status"] == {"code": 2}
    phases = [span for span in collector.spans if span is not root]
    assert {span["parentSpanId"] for span in phases} == {root["spanId"]}
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in phases)
    return [span["name"] for span in phases], facts(root)


async def reached(here: EngineHarness, phase: str) -> None:
    """Runs the engine until its request for adapter a0 is in this phase."""
    shown = here.engine.snapshot
    while "a0" not in {*shown().waiting_adapters, *shown().running_adapters}:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(10):  # turns of the engine's loop, which admits it
        await asyncio.sleep(0)
    while phase == "decode" and not here.metrics.first_tokens:
        here.end_something()
        await asyncio.sleep(0)


REACHED = {"queued": ["queued"], "load": ["queued", "load"], "decode": ["queued", "load", "prefill", "decode"]}


@pytest.mark.parametrize("until", REACHED)
async def test_a_request_whose_client_leaves_has_the_phases_that_it_reached(until: str) -> None:
    phases, found = await phases_of_a_failure(lambda here, asking: asking.cancel(), until=until)
    assert phases == REACHED[until]
    assert (found["http.response.status_code"], found["error.type"]) == ("499", "499")


@pytest.mark.parametrize(("until", "stream"), [("queued", False), ("decode", False), ("decode", True)])
async def test_a_request_past_its_deadline_has_the_phases_that_it_reached(
    pass_time: Callable[[float], None], until: str, stream: bool
) -> None:
    phases, found = await phases_of_a_failure(lambda here, asking: pass_time(10.0), until=until, stream=stream)
    assert phases == REACHED[until]
    assert found["error.type"] == "deadline_exceeded"


async def test_a_request_whose_adapter_cannot_be_read_was_queued_and_loading() -> None:
    def fail_read(here: EngineHarness, asking: asyncio.Task[Answer]) -> None:
        here.read_failures = 1.0
        here.end_something()

    phases, found = await phases_of_a_failure(fail_read, until="load")
    assert (phases, found["error.type"]) == (REACHED["load"], "InvalidUserInput")


async def test_a_request_that_is_refused_after_it_has_queued_was_queued() -> None:
    def displaced(request: GenerateRequest) -> list[TokenDelta]:
        now_s = time.monotonic()
        phases = Phases(queued_ms=1000.0, history=(PhaseTime("queued", now_s, now_s + 1),))
        error = Displaced("2 requests are waiting", retry_after_s=1.0)
        return [TokenDelta("", (), finish=dataclasses.replace(finish(request, 0, "error", error=error), phases=phases))]

    async with collecting() as (collector, exporter), traced(FakeEngine(script=displaced), exporter) as client:
        assert (await client.complete(n=2)).status == 429
    root, phase = sorted(collector.spans, key=lambda span: span["name"])
    assert (root["status"], facts(root)["error.type"], phase["name"]) == ({"code": 2}, Displaced.code, "queued")


async def test_a_forwarded_request_whose_client_leaves_is_an_error_on_both_instances() -> None:
    async with collecting() as (collector, exporter), fleet() as running:
        a = await running.start("a", tracer=Tracer(exporter, "auto"))
        b = await running.start("b", FakeEngine(script=None), tracer=Tracer(exporter, "auto"))
        running.world.loads["a"] = FULL
        asking = asyncio.create_task(a.client.complete())
        (stream,) = await b.engine.submitted()
        now_s = time.monotonic()
        stream.reached = Phases(1000.0, history=(PhaseTime("queued", now_s, now_s + 1),))
        asking.cancel()
        await stream.cancelled.wait()
    assert [one.get("status") for one in (*collector.named("llm_request"), *collector.named("forward"))] == [
        {"code": 2}
    ] * 3
    assert len({span["traceId"] for span in collector.spans}) == 1
    assert collector.named("queued")[0]["parentSpanId"] in {span["spanId"] for span in collector.named("llm_request")}


async def test_a_forwarded_stream_that_fails_names_its_error_on_both_instances() -> None:
    async with collecting() as (collector, exporter), fleet() as running:
        a = await running.start("a", tracer=Tracer(exporter, "auto"))
        b = await running.start("b", FakeEngine(script=begun), tracer=Tracer(exporter, "auto"))
        running.world.loads["a"] = FULL
        asking = asyncio.create_task(a.client.complete(stream=True))
        (stream,) = await b.engine.submitted()
        stream.end(1, "error", BackendFailed("the device failed"))
        assert (await asking).status == 200
    (forward,) = collector.named("forward")
    here, there = sorted(collector.named("llm_request"), key=lambda span: "parentSpanId" in span)
    assert there["parentSpanId"] == forward["spanId"]
    assert here["status"] == forward["status"] == there["status"] == {"code": 2}
    assert facts(here)["error.type"] == facts(there)["error.type"] == "backend_failed"


async def test_an_instance_that_is_not_reached_is_a_failed_forward_of_a_request_that_ends_well() -> None:
    async with collecting() as (collector, exporter), fleet() as running:
        running.add_absent("a")
        b = await running.start("b", tracer=Tracer(exporter, "auto"))
        assert (await b.client.complete()).status == 200
    assert collector.named("forward")[0]["status"] == {"code": 2}
    assert "status" not in collector.named("llm_request")[0]


async def test_a_forwarded_request_is_one_trace_on_both_instances() -> None:
    async with collecting() as (collector, exporter), fleet() as running:
        a = await running.start("a", tracer=Tracer(exporter, "auto"))
        b = await running.start("b", FakeEngine(script=phased), tracer=Tracer(exporter, "auto"))
        running.world.loads["a"] = FULL
        assert (await a.client.complete(headers=SAMPLED)).status == 200
        assert len(b.engine.requests) == 1
    (forward,) = collector.named("forward")
    here, there = sorted(collector.named("llm_request"), key=lambda span: span["parentSpanId"] != CALLER)
    assert {span["traceId"] for span in collector.spans} == {TRACE_ID}
    assert (here["parentSpanId"], forward["parentSpanId"]) == (CALLER, here["spanId"])
    assert there["parentSpanId"] == forward["spanId"]
    assert {span["parentSpanId"] for span in collector.named("queued")} == {there["spanId"]}
    assert facts(forward)["caraserve.instance"] == "b"
    assert facts(here)["caraserve.forwarded_to"] == "b"


def outcomes(exporter: OtlpExporter) -> dict[str, int]:
    lines = "".join(exporter.families('model_name="m"')).splitlines()
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name.split('"')[1]: int(count) for name, _, count in samples}


async def test_spans_beyond_the_bound_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST_WAITING", 5)
    async with collecting() as (collector, exporter):
        for _ in range(8):
            exporter.add({"name": "x", "attributes": []})
        assert outcomes(exporter) == {"exported": 0, "dropped": 3}
        await exporter.close()
        assert outcomes(exporter) == {"exported": 5, "dropped": 3}
    assert len(collector.spans) == 5


async def test_spans_that_the_collector_does_not_take_are_dropped_and_counted() -> None:
    async with collecting() as (collector, exporter):
        collector.status = 503
        exporter.add({"name": "x", "attributes": []})
        await exporter.close()
        assert outcomes(exporter) == {"exported": 0, "dropped": 1}
    unreachable = OtlpExporter("http://127.0.0.1:1/own/path", "me")
    unreachable.add({"name": "x", "attributes": []})
    await unreachable.close()
    assert outcomes(unreachable) == {"exported": 0, "dropped": 1}


async def test_a_full_batch_is_sent_without_waiting_for_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_PAUSE_S", 1e6)
    monkeypatch.setattr(tracing, "_BATCH", 2)
    async with collecting() as (collector, exporter):
        sending = asyncio.create_task(exporter.run())
        for _ in range(4):
            exporter.add({"name": "x", "attributes": []})
        async with asyncio.timeout(20):
            while outcomes(exporter)["exported"] < 4:  # noqa: ASYNC110
                await asyncio.sleep(0)
        sending.cancel()
    assert len(collector.spans) == 4


def test_a_preempted_requests_history_keeps_the_order_and_its_phases_the_sums() -> None:
    request = Request(GenerateRequest("id", (1, 2), None, SamplingParams(), 0.0), seed=0)
    ways = [Phase.LOADING, Phase.PREFILL, Phase.PREEMPTED, Phase.PREFILL, Phase.DECODE, Phase.FINISHED]
    for at_s, phase in enumerate(ways, start=1):
        request.move_to(phase, float(at_s))
    phases = request.phases(now_s=9.0)
    assert [one.name for one in phases.history] == ["queued", "load", "prefill", "queued", "prefill", "decode"]
    assert (phases.queued_ms, phases.load_ms, phases.prefill_ms, phases.decode_ms) == (2000, 1000, 2000, 1000)
