"""Deadlines that clients set: a request past its deadline ends as if its client had left, wherever it is answered.

Envoy, and gateways built on it, send the header with every request that they forward under a timeout. Each instance
measures a request's deadline with its own clock; a forwarded request carries the time that remains.
"""

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

from aiohttp import web

from caraserve.errors import DeadlineExceeded, InvalidRequest
from caraserve.http.body.field_types import shown
from caraserve.http.streaming import EVENT_STREAM

HEADER = "x-envoy-expected-rq-timeout-ms"
_MILLISECONDS = re.compile(r"[0-9]{1,15}")
_DEADLINE_S = web.RequestKey("_DEADLINE_S", float)  # by the event loop's clock

P = ParamSpec("P")


def within_deadline(
    handler: Callable[Concatenate[web.Request, P], Awaitable[web.StreamResponse]],
) -> Callable[Concatenate[web.Request, P], Coroutine[Any, Any, web.StreamResponse]]:
    """Returns a handler that is cancelled at its request's deadline. A stream that has started then ends with the
    error; otherwise it raises DeadlineExceeded. Raises InvalidRequest for a header that is no time."""

    @functools.wraps(handler)
    async def bounded(request: web.Request, /, *args: P.args, **kwargs: P.kwargs) -> web.StreamResponse:
        timeout_ms = _timeout_ms(request)
        if timeout_ms == 0:
            return await handler(request, *args, **kwargs)
        request[_DEADLINE_S] = asyncio.get_running_loop().time() + timeout_ms / 1000
        try:
            async with asyncio.timeout_at(request[_DEADLINE_S]) as deadline:
                return await handler(request, *args, **kwargs)
        except TimeoutError:
            if not deadline.expired():
                raise
        if EVENT_STREAM not in request:
            raise _exceeded()
        await request[EVENT_STREAM].end_with_error(_exceeded())
        return request[EVENT_STREAM].response

    return bounded


def remaining_time_header(request: web.Request) -> dict[str, str]:
    """The header for a forwarded request; empty without a deadline. Raises DeadlineExceeded when less than a
    millisecond remains: 0 would mean no deadline."""
    if _DEADLINE_S not in request:
        return {}
    remaining_ms = int(1000 * (request[_DEADLINE_S] - asyncio.get_running_loop().time()))
    if remaining_ms <= 0:
        raise _exceeded()
    return {HEADER: str(remaining_ms)}


def _timeout_ms(request: web.Request) -> int:
    """The time that the header gives; 0, as in Envoy, for no deadline."""
    given = request.headers.get(HEADER, "0")
    if _MILLISECONDS.fullmatch(given) is None:
        raise InvalidRequest(
            f"The header {HEADER} must be a whole number of milliseconds with at most 15 digits, or 0 for no deadline, "
            f"not {shown(given)}.",
            param=HEADER,
        )
    return int(given)


def _exceeded() -> DeadlineExceeded:
    # Without the number: after a forward it is smaller, and the client's message must not depend on that.
    return DeadlineExceeded(f"The answer was not whole within the time that the header {HEADER} gives.")
