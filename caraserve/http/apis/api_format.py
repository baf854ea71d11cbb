"""The format of an API as layers need it that did not write an answer: they know a request's path only."""

import orjson
from aiohttp import web

from caraserve.http.api_request import StreamFormat
from caraserve.http.apis.anthropic_messages_writer import MessagesStream, error_object, error_status
from caraserve.http.apis.choices import OpenAiStream
from caraserve.http.apis.openai_responses_writer import ResponsesStream
from caraserve.http.responses import ERROR

_MESSAGES = "/v1/messages"


def stream_format(path: str) -> StreamFormat:
    """The format of the streams of a route."""
    formats: dict[str, StreamFormat] = {"/v1/responses": ResponsesStream(), _MESSAGES: MessagesStream()}
    return formats.get(path) or OpenAiStream()


def shape_error(path: str, response: web.StreamResponse) -> None:
    """Puts the body and the status of an error, which is in OpenAI's shape, into that of the route's API."""
    is_messages = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
    if response.status < 400 or not is_messages or not isinstance(response, web.Response):
        return
    assert isinstance(response.body, bytes)
    error = orjson.loads(response.body)["error"]
    response.set_status(error_status(response.status, response.get(ERROR)))
    response.body = orjson.dumps(error_object(response.status, error["message"], error["code"]))
