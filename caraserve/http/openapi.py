"""GET /openapi.json and GET /docs: the document of the API, made of the routes and of the tables that check requests.

Every route of the application is in the document, also one that `operations.py` says nothing about.
"""

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import orjson
from aiohttp import web

from caraserve import __version__
from caraserve.cluster.routing.forward_auth import PREFIX as PEER_PREFIX
from caraserve.errors import RateLimited
from caraserve.http.access.auth import PROBES
from caraserve.http.apis.anthropic_messages_writer import error_status
from caraserve.http.context import CONTEXT
from caraserve.http.field_types import Schema, or_null
from caraserve.http.operations import ERROR, MESSAGES_ERROR, OPERATIONS, Operation
from caraserve.http.request_schema import KnownFields

_PAGE = files("caraserve.http").joinpath("api.html").read_bytes()
# A page runs only its own script and shows only its own text.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_OF_ANY = {
    400: "The request is no valid HTTP, or a header has a wrong value.",
    431: "The headers are too large.",
    500: "The server made a mistake.",
}
_OF_BODIES = {408: "The body did not arrive in time.", 415: "The body has another content type, or is compressed."}
_RETRIED = (409, 429, 503, 529)  # statuses after which the header says when to ask again
_KEYS: list[dict[str, list[str]]] = [{"bearer": []}, {"apiKey": []}]
_WITHOUT_KEY = {*PROBES, "/", "/page/{file}"}
_OTHER = Operation("Not described.")


class ApiDocument:
    """The encoded document of an application, made when it is first asked for: all routes are known then."""

    def __init__(self) -> None:
        self._body = b""

    def body(self, app: web.Application) -> bytes:
        if not self._body:
            self._body = orjson.dumps(document(app))
        return self._body


API_DOCUMENT = web.AppKey("API_DOCUMENT", ApiDocument)


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=request.app[API_DOCUMENT].body(request.app), content_type="application/json")


async def docs(request: web.Request) -> web.Response:
    return web.Response(body=_PAGE, content_type="text/html", charset="utf-8", headers=_PAGE_HEADERS)


def document(app: web.Application) -> dict[str, Any]:
    """Returns the OpenAPI document of the routes for clients."""
    keys = _KEYS if app[CONTEXT].config.needs_keys else [*_KEYS, {}]
    paths: dict[str, dict[str, Any]] = {}
    for method, path in client_routes(app):
        described = _described(OPERATIONS.get((method, path), _OTHER))
        if path in _WITHOUT_KEY:
            described["security"] = []
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "CaraServe",
            "version": __version__,
            "description": "A null is the same as an absent field. Fields that are not listed are ignored, and named "
            "in the header x-caraserve-ignored, unless they would change the answer or look misspelt, or the "
            "body takes no additional properties: those are refused with 400. Every GET route answers HEAD as well.",
        },
        "security": keys,
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR, "MessagesError": MESSAGES_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def client_routes(app: web.Application) -> Iterator[tuple[str, str]]:
    """Yields method and path of every route for clients; HEAD comes with GET."""
    for route in app.router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        if route.method != "HEAD" and not path.startswith(f"{PEER_PREFIX}/"):
            yield route.method, path


def _described(operation: Operation) -> dict[str, Any]:
    content = {"content": {kind: {"schema": schema} for kind, schema in operation.answers.items()}}
    answered = {200: {"description": "OK"} | content}
    if operation.creates:
        answered[201] = {"description": "Created"} | content
    described: dict[str, Any] = {"summary": operation.summary, "responses": answered | _errors(operation)}
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        schema = body_schema(operation.body, operation.required)
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif operation.takes_bytes:
        described["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    return described | {"responses": {str(status): one for status, one in sorted(described["responses"].items())}}


def _errors(operation: Operation) -> dict[int, dict[str, Any]]:
    """The responses with an error, by status, described by the docstrings of the errors."""
    reasons = {status: [text] for status, text in (_OF_ANY | (_OF_BODIES if operation.has_body else {})).items()}
    for error in operation.errors:
        is_overload = operation.is_messages and not issubclass(error, RateLimited)
        status = error_status(error.status) if is_overload else error.status
        reasons.setdefault(status, []).append((error.__doc__ or "").partition("\n")[0])
    schema = {"$ref": f"#/components/schemas/{'MessagesError' if operation.is_messages else 'Error'}"}
    return {
        status: {"description": " ".join(texts), "content": {"application/json": {"schema": schema}}}
        | ({"headers": {"Retry-After": {"schema": {"type": "string"}}}} if status in _RETRIED else {})
        for status, texts in reasons.items()
    }


def body_schema(known: KnownFields, required: tuple[str, ...]) -> Schema:
    """Returns the schema of a body: the served fields, each with the type and bounds by which it is read."""
    properties = {
        name: one.schema() if name in required else or_null(one.schema()) for name, one in known.types.items()
    }
    described: Schema = {"type": "object", "properties": properties}
    if known.is_closed:
        described["additionalProperties"] = False
    return described | ({"required": list(required)} if required else {})
