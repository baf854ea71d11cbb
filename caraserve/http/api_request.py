"""One HTTP request for text as typed data: what the engine computes, and how its deltas become a response.

`completions.py` and `chat.py` parse a body into an `ApiRequest`; a `RequestRouter` answers it.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from caraserve.core.request import GenerateRequest, TokenDelta
from caraserve.http.json_reader import Body
from caraserve.http.validation import Fields


class ChoiceWriter(Protocol):
    """Writes one entry of `choices` in the shape of its API. Keeps state between deltas: text offset, role sent."""

    def stream_chunks(self, delta: TokenDelta) -> list[dict[str, Any]]:
        """The `choices` entries, one for each event, that a delta becomes in a stream."""

    def logprobs(self, delta: TokenDelta) -> dict[str, list[Any]] | None:
        """The logprobs of a delta, by the field of `logprobs` to which they are added; None without logprobs."""

    def fields_around_logprobs(self, answer: TokenDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields before and after `logprobs` in a response that is not streamed; `answer` has the text and the
        tokens of all deltas. Called once."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The form in which the client wants the response."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """The engine requests of one body. `requests[i]` is written by `choices[i]`; the n answers of prompt p have the
    indices [p·n, (p+1)·n).

    `whole_head` and `chunk_head` are the fields that a response and every event of a stream begin with; `first_head` is
    in the first event only.
    """

    requests: tuple[GenerateRequest, ...]
    choices: tuple[ChoiceWriter, ...]
    n: int
    delivery: Delivery
    whole_head: dict[str, Any]
    chunk_head: dict[str, Any]
    first_head: dict[str, Any] = field(default_factory=dict)

    @property
    def adapter(self) -> str | None:
        """The adapter of all its requests; None for the base model."""
        return self.requests[0].adapter


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """A request's body, as bytes and as fields."""

    raw: Body
    fields: Fields
    drawn_seed: int | None = None  # added to the fields because the client gave none


class RequestRouter(Protocol):
    """Answers API requests, on this instance (`LocalRouter`) or on any of a cluster (`ClusterRouter`)."""

    def draw_seed(self) -> int | None:
        """A seed for a request that gives none, so that it draws the same tokens on every instance that tries it; None
        where only this instance answers."""

    async def route(self, request: web.Request, api_request: ApiRequest, received: ReceivedBody) -> web.StreamResponse:
        """Answers the request. Raises CaraServeError when nothing has been sent yet."""

    def not_ready_reason(self) -> str | None:
        """Why clients should not send requests to this instance yet; None when they may."""

    async def drain(self, timeout_s: float) -> None:
        """Returns when no request is under way at another instance; ends those that still are after `timeout_s`."""
