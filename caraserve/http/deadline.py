"""How long whoever asks will wait: past that a request ends as if its client had left, wherever it is answered.

Envoy, and gateways built on it, say so of every request that they pass on under a timeout. Each instance has a clock
of its own for a request, and another one that it has answer gets the time that remains then. Called by `dispatch.py`
and `proxy.py`.
"""

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

from aiohttp import web

from caraserve.errors import DeadlineExceeded, InvalidRequest
from caraserve.http.responses import fault_body
from caraserve.http.streaming import BEGUN
from caraserve.http.validation import shown

HEADER = "x-envoy-expected-rq-timeout-ms"
_MILLISECONDS = re.compile(r"[0-9]{1,15}")
_DEADLINE_S = web.RequestKey("_DEADLINE_S", float)  # by the event loop's clock

P = ParamSpec("P")


def in_time(
    handler: Callable[Concatenate[web.Request, P], Awaitable[web.StreamResponse]],
) -> Callable[Concatenate[web.Request, P], Coroutine[Any, Any, web.StreamResponse]]:
    """A handler that is cancelled at its request's deadline. A stream that has begun then ends with the error, and else
    DeadlineExceeded is raised. Raises InvalidRequest for a header that gives no time."""

    @functools.wraps(handler)
    async def bounded(request: web.Request, /, *args: P.args, **kwargs: P.kwargs) -> web.StreamResponse:
        wait_ms = _wait_ms(request)
        if wait_ms == 0:
            return await handler(request, *args, **kwargs)
        request[_DEADLINE_S] = asyncio.get_running_loop().time() + wait_ms / 1000
        try:
            async with asyncio.timeout_at(request[_DEADLINE_S]) as clock:
                return await handler(request, *args, **kwargs)
        except TimeoutError:
            if not clock.expired():
                raise
        if BEGUN not in request:
            raise _exceeded()
        await request[BEGUN].end_in_error(fault_body(_exceeded()))
        return request[BEGUN].response

    return bounded


def remaining(request: web.Request) -> dict[str, str]:
    """The header for whoever answers in our place; none where there is no deadline. Raises DeadlineExceeded when no
    whole millisecond remains: 0 would read as no deadline."""
    if _DEADLINE_S not in request:
        return {}
    remaining_ms = int(1000 * (request[_DEADLINE_S] - asyncio.get_running_loop().time()))
    if remaining_ms <= 0:
        raise _exceeded()
    return {HEADER: str(remaining_ms)}


def _wait_ms(request: web.Request) -> int:
    """0, as for Envoy, is without end."""
    given = request.headers.get(HEADER, "0")
    if _MILLISECONDS.fullmatch(given) is None:
        raise InvalidRequest(
            f"The header {HEADER} must be a whole number of milliseconds with at most 15 digits, or 0 for no deadline, "
            f"not {shown(given)}.",
            param=HEADER,
        )
    return int(given)


def _exceeded() -> DeadlineExceeded:
    # Without the number: it is another one where the request was forwarded to, and the client's words are the same.
    return DeadlineExceeded(f"The answer was not whole within the time that the header {HEADER} gives.")
