"""One HTTP request for text as typed data: what the engine computes, and how its deltas become a response.

Each API parses a body into an `ApiRequest`, whose writer knows the API's format; a `RequestRouter` answers it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from aiohttp import web

from caraserve.core.request import Finish, FinishReason, GenerateRequest, Phases, TokenDelta
from caraserve.core.score_head import MAX_CLASSES
from caraserve.errors import CaraServeError
from caraserve.http.body.field_types import Fields
from caraserve.http.body.json_reader import Body
from caraserve.http.whole_answer import WholeAnswer
from caraserve.util.tasks import in_turns

_ANSWER_BYTES, _CHOICE_BYTES = 1 << 20, 4096  # of an answer, and of each engine request's part, without its tokens
# Of a token's text, twice where it is reasoning, and of a logprob's: a vocabulary has tokens of 128 characters.
_TOKEN_BYTES = 1024
_NUMBER_BYTES = 32  # of an embedding, as text


class TokenCounts(NamedTuple):
    """The tokens of one engine request, or of all of a response."""

    prompt: int
    completion: int
    cached: int  # of the prompt


@dataclass(frozen=True, slots=True)
class ResponseTotals:
    """Sums over the engine requests of one API request. `slowest`: the phases of the one that took longest."""

    tokens: TokenCounts
    reasons: tuple[FinishReason, ...]  # each once, in the order of the answers
    slowest: Phases
    served_by: str  # `adapter@digest`, or the base model's name

    @classmethod
    async def of(cls, finishes: Sequence[Finish], n: int) -> Self:
        """Adds up at least one finish, in turns of the event loop: there may be 2,048. The tokens of a prompt, which
        has `n` answers in a row, count once."""
        prompt_tokens = completion_tokens = cached_tokens = 0
        reasons: dict[FinishReason, None] = {}
        slowest, longest_ms = finishes[0].phases, 0.0
        async for position, finish in in_turns(enumerate(finishes)):
            if position % n == 0:
                prompt_tokens += finish.prompt_tokens
                cached_tokens += finish.cached_tokens
            completion_tokens += finish.completion_tokens
            reasons[finish.reason] = None
            if (e2e_ms := finish.phases.e2e_ms) > longest_ms:
                slowest, longest_ms = finish.phases, e2e_ms
        return cls(
            TokenCounts(prompt_tokens, completion_tokens, cached_tokens), tuple(reasons), slowest, finishes[0].served_by
        )

    def phases(self) -> str:
        """Returns the phases of the slowest answer as the value of a header, in milliseconds."""
        phases = self.slowest
        return (
            f"queued={phases.queued_ms:.3f};load={phases.load_ms:.3f};"
            f"prefill={phases.prefill_ms:.3f};decode={phases.decode_ms:.3f};"
            f"stalled={phases.stalled_ms:.3f};interrupted={phases.interrupted_ms:.3f};"
            f"cpu_lora={phases.cpu_lora_ms:.3f};cpu_layers={phases.cpu_layers}"
        )


class StreamFormat(ABC):
    """What an API's streams have beside the events of an answer."""

    stream_end = b": end\n\n"  # the last bytes of every stream, also after an error
    ping = b": ping\n\n"  # what keeps a silent stream open

    @abstractmethod
    def error_event(self, error: CaraServeError, num_events: int) -> bytes:
        """The event of an error that comes after `num_events` events."""


# Makes the events of further text of an answer, which is not empty.
TextEvents: TypeAlias = Callable[[str], bytes]


class AnswerWriter(StreamFormat):
    """Writes the answer to one API request in its API's format, as events or whole. Keeps state between deltas."""

    def events(self, index: int, delta: TokenDelta, counts: TokenCounts) -> bytes:
        """The events of a delta of engine request `index`; empty for none. `counts`: of its tokens so far."""
        return b""

    def text_events(self, index: int) -> TextEvents | None:
        """What makes the same events as `events` of deltas that only add text to engine request `index`, in less time.
        None: text is not all that its next deltas may have."""
        return None

    def last_events(self, totals: ResponseTotals) -> bytes:
        """The events that follow those of all deltas."""
        return b""

    def logprobs(self, index: int, delta: TokenDelta) -> dict[str, list[Any]] | None:
        """The logprobs of a delta of engine request `index`, for a whole answer: entries to add to each field of
        `logprobs`; None without logprobs."""
        return None

    @abstractmethod
    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        """The response that is not streamed, of the answers to all engine requests."""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """The engine requests of one body, and their answers' writer. The n answers to prompt p are at [p·n, (p+1)·n)."""

    requests: tuple[GenerateRequest, ...]
    n: int
    stream: bool
    writer: AnswerWriter

    @property
    def adapter(self) -> str | None:
        """The adapter of all its requests; None for the base model."""
        return self.requests[0].adapter

    def most_answer_bytes(self, body_bytes: int, embedding_size: int) -> int:
        """A size that no whole answer exceeds, several times a usual one's. `body_bytes`: it may repeat the request."""
        return _ANSWER_BYTES + 2 * body_bytes + sum([_most_part_bytes(one, embedding_size) for one in self.requests])


def _most_part_bytes(request: GenerateRequest, embedding_size: int) -> int:
    """The largest size of one engine request's part of an answer."""
    params, prompt_tokens = request.params, len(request.prompt_ids)
    if request.embeds:
        return _CHOICE_BYTES + max(embedding_size, MAX_CLASSES) * _NUMBER_BYTES
    entries = prompt_tokens + params.max_tokens
    if params.logprobs is not None:
        entries += params.max_tokens * (1 + params.logprobs)
    if params.prompt_logprobs is not None:
        entries += prompt_tokens * (1 + params.prompt_logprobs)
    return _CHOICE_BYTES + entries * _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """A request's body, as bytes and as fields."""

    raw: Body
    fields: Fields
    drawn_seed: int | None = None  # added to the fields because the client gave none


class RequestRouter(Protocol):
    """Answers API requests, on this instance (`LocalRouter`) or on any of a cluster (`ClusterRouter`)."""

    def draw_seed(self) -> int | None:
        """A seed for a request without one, for the same tokens wherever it is tried; None if that is only here."""

    async def route(self, request: web.Request, api_request: ApiRequest, received: ReceivedBody) -> web.StreamResponse:
        """Answers the request. Raises CaraServeError when nothing has been sent yet."""

    def not_ready_reason(self) -> str | None:
        """Why clients should not send requests to this instance yet; None when they may."""

    async def drain(self, timeout_s: float) -> None:
        """Returns when no request is under way at another instance; ends those that still are after `timeout_s`."""
