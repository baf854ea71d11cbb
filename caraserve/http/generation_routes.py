"""The routes that generate text or embed it. Each has a function that reads its body; the rest is the same for all."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from caraserve.http.access.adapter_choice import Find, adapter_finder
from caraserve.http.access.client import Client
from caraserve.http.api_request import ApiRequest
from caraserve.http.apis.anthropic_messages import parse_message
from caraserve.http.apis.chat import MAX_NUMBERS, parse_chat
from caraserve.http.apis.completions import parse_completion
from caraserve.http.apis.embeddings import parse_embeddings
from caraserve.http.apis.openai_responses import parse_response
from caraserve.http.apis.scores import parse_rerank, parse_score
from caraserve.http.context import ANSWERED_BY, CLIENT, CONTEXT
from caraserve.http.deadline import within_deadline
from caraserve.http.json_reader import MOST_NUMBERS
from caraserve.http.responses import note_parsed, receive_body
from caraserve.http.validation import Fields
from caraserve.loop import Engine


@dataclass(frozen=True, slots=True)
class GenerationRoute:
    """A POST route. `parse`: makes the API request of a client's body. `most_numbers`: in lists of a body. `samples`:
    whether tokens are drawn, for which a body without a seed may get one."""

    path: str
    parse: Callable[[Fields, Engine, Find, Client], Awaitable[ApiRequest]]
    most_numbers: int = MOST_NUMBERS
    samples: bool = True

    def for_clients(self) -> web.RouteDef:
        """The route with the handler of clients' requests."""

        @within_deadline
        async def handle(request: web.Request) -> web.StreamResponse:
            context = request.app[CONTEXT]
            if context.cluster is not None:
                request[ANSWERED_BY] = context.cluster.name  # until another instance answers
            received = await receive_body(request, self.most_numbers, samples=self.samples)
            fields, find = received.fields, adapter_finder(request)
            api_request = await self.parse(fields, context.engine, find, request[CLIENT])
            note_parsed(request, fields, api_request)
            return await context.router.route(request, api_request, received)

        return web.post(self.path, handle)


GENERATION_ROUTES = (
    GenerationRoute("/v1/completions", parse_completion),
    GenerationRoute("/v1/chat/completions", parse_chat, MAX_NUMBERS),
    GenerationRoute("/v1/responses", parse_response, MAX_NUMBERS),
    GenerationRoute("/v1/messages", parse_message, MAX_NUMBERS),
    GenerationRoute("/v1/embeddings", parse_embeddings, samples=False),
    *(GenerationRoute(f"{prefix}/score", parse_score, samples=False) for prefix in ("/v1", "")),
    *(GenerationRoute(f"{prefix}/rerank", parse_rerank, samples=False) for prefix in ("/v1", "", "/v2")),
)
