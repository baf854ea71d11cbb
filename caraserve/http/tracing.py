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

from caraserve.core.request import PhaseTime
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
        ended_ns, is_error = time.time_ns(), status >= 400 or bool(summary.error)
        self._add(
            trace, "llm_request", _SERVER, trace.span_id, trace.parent_id, trace.began_ns, ended_ns,
            self._facts(request, trace, summary, status), is_error=is_error,
        )  # fmt: skip
        for one in trace.forwards:
            facts: dict[str, Value | None] = {"caraserve.instance": one.peer}
            answered = one is trace.forwards[-1] and bool(summary.forwarded_to)
            self._add(
                trace, "forward", _CLIENT, one.span_id, trace.span_id, one.began_ns, one.ended_ns, facts,
                is_error=one.failed or (answered and is_error),
            )  # fmt: skip
        if summary.phases is not None:
            offset_ns = time.time_ns() - time.monotonic_ns()
            for phase in summary.phases.history:
                self._add_phase(trace, phase, offset_ns)

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

    def _add_phase(self, trace: RequestTrace, phase: PhaseTime, offset_ns: int) -> None:
        began_ns, ended_ns = (int(1e9 * at_s) + offset_ns for at_s in (phase.began_s, phase.ended_s))
        self._add(trace, phase.name, _INTERNAL, secrets.token_hex(8), trace.span_id, began_ns, ended_ns, {})

    def _add(
        self,
        trace: RequestTrace,
        name: str,
        kind: int,
        span_id: str,
        parent_id: str,
        began_ns: int,
        ended_ns: int,
        facts: dict[str, Value | None],
        *,
        is_error: bool = False,
    ) -> None:
        span: dict[str, Any] = {
            "traceId": trace.trace_id,
            "spanId": span_id,
            "name": name,
            "kind": kind,
            "startTimeUnixNano": str(began_ns),
            "endTimeUnixNano": str(ended_ns),
            "attributes": attributes(facts),
        }
        if parent_id:
            span["parentSpanId"] = parent_id
        if is_error:
            span["status"] = {"code": _ERROR}
        self._exporter.add(span)


TRACER = web.AppKey("TRACER", Tracer)  # absent: requests are not traced


@contextlib.contextmanager
def forward_headers_of(request: web.Request, peer: str) -> Iterator[dict[str, str]]:
    """Yields the trace context for a request to another instance, and notes the time until the context ends. Empty for
    a request that is not traced."""
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
