"""Web pages of other origins (CORS): which of them may use the server from a browser."""

from collections.abc import Collection

from aiohttp import web

_MAX_AGE_S = 600  # for which a browser may remember the answer to a preflight
_EXPOSED = "x-request-id, x-caraserve-phases, x-caraserve-ignored, x-caraserve-instance, retry-after, retry-after-ms"


def preflight(request: web.Request, allowed: Collection[str]) -> web.Response | None:
    """The answer to a browser that asks whether a page may send a request; None: it asks nothing of the kind. It has
    no key yet: browsers send none with this question."""
    if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
        return None
    if _allowed(request, allowed) is None:
        return None
    headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": str(_MAX_AGE_S)}
    if (wanted := request.headers.get("Access-Control-Request-Headers")) is not None:
        headers["Access-Control-Allow-Headers"] = wanted
    return web.Response(status=204, headers=headers)


def add_headers(request: web.Request, response: web.StreamResponse, allowed: Collection[str]) -> None:
    """Says in any answer whether the page that asked may read it."""
    if not allowed:
        return
    if "*" not in allowed:
        response.headers.add("Vary", "Origin")
    if (origin := _allowed(request, allowed)) is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED


def _allowed(request: web.Request, allowed: Collection[str]) -> str | None:
    """What an answer allows: every origin, or the one that asks."""
    origin = request.headers.get("Origin")
    if origin is None:
        return None
    if "*" in allowed:
        return "*"
    return origin if origin.lower() in allowed else None
