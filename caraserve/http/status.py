"""Probes, metrics, and the page at `/` with the numbers that it polls."""

import dataclasses
from heapq import nsmallest
from importlib.resources import files

from aiohttp import web

from caraserve import __version__
from caraserve.errors import BackendFailed, Draining, NotReady
from caraserve.http.context import CONTEXT
from caraserve.http.responses import json_response
from caraserve.telemetry.prometheus import CONTENT_TYPE

_SHOWN_ADAPTERS = 200  # in each tier; the counts are of all
_PAGE = files("caraserve.http").joinpath("dashboard.html").read_bytes()
# The page runs nothing but its own script and shows nothing but its own text.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


async def health(request: web.Request) -> web.Response:
    """The event loop turns and the engine is there; also while draining, lest an orchestrator kills the rest. Not when
    the device has failed: then it should."""
    if (failure := request.app[CONTEXT].engine.failure) is not None:
        raise BackendFailed(f"The device has failed: {failure}")
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """Whether new requests should be sent here. A background task that failed and runs again is no reason to send them
    elsewhere; one that has failed several times in a row is: what this instance knows of its fleet may be out of date.
    """
    context = request.app[CONTEXT]
    engine = context.engine
    if engine.draining:
        raise Draining("The server is stopping.", retry_after_s=1.0)
    if engine.failure is not None:
        raise NotReady(f"The device has failed: {engine.failure}")
    if context.dispatch is not None and not context.dispatch.forwarding.introduced():
        raise NotReady("This instance has yet to hear from its cluster which adapters there are.")
    if failing := context.background.failing():
        raise NotReady(f"Background tasks keep failing ({', '.join(failing)}); the server's log has the reason.")
    return web.Response()


async def version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})


async def load(request: web.Request) -> web.Response:
    """vLLM's count of requests under way."""
    snapshot = request.app[CONTEXT].engine.snapshot()
    return json_response({"server_load": snapshot.running + snapshot.waiting})


async def metrics(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    engine = context.engine
    body = context.metrics.render(engine.snapshot(), lambda name: engine.adapter(name).rank)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def dashboard(request: web.Request) -> web.Response:
    return web.Response(body=_PAGE, content_type="text/html", charset="utf-8", headers=_PAGE_HEADERS)


async def stats(request: web.Request) -> web.Response:
    """What the page shows, as JSON."""
    context = request.app[CONTEXT]
    engine, snapshot = context.engine, context.engine.snapshot()
    ranks = {adapter.name: adapter.rank for adapter in engine.adapters()}
    upper = {*snapshot.device_adapters, *snapshot.host_adapters}
    tiers = {
        "device": snapshot.device_adapters,
        "host": list(set(snapshot.host_adapters) - set(snapshot.device_adapters)),
        "disk": [name for name in ranks if name not in upper],
    }
    return json_response(
        {
            "model": engine.base_name,
            "version": __version__,
            "draining": snapshot.draining,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "kv_used_blocks": snapshot.kv_used_blocks,
            "kv_total_blocks": snapshot.kv_total_blocks,
            "running_adapters": sorted(snapshot.running_adapters)[:_SHOWN_ADAPTERS],
            "computed_tokens": context.metrics.computed_tokens,
            "first_token": dataclasses.asdict(context.metrics.first_token()),
            "token_gap": dataclasses.asdict(context.metrics.token_gap()),
            "tiers": {
                tier: {
                    "count": len(names),
                    # 20,000 names take 5 ms to sort, and 1.4 ms to take the first 200 of
                    "shown": [{"name": name, "rank": ranks.get(name)} for name in nsmallest(_SHOWN_ADAPTERS, names)],
                }
                for tier, names in tiers.items()
            },
        }
    )
