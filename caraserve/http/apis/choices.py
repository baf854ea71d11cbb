"""The format of completions and chat completions: the answers to a body are the entries of `choices`."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from caraserve.core.request import Finish, GenerateRequest, TokenDelta, TokenLogprob
from caraserve.errors import CaraServeError
from caraserve.http.api_request import AnswerWriter, ResponseTotals, StreamFormat, TextEvents, TokenCounts
from caraserve.http.responses import openai_error
from caraserve.http.whole_answer import PROMPT_LOGPROBS, WholeAnswer, response_of
from caraserve.tokenizer.tokenizer import Tokenizer
from caraserve.util.tasks import in_turns

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
_MARK = secrets.token_hex(16)  # a text that no model's name contains


@dataclass(frozen=True, slots=True)
class Delivery:
    """The form in which the client wants the response."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool
    tokens_as_ids: bool  # in logprobs, tokens are named by their ids instead of their texts


@dataclass(frozen=True, slots=True)
class ResponseHeads:
    """The fields that a whole response, and every event of a stream, begin with; `first_chunk` is in the first event
    only. `has_prompt_logprobs`: those of the first answer are in the whole response, not in its choice."""

    whole: dict[str, Any]
    chunk: dict[str, Any]
    first_chunk: dict[str, Any]
    has_prompt_logprobs: bool = False


class TokenNames:
    """Names the tokens of logprobs, by their texts or as vLLM's `token_id:7`."""

    def __init__(self, tokenizer: Tokenizer, *, by_id: bool) -> None:
        self.tokenizer, self._by_id = tokenizer, by_id

    def of(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else self.tokenizer.token_text(token_id)


class PromptLogprobs:
    """Writes `prompt_logprobs` of one answer as vLLM does: for each token of the prompt an object by token id, null for
    the first token. `alternatives`: to each token."""

    def __init__(self, names: TokenNames, alternatives: int) -> None:
        self._names, self._alternatives = names, alternatives
        self._is_first = True

    def entries(self, delta: TokenDelta) -> list[dict[str, Any] | None]:
        """The entries that a delta adds. A long prompt is computed in chunks, so several deltas hold parts of it."""
        first, self._is_first = [None] if self._is_first else [], False
        return [*first, *(self._entry(scored) for scored in delta.prompt_logprobs if scored is not None)]

    def _entry(self, scored: TokenLogprob) -> dict[str, Any]:
        entry = {str(scored.token_id): self._shape(scored.token_id, scored.logprob, scored.rank)}
        best = zip(scored.top_ids[: self._alternatives], scored.top_logprobs, strict=False)
        for rank, (token_id, logprob) in enumerate(best, start=1):
            if token_id != scored.token_id:
                entry[str(token_id)] = self._shape(token_id, logprob, rank)
        return entry

    def _shape(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": self._names.of(token_id)}


@dataclass
class Choice(ABC):
    """Writes one entry of `choices` in the shape of its API. Keeps state between deltas. `prompt_alternatives`: to each
    token of the prompt, in `prompt_logprobs`; None: without that field."""

    index: int
    request: GenerateRequest
    names: TokenNames
    prompt_alternatives: int | None
    return_token_ids: bool

    def __post_init__(self) -> None:
        most = self.prompt_alternatives
        self._prompt_logprobs = None if most is None else PromptLogprobs(self.names, most)
        self._is_first = True  # the next delta

    @property
    def reasoning_tokens(self) -> int | None:
        """The tokens of the answer's reasoning so far; None for a model that does not reason."""
        return None

    @abstractmethod
    def stream_chunks(self, delta: TokenDelta) -> list[dict[str, Any]]:
        """The `choices` entries, one for each event, that a delta becomes in a stream."""

    @property
    def has_text_alone(self) -> bool:
        """Whether text is all that later deltas may add to a stream, each as one event."""
        has_scores = self.request.params.logprobs is not None or self.prompt_alternatives is not None
        return not (has_scores or self.return_token_ids or self._is_first)

    @abstractmethod
    async def fields_around_logprobs(self, answer: TokenDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields before and after `logprobs` in a response that is not streamed; `answer` has the text and the
        tokens of all deltas. Called once."""

    def logprobs(self, delta: TokenDelta) -> dict[str, list[Any]] | None:
        """The logprobs of a delta, by the field of `logprobs` to which they are added; None without logprobs."""
        of_prompt = {} if self._prompt_logprobs is None else {PROMPT_LOGPROBS: self._prompt_logprobs.entries(delta)}
        if self.request.params.logprobs is None:
            return of_prompt or None
        return of_prompt | self._scored(delta)

    @abstractmethod
    def _scored(self, delta: TokenDelta) -> dict[str, list[Any]]:
        """The logprobs of the tokens of a delta, by the field of `logprobs`."""


def finish_fields(finish: Finish | None) -> dict[str, Any]:
    return {
        "finish_reason": None if finish is None else finish.reason,
        "stop_reason": None if finish is None else finish.stop_reason,
    }


class OpenAiStream(StreamFormat):
    """The `StreamFormat` of completions and chat completions."""

    stream_end = b"data: [DONE]\n\n"

    def error_event(self, error: CaraServeError, num_events: int) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(openai_error(error))


class ChoicesWriter(OpenAiStream, AnswerWriter):
    """The `AnswerWriter` of completions and chat completions. `choices[i]` writes the answer to engine request i."""

    def __init__(self, choices: Sequence[Choice], heads: ResponseHeads, delivery: Delivery) -> None:
        self._choices, self._heads, self._delivery = choices, heads, delivery
        self._head = b"data: " + orjson.dumps(heads.chunk)[:-1]  # encoded once
        self._next_head = b"data: " + orjson.dumps(heads.chunk | heads.first_chunk)[:-1]
        self._tail = b',"usage":null}\n\n' if delivery.include_usage else b"}\n\n"

    def events(self, index: int, delta: TokenDelta, counts: TokenCounts) -> bytes:
        chunks = self._choices[index].stream_chunks(delta)
        tail = self._tail
        if self._delivery.continuous_usage:
            tail = b',"usage":%b}\n\n' % orjson.dumps(_usage(counts, self._choices[index : index + 1]))
        events = [self._event(chunk, tail) for chunk in chunks[:-1]]
        if chunks and delta.finish is not None:
            tail = b",%b%b" % (_fingerprint(delta.finish.served_by), tail)
        return b"".join([*events, *(self._event(chunk, tail) for chunk in chunks[-1:])])

    def text_events(self, index: int) -> TextEvents | None:
        choice = self._choices[index]
        if self._delivery.continuous_usage or not choice.has_text_alone:
            return None
        (chunk,) = choice.stream_chunks(TokenDelta(_MARK, (0,)))
        before, _, after = self._event(chunk, self._tail).partition(orjson.dumps(_MARK))
        return lambda text: b"%b%b%b" % (before, orjson.dumps(text), after)

    def _event(self, chunk: dict[str, Any], tail: bytes) -> bytes:
        head, self._next_head = self._next_head, self._head
        return b'%b,"choices":[%b]%b' % (head, orjson.dumps(chunk), tail)

    def last_events(self, totals: ResponseTotals) -> bytes:
        if not self._delivery.include_usage:
            return b""
        usage = orjson.dumps(_usage(totals.tokens, self._choices))
        return b'%b,"choices":[],%b,"usage":%b}\n\n' % (self._head, _fingerprint(totals.served_by), usage)

    def logprobs(self, index: int, delta: TokenDelta) -> dict[str, list[Any]] | None:
        return self._choices[index].logprobs(delta)

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        parts = in_turns(zip(self._choices, answers, strict=True))
        fields = [await choice.fields_around_logprobs(answer.joined()) async for choice, answer in parts]
        return await response_of(self._pieces(answers, fields, totals))

    def _pieces(
        self,
        answers: Sequence[WholeAnswer],
        fields: Sequence[tuple[dict[str, Any], dict[str, Any]]],
        totals: ResponseTotals,
    ) -> Iterator[bytes]:
        yield orjson.dumps(self._heads.whole)[:-1] + b","
        if self._heads.has_prompt_logprobs:
            yield from answers[0].encoded_prompt_logprobs()
        yield b'"choices":['
        for position, (answer, (before, after)) in enumerate(zip(answers, fields, strict=True)):
            yield (b"," if position else b"") + orjson.dumps(before)[:-1] + b","
            yield from answer.encoded_prompt_logprobs()
            yield b'"logprobs":'
            yield from answer.encoded_logprobs()
            yield b"," + orjson.dumps(after)[1:]
        yield b'],%b,"usage":%b}' % (_fingerprint(totals.served_by), orjson.dumps(_usage(totals.tokens, self._choices)))


def _fingerprint(served_by: str) -> bytes:
    return b'"system_fingerprint":%b' % orjson.dumps(served_by)


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _usage(tokens: TokenCounts, choices: Sequence[Choice]) -> dict[str, Any]:
    reasoning = [count for choice in choices if (count := choice.reasoning_tokens) is not None]
    details = {"completion_tokens_details": {"reasoning_tokens": sum(reasoning)}} if reasoning else {}
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.completion,
        "total_tokens": tokens.prompt + tokens.completion,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
        **details,
    }
