"""Traces of requests: one span for a request, with its phases below it, and one for each forward to another instance.

Trace context is W3C's: a request continues the trace of its header `traceparent`, or begins one. A forwarded request
carries the span of its forward, so the spans of the instance that answers are below it. Without an exporter none of
this runs, and the header passes to other instances as it came.
"""

import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from caraserve.http.client import CLIENT
from caraserve.http.context import REQUEST_ID, SERVED_BY
from caraserve.http.otlp import OtlpExporter, Value, attributes
from caraserve.http.request_log import SUMMARY, RequestSummary

TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SERVER, _CLIENT, _INTERNAL = 2, 3, 1  # kinds of spans, by OTLP's numbers
_ERROR = 2  # a status, likewise


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
