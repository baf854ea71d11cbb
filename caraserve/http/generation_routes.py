"""The routes that generate text or embed it. Each has a function that reads its body, and the form of its streams and
errors; the rest is the same for all."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import orjson
from aiohttp import web

from caraserve.http.access.adapter_choice import AdapterFinder, adapter_finder
from caraserve.http.access.rate_limits import RATE_LIMITER
from caraserve.http.api_request import ApiRequest, StreamFormat
from caraserve.http.apis.anthropic_messages import MessagesStream, error_object, error_status, parse_message
from caraserve.http.apis.chat import MAX_NUMBERS, parse_chat
from caraserve.http.apis.choices import OpenAiStream
from caraserve.http.apis.classify import parse_classify
from caraserve.http.apis.completions import parse_completion
from caraserve.http.apis.embeddings import parse_embeddings
from caraserve.http.apis.openai_responses import ResponsesStream, parse_response
from caraserve.http.apis.scores import parse_rerank, parse_score
from caraserve.http.body.field_types import Fields
from caraserve.http.body.json_reader import MOST_NUMBERS
from caraserve.http.client import CLIENT, Client
from caraserve.http.context import ANSWERED_BY, CONTEXT
from caraserve.http.deadline import within_deadline
from caraserve.http.responses import ERROR, note_parsed, receive_body
from caraserve.loop import Engine

_MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class GenerationRoute:
    """A POST route. `parse`: makes the API request of a client's body. `stream_format`: of its streams. `most_numbers`:
    in lists of a body. `samples`: whether tokens are drawn, for which a body without a seed may get one."""

    path: str
    parse: Callable[[Fields, Engine, AdapterFinder, Client], Awaitable[ApiRequest]]
    stream_format: StreamFormat
    most_numbers: int = MOST_NUMBERS
    samples: bool = True

    def handler(self) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Returns the handler of clients' requests."""

        @within_deadline
        async def handle(request: web.Request) -> web.StreamResponse:
            context = request.app[CONTEXT]
            if context.cluster is not None:
                request[ANSWERED_BY] = context.cluster.name  # until another instance answers
            received = await receive_body(request, self.most_numbers, samples=self.samples)
            fields, find = received.fields, adapter_finder(request)
            api_request = await self.parse(fields, context.engine, find, request[CLIENT])
            note_parsed(request, fields, api_request)
            answer = partial(context.router.route, request, api_request, received)
            return await request.app[RATE_LIMITER].answered(request, api_request, answer)

        return handle


_CHUNKS = OpenAiStream()
_ROUTES = (
    GenerationRoute("/v1/completions", parse_completion, _CHUNKS),
    GenerationRoute("/v1/chat/completions", parse_chat, _CHUNKS, MAX_NUMBERS),
    GenerationRoute("/v1/responses", parse_response, ResponsesStream(), MAX_NUMBERS),
    GenerationRoute(_MESSAGES, parse_message, MessagesStream(), MAX_NUMBERS),
    GenerationRoute("/v1/embeddings", parse_embeddings, _CHUNKS, samples=False),
    *(GenerationRoute(f"{prefix}/classify", parse_classify, _CHUNKS, samples=False) for prefix in ("/v1", "")),
    *(GenerationRoute(f"{prefix}/score", parse_score, _CHUNKS, samples=False) for prefix in ("/v1", "")),
    *(GenerationRoute(f"{prefix}/rerank", parse_rerank, _CHUNKS, samples=False) for prefix in ("/v1", "", "/v2")),
)
GENERATION_ROUTES: Mapping[str, GenerationRoute] = {route.path: route for route in _ROUTES}


def shape_error(path: str, response: web.StreamResponse) -> None:
    """Puts the body and the status of an error, which is in OpenAI's shape, into that of the route's API."""
    is_messages = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
    if response.status < 400 or not is_messages or not isinstance(response, web.Response):
        return
    assert isinstance(response.body, bytes)
    error = orjson.loads(response.body)["error"]
    response.set_status(error_status(response.status, response.get(ERROR)))
    response.body = orjson.dumps(error_object(response.status, error["message"], error["code"]))
