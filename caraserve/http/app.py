"""The HTTP server: its routes for clients and for other instances, its middleware, and how it starts.

Call `runner.cleanup()` when all requests have ended: it refuses new connections, gives handlers `stop_s` to end, then
cancels them.
"""

import logging
import re
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from aiohttp import hdrs, web
from aiohttp.web_urldispatcher import SystemRoute

from caraserve.cluster.membership.member import Member
from caraserve.cluster.membership.websocket import WEBSOCKET_PATH
from caraserve.cluster.routing.forward_auth import INSTANCE_HEADER, PREFIX
from caraserve.config import HttpConfig
from caraserve.errors import CaraServeError, ServerBusy, Unauthorized
from caraserve.http.access.adapter_choice import SERVED_BY_HEADER
from caraserve.http.access.api_keys import KEYS, ApiKeys
from caraserve.http.access.auth import PROBES, add_cors_headers, answer_preflight, authenticate, challenge
from caraserve.http.access.rate_limits import RATE_LIMITER, RateLimiter
from caraserve.http.api_request import RequestRouter
from caraserve.http.client import note_client
from caraserve.http.context import (
    ANSWERED_BY,
    CONTEXT,
    RATE_HEADERS,
    REQUEST_ID,
    SERVED_BY,
    BodyBudget,
    Context,
    HttpTimings,
)
from caraserve.http.dispatch import ClusterRouter
from caraserve.http.generation import LocalRouter
from caraserve.http.generation_routes import GENERATION_ROUTES, shape_error
from caraserve.http.management.model_list import MODELS, ModelList
from caraserve.http.management.page import PAGE_PATHS
from caraserve.http.openapi import API_DOCUMENT, ApiDocument
from caraserve.http.operations import OPERATIONS
from caraserve.http.request_log import CLIENT_LEFT, IGNORED_HEADER, SUMMARY, RequestSummary, log_request, note_end
from caraserve.http.responses import SERVER, error_body, error_response, json_response, refusal_response
from caraserve.http.server import Runner, bind, listen_error
from caraserve.http.tracing import TRACER, Tracer
from caraserve.loop import Engine
from caraserve.lora.management import AdapterManagement
from caraserve.telemetry.background import BackgroundTasks
from caraserve.telemetry.metrics import Metrics
from caraserve.util.tasks import forget_frames

log = logging.getLogger("caraserve.http")

MAX_HEADER_BYTES = 16 << 10
# aiohttp limits single lines, not their sum; the middleware refuses larger sums with 431.
_MAX_HEADER_LINE_BYTES = 32 << 10
_MAX_HEADERS = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# vLLM's server leaves these out of http_requests_total and its relatives.
_NOT_IN_HTTP_METRICS = PROBES | {"/metrics", "/load", "/version"}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    engine: Engine,
    config: HttpConfig,
    metrics: Metrics,
    *,
    allow_lora_updates: bool,
    timings: HttpTimings | None = None,
    cluster: Member | None = None,
    router: RequestRouter | None = None,
    background: BackgroundTasks | None = None,
    management: AdapterManagement | None = None,
    keys: ApiKeys | None = None,
    tracer: Tracer | None = None,
) -> web.Application:
    """The application over `engine`; it owns nothing but its own tasks. Without `router` every request is answered by
    `engine`. `background`: the tasks that /ready reports. `keys`: those of `config`, if they have been read."""
    context = Context(
        engine,
        metrics,
        config,
        allow_lora_updates,
        timings or HttpTimings(keepalive_s=config.keep_alive_timeout_s),
        started_s=time.time(),
        bodies=BodyBudget(config.max_body_bytes),
        router=router or LocalRouter(),
        cluster=cluster,
        background=background or BackgroundTasks(),
        management=management,
    )
    app = bare_app(context, keys or ApiKeys(config), tracer)
    app[RATE_LIMITER] = RateLimiter(engine.predicted_answer_s)
    app[MODELS] = ModelList()
    app[API_DOCUMENT] = ApiDocument(OPERATIONS, needs_keys=config.needs_keys)
    app.on_cleanup.append(_close)
    app.add_routes([operation.definition() for operation in OPERATIONS.values()])
    return app


def add_peer_routes(
    app: web.Application, node: Member, router: ClusterRouter, more: Sequence[web.RouteDef] = ()
) -> None:
    """Adds all routes for other instances, which authenticate with the cluster's secret and need no API key."""
    forwarded = [
        web.post(PREFIX + path, partial(router.answer_forwarded, route=route))
        for path, route in GENERATION_ROUTES.items()
    ]
    app.add_routes([web.get(WEBSOCKET_PATH, node.accept), *forwarded, *more])


async def start_peer_http(
    node: Member,
    router: ClusterRouter,
    client_app: web.Application,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    more: Sequence[web.RouteDef] = (),
) -> tuple[web.AppRunner, int]:
    """Listens for other instances on a port of their own, with the engine of `client_app`; see `listen`."""
    app = bare_app(client_app[CONTEXT], client_app[KEYS], client_app.get(TRACER))
    add_peer_routes(app, node, router, more)
    return await listen(app, client_app[CONTEXT].config, host, port, tls)


def bare_app(context: Context, keys: ApiKeys, tracer: Tracer | None) -> web.Application:
    """An application without routes, in which every request passes the middleware."""
    app = web.Application(middlewares=[_handle], client_max_size=context.config.max_body_bytes)
    app[CONTEXT], app[KEYS] = context, keys
    if tracer is not None:
        app[TRACER] = tracer
    app.on_response_prepare.append(_add_headers)
    return app


@web.middleware
async def _handle(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Gives a request its id, answers it, then logs and counts it."""
    context = request.app[CONTEXT]
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
    request[SUMMARY] = RequestSummary()
    status_code, response = CLIENT_LEFT, None
    tracer = request.app.get(TRACER)
    if tracer is not None:
        tracer.begin(request)
    try:
        response = await _answer(request, handler, context)
        shape_error(request.path, response)
        status_code = response.status
    except BaseException as error:  # the client has left, or the server stops
        forget_frames(error)
        raise
    finally:
        context.bodies.release(request)
        status_code = note_end(request, status_code)
        if context.config.log_requests:
            log_request(request, request[REQUEST_ID], status_code)
        if tracer is not None:
            tracer.end(request, status_code)
        _count(request, status_code, response)
        if isinstance(route := request.match_info.route, SystemRoute):  # made for this request, of an unknown URL
            vars(route).clear()  # it refers to a method of its own: a cycle
    return response


def _count(request: web.Request, status_code: int, response: web.StreamResponse | None) -> None:
    """Counts a request by its route. `response` is None if the client has left."""
    resource, metrics = request.match_info.route.resource, request.app[CONTEXT].metrics
    path = resource.canonical if resource else ""
    if response is not None:
        metrics.observe_response(path or "unknown", response.status)
    if path in _NOT_IN_HTTP_METRICS or path.startswith(f"{PREFIX}/"):
        return
    metrics.http.observe(
        path or "none",
        request.method if request.method in hdrs.METH_ALL else "other",
        status_code,
        time.perf_counter() - request[SUMMARY].began_s,
        request.content_length or 0,
        (response.content_length or 0) if response is not None else 0,
    )


async def _answer(request: web.Request, handler: _Handler, context: Context) -> web.StreamResponse:
    """Authenticates and handles a request, a few in each turn of the event loop; turns exceptions into responses."""
    try:
        if request.path not in PROBES:  # which 2,000 requests that come at once would delay by a second
            await context.begin_turns.spend(1)
        _check_header_size(request)
        if (preflight := answer_preflight(request, context.config.allowed_origins)) is not None:
            return preflight
        if (client := authenticate(request, context.config, request.app[KEYS], PAGE_PATHS)) is not None:
            note_client(request, client)
        return await handler(request)
    except Exception as error:
        response = _response_to(error, request)
        forget_frames(error)  # which refer to the response, and that to the error
        return response


def _response_to(error: Exception, request: web.Request) -> web.Response:
    """The response to an exception that the handler of a request has raised. Logs the server's own mistakes."""
    if isinstance(error, Unauthorized):
        response = error_response(error)
        response.headers["WWW-Authenticate"] = challenge(request)
        return response
    if isinstance(error, CaraServeError):
        if error.status == 500:
            log.error("request %s failed: %s", request[REQUEST_ID], error.message)
        request[SUMMARY].note_error(error)
        return error_response(error)
    if isinstance(error, web.HTTPException):
        return refusal_response(error, request)
    if isinstance(error, MemoryError):
        return error_response(ServerBusy("The server has no memory for this request now.", retry_after_s=1.0))
    if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
        raise error  # the client has left, or the other instance
    log.error("request %s failed", request[REQUEST_ID], exc_info=error)
    message = f"The server made a mistake; its log has the details under request id {request[REQUEST_ID]}."
    return json_response(error_body(message, "server_error", None, None), status=500)


def _check_header_size(request: web.Request) -> None:
    size = len(request.raw_path) + sum([len(name) + len(value) + 4 for name, value in request.raw_headers])
    if size > MAX_HEADER_BYTES:
        raise web.HTTPRequestHeaderFieldsTooLarge(text=f"Headers of {size} bytes; {MAX_HEADER_BYTES} are allowed.")


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER
    if REQUEST_ID in request:  # not for what aiohttp refuses before the middleware
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    if SUMMARY in request and request[SUMMARY].ignored:
        response.headers[IGNORED_HEADER] = request[SUMMARY].ignored
    add_cors_headers(request, response, request.app[CONTEXT].config.allowed_origins)
    if SERVED_BY in request:
        response.headers[SERVED_BY_HEADER] = request[SERVED_BY]
    response.headers.update(request.get(RATE_HEADERS, {}))
    if ANSWERED_BY in request:
        response.headers[INSTANCE_HEADER] = request[ANSWERED_BY]


async def _close(app: web.Application) -> None:
    await app[CONTEXT].close()


async def start_http(
    app: web.Application, config: HttpConfig, sockets: Sequence[socket.socket] = (), tls: ssl.SSLContext | None = None
) -> tuple[web.AppRunner, int]:
    """Listens for clients, on bound `sockets` or at the configured address; see `listen`."""
    return await listen(app, config, config.host, config.port, tls, sockets)


async def listen(
    app: web.Application,
    config: HttpConfig,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    sockets: Sequence[socket.socket] = (),
) -> tuple[web.AppRunner, int]:
    """Listens; returns the runner and the port, which differs from `port` if that is 0. Raises ConfigError."""
    sockets = sockets or bind(host, port)
    runner = Runner(
        app,
        max_connections=config.max_connections,
        timings=app[CONTEXT].timings,
        handler_cancellation=True,  # when its client leaves, which cancels the generation
        max_line_size=_MAX_HEADER_LINE_BYTES,
        max_field_size=_MAX_HEADER_LINE_BYTES,
        max_headers=_MAX_HEADERS,
    )
    await runner.setup()
    try:
        for one in sockets:
            await web.SockSite(runner, one, backlog=1024, ssl_context=tls).start()
    except OSError as error:
        await runner.cleanup()
        raise listen_error(error, host, port) from None
    return runner, int(runner.addresses[0][1])
