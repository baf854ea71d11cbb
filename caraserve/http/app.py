"""The HTTP server: routes, the one middleware that all requests pass, and how it starts.

Called by `serve.py`: `make_app` wires handlers to an engine, `start_http` listens. `runner.cleanup()` stops: new
connections are refused, handlers get a few seconds, then they are cancelled; call it when all requests have ended.
"""

import logging
import re
import socket
import ssl
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from caraserve.cluster.routing.forward_auth import INSTANCE_HEADER
from caraserve.config import HttpConfig
from caraserve.errors import CaraServeError, ServerBusy, Unauthorized
from caraserve.http import admin, chat, cluster_pages, completions, tokenize
from caraserve.http import status as pages
from caraserve.http.auth import challenge, identify
from caraserve.http.binding import bind, cannot_listen
from caraserve.http.bodies import BodyBudget
from caraserve.http.context import ANSWERED_HERE, CLIENT, CONTEXT, REQUEST_ID, Context, HttpTimings
from caraserve.http.cors import add_headers, preflight
from caraserve.http.dispatch import Dispatch
from caraserve.http.interfaces import ClusterApi, EngineApi
from caraserve.http.request_log import CLIENT_LEFT, IGNORED_HEADER, SUMMARY, RequestSummary, log_request
from caraserve.http.responses import SERVER, error_body, error_response, fault_body, json_response, refusal_response
from caraserve.http.server import Runner
from caraserve.telemetry.background import BackgroundTasks
from caraserve.telemetry.metrics import Metrics

log = logging.getLogger("caraserve.http")

MAX_HEADER_BYTES = 16 << 10
# aiohttp limits single lines, not their sum; the middleware answers 431 for what passes here but is too much.
_MAX_HEADER_LINE_BYTES = 32 << 10
_MAX_HEADERS = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    engine: EngineApi,
    config: HttpConfig,
    metrics: Metrics,
    *,
    allow_lora_updates: bool,
    timings: HttpTimings | None = None,
    cluster: ClusterApi | None = None,
    dispatch: Dispatch | None = None,
    background: BackgroundTasks | None = None,
) -> web.Application:
    """The application over `engine`; it owns no resources but its own tasks. `cluster`, `dispatch`: None where it
    serves alone. `background`: the tasks that /ready reports."""
    timings = timings or HttpTimings()
    parts = cluster, dispatch, background or BackgroundTasks()
    bodies = BodyBudget(config.max_body_bytes)
    app = bare_app(Context(engine, metrics, config, allow_lora_updates, timings, time.time(), bodies, *parts))
    app[admin.MODELS] = admin.ModelList()
    app.on_cleanup.append(_close)
    app.add_routes(
        [
            web.post("/v1/completions", completions.completions),
            web.post("/v1/chat/completions", chat.chat_completions),
            web.get("/v1/models", admin.list_models),
            web.get("/v1/models/{model:.+}", admin.show_model),
            web.get("/v1/cluster", cluster_pages.members),
            web.get("/v1/cluster/adapters", cluster_pages.adapters),
            web.post("/tokenize", tokenize.tokenize),
            web.post("/detokenize", tokenize.detokenize),
            web.get("/health", pages.health),
            web.get("/ready", pages.ready),
            web.get("/ping", pages.health),
            web.post("/ping", pages.health),
            web.get("/version", pages.version),
            web.get("/load", pages.load),
            web.get("/metrics", pages.metrics),
            web.get("/stats", pages.stats),
            web.get("/", pages.dashboard),
        ]
    )
    for prefix in ("/v1", ""):  # vLLM's routes, and SGLang's of the same meaning
        app.router.add_post(f"{prefix}/load_lora_adapter", admin.load_lora_adapter)
        app.router.add_post(f"{prefix}/unload_lora_adapter", admin.unload_lora_adapter)
    return app


def bare_app(context: Context) -> web.Application:
    """An application without routes, in which every request passes the middleware."""
    app = web.Application(middlewares=[_guard], client_max_size=context.config.max_body_bytes)
    app[CONTEXT] = context
    app.on_response_prepare.append(_sign)
    return app


@web.middleware
async def _guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Gives the request its id, lets it in or not, and turns whatever goes wrong into an answer."""
    context = request.app[CONTEXT]
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    request[SUMMARY] = RequestSummary()
    status = CLIENT_LEFT
    try:
        response = await _answer(request, handler, context.config)
        status = response.status
    finally:
        context.bodies.release(request)
        if context.config.log_requests:
            log_request(request, request[REQUEST_ID], status)
    resource = request.match_info.route.resource
    context.metrics.observe_response(resource.canonical if resource else "unknown", response.status)
    return response


async def _answer(request: web.Request, handler: _Handler, config: HttpConfig) -> web.StreamResponse:
    try:
        _check_header_size(request)
        if (answer := preflight(request, config.allowed_origins)) is not None:
            return answer
        if (client := identify(request, config)) is not None:
            request[CLIENT] = client
        return await handler(request)
    except Unauthorized as error:
        response = error_response(error)
        response.headers["WWW-Authenticate"] = challenge(request)
        return response
    except CaraServeError as error:
        if error.status == 500:
            log.error("request %s failed: %s", request[REQUEST_ID], error.message)
        request[SUMMARY].note_fault(fault_body(error))
        return error_response(error)
    except web.HTTPException as error:
        return refusal_response(error, request)
    except MemoryError:
        return error_response(ServerBusy("The server has no memory for this request now.", retry_after_s=1.0))
    except Exception:
        log.exception("request %s failed", request[REQUEST_ID])
        message = f"The server made a mistake; its log has the details under request id {request[REQUEST_ID]}."
        return json_response(error_body(message, "server_error", None, None), status=500)


def _check_header_size(request: web.Request) -> None:
    size = len(request.raw_path) + sum([len(name) + len(value) + 4 for name, value in request.raw_headers])
    if size > MAX_HEADER_BYTES:
        raise web.HTTPRequestHeaderFieldsTooLarge(text=f"Headers of {size} bytes; {MAX_HEADER_BYTES} are allowed.")


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER
    if REQUEST_ID in request:  # else it has never got to the middleware
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    if SUMMARY in request and request[SUMMARY].ignored:
        response.headers[IGNORED_HEADER] = request[SUMMARY].ignored
    add_headers(request, response, request.app[CONTEXT].config.allowed_origins)
    if ANSWERED_HERE in request:
        response.headers[INSTANCE_HEADER] = request[ANSWERED_HERE]


async def _close(app: web.Application) -> None:
    await app[CONTEXT].close()


async def start_http(
    app: web.Application,
    config: HttpConfig,
    sockets: Sequence[socket.socket] = (),
    tls: ssl.SSLContext | None = None,
) -> tuple[web.AppRunner, int]:
    """Listens on bound `sockets`, or where the configuration says; see `listen`."""
    return await listen(app, config, config.host, config.port, tls, sockets)


async def listen(
    app: web.Application,
    config: HttpConfig,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    sockets: Sequence[socket.socket] = (),
) -> tuple[web.AppRunner, int]:
    """Listens; returns the runner and the port, which differs from `port` where that is 0.

    Raises ConfigError when the address cannot be listened on.
    """
    timings = app[CONTEXT].timings
    sockets = sockets or bind(host, port)
    runner = Runner(
        app,
        max_connections=config.max_connections,
        write_s=timings.write_s,
        handler_cancellation=True,  # a client that leaves cancels its handler, and so its generation
        keepalive_timeout=timings.keepalive_s,
        shutdown_timeout=timings.stop_s,
        lingering_time=timings.linger_s,
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
        raise cannot_listen(error, host, port) from None
    return runner, int(runner.addresses[0][1])
