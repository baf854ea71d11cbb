"""The format of completions and chat completions: the answers to a body are the entries of `choices`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from aiohttp import web

from caraserve.core.request import TokenDelta
from caraserve.errors import CaraServeError
from caraserve.http.responses import openai_error
from caraserve.http.usage import ResponseTotals, TokenCounts
from caraserve.http.whole_answer import WholeAnswer, response_of


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
class ResponseHeads:
    """The fields that a whole response, and every event of a stream, begin with; `first_chunk` is in the first event
    only."""

    whole: dict[str, Any]
    chunk: dict[str, Any]
    first_chunk: dict[str, Any]


class OpenAiStream:
    """The `StreamFormat` of completions and chat completions."""

    stream_end = b"data: [DONE]\n\n"
    ping = b": ping\n\n"

    def error_event(self, error: CaraServeError, num_events: int) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(openai_error(error))


class ChoicesWriter(OpenAiStream):
    """The `AnswerWriter` of completions and chat completions. `choices[i]` writes the answer to engine request i."""

    def __init__(self, choices: Sequence[ChoiceWriter], heads: ResponseHeads, delivery: Delivery) -> None:
        self._choices, self._heads, self._delivery = choices, heads, delivery
        self._head = b"data: " + orjson.dumps(heads.chunk)[:-1]  # encoded once
        self._next_head = b"data: " + orjson.dumps(heads.chunk | heads.first_chunk)[:-1]
        self._tail = b',"usage":null}\n\n' if delivery.include_usage else b"}\n\n"

    def events(self, index: int, delta: TokenDelta, counts: TokenCounts) -> bytes:
        tail = self._tail
        if self._delivery.continuous_usage:
            tail = b',"usage":%b}\n\n' % orjson.dumps(_usage(counts))
        return b"".join([self._event(chunk, tail) for chunk in self._choices[index].stream_chunks(delta)])

    def _event(self, chunk: dict[str, Any], tail: bytes) -> bytes:
        head, self._next_head = self._next_head, self._head
        return b'%b,"choices":[%b]%b' % (head, orjson.dumps(chunk), tail)

    def last_events(self, totals: ResponseTotals) -> bytes:
        if not self._delivery.include_usage:
            return b""
        return b'%b,"choices":[],"usage":%b}\n\n' % (self._head, orjson.dumps(_usage(totals.tokens)))

    def logprobs(self, index: int, delta: TokenDelta) -> dict[str, list[Any]] | None:
        return self._choices[index].logprobs(delta)

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        return await response_of(self._pieces(answers, totals))

    def _pieces(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> Iterator[bytes]:
        yield orjson.dumps(self._heads.whole)[:-1] + b',"choices":['
        for position, (choice, answer) in enumerate(zip(self._choices, answers, strict=True)):
            before, after = choice.fields_around_logprobs(answer.joined())
            yield (b"," if position else b"") + orjson.dumps(before)[:-1] + b',"logprobs":'
            yield from answer.encoded_logprobs()
            yield b"," + orjson.dumps(after)[1:]
        yield b'],"usage":%b}' % orjson.dumps(_usage(totals.tokens))


def _usage(tokens: TokenCounts) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "total_tokens": tokens.prompt + tokens.completion,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
    }
