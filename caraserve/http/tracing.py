"""Traces of requests: one span for a request, with its phases below it, and one for each forward to another instance.

Trace context is W3C's: a request continues the trace of its header `traceparent`, or begins one. A forwarded request
carries the span of its forward, so the spans of the instance that answers are below it. Without an exporter none of
this runs, and the header passes to other instances as it came.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp import web

from caraserve import __version__
from caraserve.http.client import CLIENT
from caraserve.http.context import REQUEST_ID, SERVED_BY
from caraserve.http.request_log import SUMMARY, RequestSummary
from caraserve.telemetry.prometheus import family

log = logging.getLogger("caraserve.http")

_MOST_WAITING = 4096  # spans, of about 1 kB
_BATCH = 512  # spans in one request
_PAUSE_S = 5.0  # after which spans are sent, however few
_SEND_S = 10.0
_LAST_SEND_S = 2.0  # when the server stops
_DEFAULT_PATH = "/v1/traces"

Value = str | int | float | bool
TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SERVER, _CLIENT, _INTERNAL = 2, 3, 1  # kinds of spans, by OTLP's numbers
_ERROR = 2  # a status, likewise


def attributes(values: Mapping[str, Value | None]) -> list[dict[str, Any]]:
    """Returns values in OTLP's form, without those that are None."""
    return [{"key": key, "value": _encoded(value)} for key, value in values.items() if value is not None]


def _encoded(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64 bits, as protobuf's JSON has them
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


class OtlpExporter:
    """Sends spans to an OpenTelemetry collector: OTLP over HTTP, in JSON. They are encoded when they end, which takes
    some 10 µs each, and wait in a bounded queue. What does not fit, or is not taken, is dropped and counted."""

    def __init__(self, endpoint: str, instance: str) -> None:
        """`endpoint`: the URL; without a path, the standard one is used. `instance`: the name of this server."""
        self._url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _DEFAULT_PATH
        resource = {"service.name": "caraserve", "service.version": __version__, "service.instance.id": instance}
        self._head = b'{"resourceSpans":[{"resource":%b,"scopeSpans":[{"scope":{"name":"caraserve"},"spans":[' % (
            orjson.dumps({"attributes": attributes(resource)})
        )
        self._waiting: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SEND_S))
        self._exported = self._dropped = 0
        self._is_failing = False

    def add(self, span: Mapping[str, Any]) -> None:
        """Queues an ended span, in OTLP's form. Never waits."""
        if len(self._waiting) >= _MOST_WAITING:
            self._dropped += 1
            return
        self._waiting.append(orjson.dumps(span))
        if len(self._waiting) >= _BATCH:
            self._wake.set()

    async def run(self) -> None:
        """Sends spans in batches, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._send()

    async def close(self) -> None:
        """Sends what still waits, for at most two seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SEND_S):
                while self._waiting:
                    await self._send()
        await self._session.close()

    def families(self, labels: str) -> Iterator[str]:
        """Yields the families for GET /metrics."""
        counts = {"exported": self._exported, "dropped": self._dropped}
        samples = [(f'outcome="{outcome}",{labels}', count) for outcome, count in counts.items()]
        yield family(
            "caraserve:trace_spans_total", "counter", "Spans by whether the collector has taken them.", samples
        )

    async def _send(self) -> None:
        count = min(_BATCH, len(self._waiting))
        spans = [self._waiting.popleft() for _ in range(count)]
        body = self._head + b",".join(spans) + b"]}]}]}"
        failure = ""
        try:
            async with self._session.post(self._url, data=body, headers={"Content-Type": "application/json"}) as answer:
                if answer.status >= 300:
                    failure = f"status {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            failure = f"{type(error).__name__}: {error}"[:200]
        finally:
            self._dropped += count  # also when this is cancelled
        if not failure:
            self._dropped -= count
            self._exported += count
        elif not self._is_failing:
            log.warning("spans cannot be exported to %s and are dropped: %s", self._url, failure)
        self._is_failing = bool(failure)


@dataclass(frozen=True, slots=True)
class Forward:
    """An attempt to have another instance answer a request."""

    span_id: str
    peer: str
    began_ns: int
    ended_ns: int
    failed: bool  # without an answer


@dataclass(slots=True)
class RequestTrace:
    """The part of a trace that one request makes on this instance."""

    trace_id: str
    parent_id: str  # empty: the trace begins here
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))
    began_ns: int = field(default_factory=time.time_ns)
    tier: str = ""  # where the adapter was when the request arrived
    forwards: list[Forward] = field(default_factory=list)


TRACE = web.RequestKey("TRACE", RequestTrace)  # absent: the request is not traced


class Tracer:
    """Traces the requests of one server."""

    def __init__(self, exporter: OtlpExporter, loading_mode: str) -> None:
        self._exporter, self._loading_mode = exporter, loading_mode

    def begin(self, request: web.Request) -> None:
        """Begins the trace of a request, unless the caller's trace is not sampled."""
        found = _TRACEPARENT.fullmatch(request.headers.get(TRACEPARENT, ""))
        if found is None:
            request[TRACE] = RequestTrace(secrets.token_hex(16), "")
        elif int(found[3], 16) & 1:
            request[TRACE] = RequestTrace(found[1], found[2])

    def end(self, request: web.Request, status: int) -> None:
        """Queues the spans of a request for text that has ended; any other request has none."""
        trace, summary = request.get(TRACE), request[SUMMARY]
        if trace is None or not summary.model or CLIENT not in request:
            return
        is_error, facts = status >= 400 or bool(summary.error), self._facts(request, trace, summary, status)
        ids, times_ns = (trace.span_id, trace.parent_id), (trace.began_ns, time.time_ns())
        self._add(trace, "llm_request", _SERVER, ids, times_ns, facts, is_error=is_error)
        for one in trace.forwards:
            has_failed = one.failed or (is_error and one is trace.forwards[-1] and bool(summary.forwarded_to))
            ids, times_ns = (one.span_id, trace.span_id), (one.began_ns, one.ended_ns)
            self._add(trace, "forward", _CLIENT, ids, times_ns, {"caraserve.instance": one.peer}, is_error=has_failed)
        offset_ns = time.time_ns() - time.monotonic_ns()
        for phase in () if summary.phases is None else summary.phases.history:
            began_ns, ended_ns = (int(1e9 * at_s) + offset_ns for at_s in (phase.began_s, phase.ended_s))
            ids = secrets.token_hex(8), trace.span_id
            self._add(trace, phase.name, _INTERNAL, ids, (began_ns, ended_ns), {}, is_error=False)

    def _facts(
        self, request: web.Request, trace: RequestTrace, summary: RequestSummary, status: int
    ) -> dict[str, Value | None]:
        """The attributes of a request, by vLLM's names where it has them."""
        name, at, digest = request.get(SERVED_BY, "").partition("@")
        phases = summary.phases
        facts: dict[str, Value | None] = {
            "gen_ai.request.id": request[REQUEST_ID],
            "gen_ai.response.model": name or summary.model,
            "gen_ai.usage.prompt_tokens": summary.prompt_tokens,
            "gen_ai.usage.completion_tokens": summary.completion_tokens,
            "http.route": request.path,
            "http.response.status_code": status,
            "caraserve.client": request[CLIENT].name,
            "caraserve.loading_mode": self._loading_mode,
            "caraserve.adapter.digest": digest if at else None,
            "caraserve.adapter.tier": trace.tier or None,
            "caraserve.finish": summary.finish or None,
            "caraserve.forwarded_to": summary.forwarded_to or None,
            "error.type": summary.error or (str(status) if status >= 400 else None),
        }
        if phases is not None:
            facts |= {
                "gen_ai.latency.time_in_queue": phases.queued_ms / 1000,
                "gen_ai.latency.e2e": phases.e2e_ms / 1000,
                "caraserve.loading_choice": phases.loading_choice or None,
                "caraserve.stalled_ms": phases.stalled_ms,
                "caraserve.interrupted_ms": phases.interrupted_ms,
                "caraserve.cpu_layers": phases.cpu_layers,
                "caraserve.cpu_lora_ms": phases.cpu_lora_ms,
            }
        return facts

    def _add(
        self,
        trace: RequestTrace,
        name: str,
        kind: int,
        ids: tuple[str, str],
        times_ns: tuple[int, int],
        facts: dict[str, Value | None],
        *,
        is_error: bool,
    ) -> None:
        """Exports a span. `ids`: its own and its parent's, empty for none. `times_ns`: when it began and ended."""
        span: dict[str, Any] = {
            "traceId": trace.trace_id,
            "spanId": ids[0],
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(times_ns[0]),
            "endTimeUnixNano": str(times_ns[1]),
            "attributes": attributes(facts),
        }
        if ids[1]:
            span["parentSpanId"] = ids[1]
        if is_error:
            span["status"] = {"code": _ERROR}
        self._exporter.add(span)


TRACER = web.AppKey("TRACER", Tracer)  # absent: requests are not traced


@contextlib.contextmanager
def forward_headers_of(request: web.Request, peer: str) -> Iterator[dict[str, str]]:
    """Yields the trace context for a request to another instance, and notes its time. Empty if it is not traced."""
    trace = request.get(TRACE)
    if trace is None:
        yield {}
        return
    span_id, began_ns, failed = secrets.token_hex(8), time.time_ns(), True
    try:
        yield {TRACEPARENT: f"00-{trace.trace_id}-{span_id}-01"}
        failed = False
    finally:
        trace.forwards.append(Forward(span_id, peer, began_ns, time.time_ns(), failed))
