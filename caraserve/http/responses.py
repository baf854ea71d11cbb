"""What all handlers share: reads bodies within their limits, writes JSON, puts errors in OpenAI's shape."""

import asyncio
import heapq
import math
from collections.abc import Mapping
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import orjson
from aiohttp import web

from caraserve.errors import (
    AdapterBusy,
    CaraServeError,
    Draining,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ServerBusy,
    Unreachable,
)
from caraserve.http.api_request import ApiRequest, ReceivedBody
from caraserve.http.body.field_types import Fields
from caraserve.http.body.json_reader import MOST_NUMBERS, Body, parse_object
from caraserve.http.context import CONTEXT
from caraserve.http.request_log import SUMMARY, listed
from caraserve.util.tasks import in_turns
from caraserve.util.units import human_bytes

# Larger bodies are joined in an mmap, some pages in each turn of the event loop: allocating 15 MB at once takes 15 ms.
_JOINED_BYTES = 1 << 20
_LISTED_FIELDS = 100  # more than a header has room for
ERROR = web.ResponseKey("ERROR", CaraServeError)  # of a response that `error_response` has made
SERVER = "CaraServe"  # without versions, which would say what to try


async def receive_body(request: web.Request, most_numbers: int = MOST_NUMBERS, *, samples: bool = True) -> ReceivedBody:
    """Reads the body of a request for the engine, with a seed from the router if it `samples`, the client gave none and
    one is needed. `most_numbers` as for `parse_object`. Raises as `read_object`."""
    raw = await read_body(request)
    values = await parse_object(raw, most_numbers)
    seed = None
    if samples and values.get("seed") is None and (seed := request.app[CONTEXT].router.draw_seed()) is not None:
        values["seed"] = seed
    return ReceivedBody(raw, Fields(values), seed)


async def read_object(request: web.Request) -> Fields:
    """Reads the body as one JSON object. Raises as `read_body`, and InvalidRequest."""
    return Fields(await parse_object(await read_body(request)))


async def read_body(request: web.Request) -> Body:
    """Reads the body of a request with JSON; a missing content type counts as JSON.

    Raises HTTPUnsupportedMediaType, HTTPRequestTimeout, PayloadTooLarge, ServerBusy or InvalidRequest.
    """
    if "Content-Type" in request.headers and request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="Send the header Content-Type: application/json.")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":  # a few kB can become GB
        raise web.HTTPUnsupportedMediaType(
            text=f"Content-Encoding: {encoding[:80]!r} is not taken; send the body as it is."
        )
    try:
        if request.content.is_eof():  # nearly always: it came with the headers
            return await _whole_body(request)
        async with asyncio.timeout(request.app[CONTEXT].timings.body_s):
            return await _whole_body(request)
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="The body did not arrive in time.") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"The body could not be read: {error}.") from None


async def _whole_body(request: web.Request) -> Body:
    context = request.app[CONTEXT]
    limit, size, pieces = context.config.max_body_bytes, 0, list[bytes]()
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    async for piece in request.content.iter_any():
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        context.bodies.reserve(request, size)
        pieces.append(piece)
    if size <= _JOINED_BYTES:
        return b"".join(pieces)
    body = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)
    async for piece in in_turns(pieces):
        body.write(piece)
    return body


def _too_large(limit_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {human_bytes(limit_bytes)}, which is this server's limit.")


def note_parsed(request: web.Request, fields: Fields, api_request: ApiRequest) -> None:
    """Notes the model and the ignored fields of a request for text, for the response's header and the log line."""
    note_ignored(request, fields)
    request[SUMMARY].model = api_request.adapter or request.app[CONTEXT].engine.base_name


def note_ignored(request: web.Request, fields: Fields) -> None:
    """Notes, for the header and the log line, the fields that were sent and not read. Call it when all have been."""
    if names := fields.unread():
        request[SUMMARY].ignored = listed(heapq.nsmallest(_LISTED_FIELDS, names))


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, headers=headers, content_type="application/json")


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_error(error: CaraServeError) -> dict[str, Any]:
    """The error in OpenAI's shape, for a body or for the last event of a stream."""
    return error_body(error.message, error.type, error.param, error.code)


def error_response(error: CaraServeError) -> web.Response:
    """The response for an error, with the headers of its status."""
    headers = {}
    if isinstance(error, Overloaded | Draining | ServerBusy | Unreachable | AdapterBusy):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(1000 * error.retry_after_s)))
    response = json_response(openai_error(error), status=error.status, headers=headers)
    response[ERROR] = error
    if isinstance(error, PayloadTooLarge | ServerBusy):
        response.force_close()  # instead of reading the rest of the body
    return response


def refusal_response(error: web.HTTPException, request: web.Request) -> web.Response:
    """The response for what aiohttp itself refuses (no such route, wrong method, too slow, …), in OpenAI's shape."""
    messages = {
        404: (f"Unknown URL: {request.method} {request.path[:200]}", "unknown_url"),
        405: (f"{request.path[:200]} does not take {request.method[:20]}.", "method_not_allowed"),
    }
    message, code = messages.get(error.status, (error.text or error.reason, None))
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    body = error_body(message, "invalid_request_error", None, code)
    response = json_response(body, status=error.status, headers=headers)
    if error.status in (408, 431):
        response.force_close()
    return response
