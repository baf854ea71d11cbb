"""Logs one line for each request when it ends: client, model, finish, times; never any text of prompt or answer.

The middleware creates a `RequestSummary` and logs it at the end; the handlers fill it in. Names from clients are
shortened here and escaped by `telemetry/log.py`.
"""

import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from aiohttp import web

from caraserve.core.request import Phases
from caraserve.errors import CaraServeError
from caraserve.http.api_request import ResponseTotals
from caraserve.http.client import CLIENT
from caraserve.http.streaming import EVENT_STREAM

log = logging.getLogger("caraserve.http.requests")

IGNORED_HEADER = "x-caraserve-ignored"
CLIENT_LEFT = 499  # nginx's number: the client closed the connection before the answer was complete
_LOGGED_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_QUIET_PATHS = frozenset({"/ping"})  # SageMaker may send this probe as a POST
_LOGGED_PHASES = ("queued_ms", "load_ms", "prefill_ms", "decode_ms")
_LONGEST_PATH = 200
_LONGEST_NAME = 64
_LONGEST_LIST = 2048  # characters of the header; clients and proxies accept at least 8 KB of headers
_NOT_IN_HEADERS = re.compile(r"[^A-Za-z0-9_.:-]")
_DIGEST_CHARACTERS = 12


@dataclass(slots=True)
class RequestSummary:
    """The contents of one log line."""

    began_s: float = field(default_factory=time.perf_counter)
    model: str = ""  # adapter@digest, or the base's name
    ignored: str = ""  # fields that were sent and not read, as the header lists them
    forwarded_to: str = ""  # the instance that answered; empty for this one
    finish: str = ""  # the reasons
    phases: Phases | None = None  # of the slowest answer, or those that a failed request has reached
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    error: str = ""  # code or type of the error that the client received
    param: str = ""  # the field that the error names

    def note_tokens(self, count: int) -> None:
        """Counts tokens of the answers as they come, for a request that may not end well."""
        self.completion_tokens = (self.completion_tokens or 0) + count

    def note_totals(self, totals: ResponseTotals) -> None:
        """Notes how the engine requests ended."""
        self.finish, self.phases = ",".join(totals.reasons), totals.slowest
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = totals.tokens

    def note_error(self, error: CaraServeError) -> None:
        """Notes the error that was sent to the client."""
        self.error = error.code or error.type
        self.param = (error.param or "")[:_LONGEST_NAME]


SUMMARY = web.RequestKey("SUMMARY", RequestSummary)


def model_label(served_by: str) -> str:
    """`adapter@digest` with a short digest: the same name may stand for other weights later."""
    name, at, digest = served_by.partition("@")
    return f"{name}{at}{digest[:_DIGEST_CHARACTERS]}"


def listed(names: Iterable[str]) -> str:
    """Names of fields as the value of a header. Characters that are not allowed in headers become `?`."""
    text = ", ".join([_NOT_IN_HEADERS.sub("?", name[:_LONGEST_NAME]) for name in names])
    return text if len(text) <= _LONGEST_LIST else f"{text[:_LONGEST_LIST].rpartition(', ')[0]}, ..."


def note_end(request: web.Request, status: int) -> int:
    """Notes the error that ended a stream. Returns the status to report: not the stream's if the client has left."""
    stream = request.pop(EVENT_STREAM, None)  # which refers to the request: a cycle
    if stream is None:
        return status
    if stream.error is not None:
        request[SUMMARY].note_error(stream.error)
        return status
    return status if stream.ended else CLIENT_LEFT


def log_request(request: web.Request, request_id: str, status: int) -> None:
    """Logs a request of an authenticated client that asks for work or for a change. All others are only counted in the
    metrics: pages, lists, probes, and clients without a key, which could fill the log."""
    if (
        CLIENT not in request
        or request.method not in _LOGGED_METHODS
        or request.path in _QUIET_PATHS
        or not log.isEnabledFor(logging.INFO)
    ):
        return
    summary = request[SUMMARY]
    details: dict[str, object] = {
        "id": request_id,
        "client": request[CLIENT].name,
        "method": request.method,
        "path": request.path[:_LONGEST_PATH],
        "status": status,
        "model": summary.model,
        "prompt_tokens": summary.prompt_tokens,
        "cached_tokens": summary.cached_tokens,
        "completion_tokens": summary.completion_tokens,
        "finish": summary.finish,
    }
    if (phases := summary.phases) is not None:
        details |= {name: round(getattr(phases, name), 1) for name in _LOGGED_PHASES}
    details |= {
        "total_ms": round(1000 * (time.perf_counter() - summary.began_s), 1),
        "forwarded_to": summary.forwarded_to,
        "ignored": summary.ignored,
        "error": summary.error,
        "param": summary.param,
    }
    log.info("request", extra={"details": {name: value for name, value in details.items() if value not in (None, "")}})
