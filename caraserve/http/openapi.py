"""GET /openapi.json and /docs: the API's document, made of the routes (`operations.py`) and of the bodies' tables."""

import functools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import orjson
from aiohttp import web

from caraserve import __version__, errors
from caraserve.errors import CaraServeError, RateLimited
from caraserve.http.access.auth import PROBES
from caraserve.http.apis.anthropic_messages import error_status
from caraserve.http.body.field_types import STRING, Schema, closed, object_of, or_null, whole_object
from caraserve.http.body.known_fields import KnownFields

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Errors = tuple[type[CaraServeError], ...]

_ERRORS: Errors = (errors.Unauthorized, errors.Forbidden, errors.ServerBusy)
_BODY_ERRORS: Errors = (errors.InvalidRequest, errors.PayloadTooLarge)
ERROR = whole_object(error=whole_object(message=STRING, type=STRING, param=or_null(STRING), code=or_null(STRING)))
MESSAGES_ERROR = whole_object(
    type={"const": "error"}, error=object_of(("type", "message"), type=STRING, message=STRING)
)
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
_PATTERN = re.compile(r":[^}]+")
_WITHOUT_KEY = {*PROBES, "/", "/page/{file}"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: `GET /v1/models`, its path in aiohttp's form. `answers`: the schema of a successful answer, by content
    type; none if it has no body. `body`: the table of its JSON body; `required`: those of its fields that must be
    there, with spaces between. `raises`: what it may answer besides the errors of every route. `summary`: if it is not
    the first paragraph of the handler's docstring. `takes_bytes`: its body is a file. `creates`: the status may be 201.
    `is_messages`: its errors have the shape of Anthropic's Messages API."""

    route: str
    handler: Handler
    answers: Mapping[str, Schema] = field(default_factory=dict)
    body: KnownFields | None = None
    required: str = ""
    raises: Errors = ()
    parameters: tuple[Mapping[str, Any], ...] = ()
    summary: str = ""
    takes_bytes: bool = False
    creates: bool = False
    is_messages: bool = False

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        """The path without the patterns of its parts."""
        return _PATTERN.sub("", self.route.partition(" ")[2])

    def definition(self) -> web.RouteDef:
        """Returns the route as aiohttp takes it; HEAD comes with GET."""
        method, _, path = self.route.partition(" ")
        make: Callable[[str, Handler], web.RouteDef] = getattr(web, method.lower())
        return make(path, self.handler)

    @property
    def has_body(self) -> bool:
        return self.body is not None or self.takes_bytes

    @property
    def errors(self) -> Errors:
        """All errors that it may answer, those of every route included."""
        return (*_ERRORS, *(_BODY_ERRORS if self.has_body else ()), *self.raises)


Operations = Mapping[tuple[str, str], Operation]
"""By method and path."""


class ApiDocument:
    """The document of a server's API. `needs_keys`: whether requests without a key are refused."""

    def __init__(self, operations: Operations, *, needs_keys: bool) -> None:
        self._operations, self._needs_keys = operations, needs_keys

    @functools.cached_property
    def body(self) -> bytes:
        return orjson.dumps(document(self._operations, needs_keys=self._needs_keys))


API_DOCUMENT = web.AppKey("API_DOCUMENT", ApiDocument)


async def openapi(request: web.Request) -> web.Response:
    """This document."""
    return web.Response(body=request.app[API_DOCUMENT].body, content_type="application/json")


async def docs(request: web.Request) -> web.Response:
    """This document as a page."""
    return web.Response(body=_PAGE, content_type="text/html", charset="utf-8", headers=_PAGE_HEADERS)


def document(operations: Operations, *, needs_keys: bool) -> dict[str, Any]:
    """Returns the OpenAPI document of the routes for clients."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method.lower()] = described = _described(operation)
        if path in _WITHOUT_KEY:
            described["security"] = []
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "CaraServe",
            "version": __version__,
            "description": "A null is the same as an absent field. Fields that are not listed are ignored, and named "
            "in the header x-caraserve-ignored, unless they would change the answer or look misspelt, or the "
            "body takes no additional properties: those are refused with 400. Every GET route answers HEAD as well.",
        },
        "security": _KEYS if needs_keys else [*_KEYS, {}],
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR, "MessagesError": MESSAGES_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    content = {"content": {kind: {"schema": schema} for kind, schema in operation.answers.items()}}
    answered = {200: {"description": "OK"} | content}
    if operation.creates:
        answered[201] = {"description": "Created"} | content
    summary = operation.summary or " ".join((operation.handler.__doc__ or "").partition("\n\n")[0].split())
    described: dict[str, Any] = {"summary": summary, "responses": answered | _errors(operation)}
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body is not None:
        schema = body_schema(operation.body, operation.required.split())
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
        | ({"headers": {"Retry-After": {"schema": STRING}}} if status in _RETRIED else {})
        for status, texts in reasons.items()
    }


def body_schema(known: KnownFields, required: Sequence[str]) -> Schema:
    """Returns the schema of a body: the served fields, each with the type and bounds by which it is read."""
    properties = {
        name: one.schema() if name in required else or_null(one.schema()) for name, one in known.types.items()
    }
    schema = object_of(tuple(required), **properties)
    return closed(schema) if known.is_closed else schema
