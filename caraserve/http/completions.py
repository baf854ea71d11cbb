"""POST /v1/completions: body → `Job`, deltas → choices in OpenAI's shape.

`sampling_fields.py` reads the sampling fields, `dispatch.py` finds who answers, `generation.py` runs
the job.
"""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from caraserve.core.request import (
    MAX_LOGPROBS,
    Finish,
    GenerateRequest,
    SamplingParams,
    Tenant,
    TokenDelta,
    TokenLogprob,
)
from caraserve.errors import InvalidRequest
from caraserve.http import sampling_fields as sampling
from caraserve.http.adapter_choice import choose_adapter
from caraserve.http.dispatch import answer, answer_forwarded
from caraserve.http.field_check import check_fields
from caraserve.http.generation import MAX_CHOICES, Delivery, Job, parse_delivery
from caraserve.http.interfaces import EngineApi, Find, TokenizerApi
from caraserve.http.request_schema import COMPLETIONS
from caraserve.http.validation import Fields, shown, token_ids
from caraserve.util.tasks import in_turns

DEFAULT_MAX_TOKENS = 16
# Encoding runs at a few MB/s: longer texts would hold up the event loop for over a millisecond.
ENCODED_IN_PLACE_CHARACTERS = 2048
_PRIORITIES = 1 << 63  # as vLLM's: any integer of 64 bits
_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity

Prompt = str | list[Any]


async def completions(request: web.Request) -> web.StreamResponse:
    return await answer(request, parse_completion)


async def forwarded_completions(request: web.Request) -> web.StreamResponse:
    return await answer_forwarded(request, parse_completion)


@dataclasses.dataclass(frozen=True, slots=True)
class CommonFields:
    """What completions and chat completions have in common, beside sampling."""

    model: str  # as the client named it, or its adapter; the response repeats it
    adapter: str | None
    n: int
    tenant: Tenant
    cache_salt: str
    priority: int
    arrival_s: float  # monotonic; before the prompt is encoded, which a client waits for too
    delivery: Delivery


def parse_asked(fields: Fields, engine: EngineApi, find: Find, client: str) -> CommonFields:
    """Raises NotFound or InvalidRequest naming the field."""
    model, adapter = choose_adapter(fields, engine.base_name, find)
    return CommonFields(
        model=model,
        adapter=adapter,
        n=fields.integer("n", 1, sampling.MAX_N, 1),
        tenant=Tenant(client, fields.maybe_text("user", longest=256) or ""),
        cache_salt=fields.maybe_text("cache_salt", longest=256) or "",
        priority=fields.integer("priority", -_PRIORITIES, _PRIORITIES - 1, 0),
        arrival_s=time.monotonic(),
        delivery=parse_delivery(fields),
    )


async def parse_completion(fields: Fields, engine: EngineApi, find: Find, client: str) -> Job:
    """Raises InvalidRequest, ContextLengthExceeded or NotFound; they name the field."""
    check_fields(fields, COMPLETIONS)
    asked = parse_asked(fields, engine, find, client)
    echo = fields.boolean("echo", False)
    logprobs = fields.maybe_integer("logprobs", 0, MAX_LOGPROBS)
    params = dataclasses.replace(
        sampling.sampling_params(fields, engine), logprobs=logprobs, prompt_logprobs=logprobs if echo else None
    )
    if fields.integer("best_of", 1, sampling.MAX_N, asked.n) != asked.n:
        raise InvalidRequest("best_of other than n is not supported; leave it out.", param="best_of")
    max_tokens = fields.maybe_integer("max_tokens", 0, (1 << 63) - 1)
    newer_limit = fields.maybe_integer("max_completion_tokens", 0, (1 << 63) - 1)  # clients that send it send both
    max_tokens = max_tokens if newer_limit is None else newer_limit
    if max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens may be 0 only with echo; ask for at least 1.", param="max_tokens")
    add_special_tokens = fields.boolean("add_special_tokens", True)
    prompts = parse_prompts(fields)
    if len(prompts) * asked.n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={asked.n} are over {MAX_CHOICES} answers; send several requests.",
            param="prompt",
        )
    response_id = f"cmpl-{uuid.uuid4().hex}"
    requests: list[GenerateRequest] = []
    choices: list[CompletionChoice] = []
    scored = 0  # tokens
    async for position, prompt in in_turns(enumerate(prompts)):
        ids = await prompt_ids(prompt, position, engine, add_special_tokens=add_special_tokens)
        limit = sampling.fit_max_tokens(max_tokens, DEFAULT_MAX_TOKENS, len(ids), engine)
        sampling.check_min_tokens(params.min_tokens, limit)
        scored += asked.n * (limit + echo * len(ids))
        sampling.check_scores(asked.n * (position + 1), scored, logprobs, "logprobs")
        echoed = (prompt if isinstance(prompt, str) else await decode(engine.tokenizer, ids)) if echo else ""
        sized = dataclasses.replace(params, max_tokens=limit)
        for request in fan_out(f"{response_id}-", len(requests), ids, asked, sized):
            choices.append(CompletionChoice(len(choices), request, engine.tokenizer, echoed, asked.delivery.token_ids))
            requests.append(request)
    head = response_head(response_id, "text_completion", asked.model)
    return Job(tuple(requests), tuple(choices), asked.n, asked.delivery, whole_head=head, chunk_head=head)


def fan_out(
    prefix: str, first: int, ids: tuple[int, ...], asked: CommonFields, params: SamplingParams
) -> list[GenerateRequest]:
    """The engine requests of one prompt's n answers; answer i draws with seed + i."""
    return [
        GenerateRequest(
            request_id=f"{prefix}{first + index}",
            prompt_ids=ids,
            adapter=asked.adapter,
            params=dataclasses.replace(params, seed=sampling.nth_seed(params.seed, index)),
            arrival_s=asked.arrival_s,
            tenant=asked.tenant,
            cache_salt=asked.cache_salt,
            priority=asked.priority,
        )
        for index in range(asked.n)
    ]


def response_head(response_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": response_id, "object": kind, "created": int(time.time()), "model": model}


def parse_prompts(fields: Fields) -> list[Prompt]:
    """`prompt` is a string, a list of strings, token ids, or a list of lists of token ids."""
    value = fields.raw("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        what = "nothing" if value is None else shown(value)
        raise InvalidRequest(
            f"prompt must be a string, token ids, or a non-empty list of either, not {what}.", param="prompt"
        )
    if not isinstance(value[0], str | list):
        return [value]
    for position, prompt in enumerate(value):
        if not isinstance(prompt, str | list):
            raise InvalidRequest(
                f"prompt[{position}] must be a string or token ids, not {shown(prompt)}.", param="prompt"
            )
    return value


async def prompt_ids(prompt: Prompt, position: int, engine: EngineApi, *, add_special_tokens: bool) -> tuple[int, ...]:
    """The token ids of one prompt, at least one and at most as many as the context holds.

    Raises InvalidRequest naming the position, or ContextLengthExceeded.
    """
    name = "prompt" if position == 0 else f"prompt[{position}]"
    tokenizer = engine.tokenizer
    if isinstance(prompt, str):
        ids = tuple(
            await encode(tokenizer, prompt, add_special_tokens=add_special_tokens, max_tokens=engine.max_model_len)
        )
    else:
        sampling.fit_max_tokens(0, None, len(prompt), engine)  # before each id is looked at
        ids = token_ids(name, prompt, tokenizer.vocab_size)
    if not ids:
        raise InvalidRequest(f"{name} is empty; at least one token is needed.", param="prompt")
    return ids


async def encode(tokenizer: TokenizerApi, text: str, *, add_special_tokens: bool, max_tokens: int) -> list[int]:
    """Encodes without holding up the event loop. Raises ContextLengthExceeded."""
    if len(text) <= ENCODED_IN_PLACE_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)


async def decode(tokenizer: TokenizerApi, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Decodes without holding up the event loop."""
    if len(ids) <= ENCODED_IN_PLACE_CHARACTERS:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)


class CompletionChoice:
    """One entry of `choices`; a chunk of a stream and a whole answer have the same shape."""

    def __init__(
        self, index: int, request: GenerateRequest, tokenizer: TokenizerApi, echoed: str, return_token_ids: bool
    ) -> None:
        self._index = index
        self._request = request
        self._tokenizer = tokenizer
        self._pending_echo = echoed
        self._return_token_ids = return_token_ids
        self._first = True
        self._scored = False
        self._text_offset = 0

    def chunks(self, delta: TokenDelta) -> list[dict[str, Any]]:
        told = delta.text or self._pending_echo or delta.finish or self._return_token_ids
        if not told and self._request.params.logprobs is None:
            return []  # text held back: a character or stop string may still become whole
        before, after = self.around(delta)
        return [before | {"logprobs": self.scores(delta)} | after]

    def around(self, answer: TokenDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        before = {"index": self._index, "text": self._pending_echo + answer.text}
        after = finish_fields(answer.finish)
        if self._return_token_ids:
            after["token_ids"] = answer.token_ids
            after["prompt_token_ids"] = self._request.prompt_ids if self._first else None
        self._first, self._pending_echo = False, ""
        return before, after

    def scores(self, delta: TokenDelta) -> dict[str, list[Any]] | None:
        if self._request.params.logprobs is None:
            return None
        shape: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if not self._scored and self._request.params.prompt_logprobs is not None:
            self._add_token(shape, self._request.prompt_ids[0], None)  # nothing comes before it that could score it
        self._scored = True
        # A long prompt is scored piece by piece, so several deltas may hold parts of it.
        for scored in (*delta.prompt_logprobs, *delta.logprobs):
            if scored is not None:
                self._add_token(shape, scored.token_id, scored)
        return shape

    def _add_token(self, shape: dict[str, list[Any]], token_id: int, scored: TokenLogprob | None) -> None:
        text = self._tokenizer.token_text(token_id)
        shape["tokens"].append(text)
        shape["text_offset"].append(self._text_offset)
        shape["token_logprobs"].append(None if scored is None else finite(scored.logprob))
        shape["top_logprobs"].append(None if scored is None else self._best(text, scored))
        self._text_offset += len(text)

    def _best(self, text: str, scored: TokenLogprob) -> dict[str, float]:
        """The best alternatives by text, and the token itself where it is not among them."""
        best = {text: finite(scored.logprob)}
        for token_id, logprob in scored.top:
            best.setdefault(self._tokenizer.token_text(token_id), finite(logprob))
        return best


def finish_fields(finish: Finish | None) -> dict[str, Any]:
    return {
        "finish_reason": None if finish is None else finish.reason,
        "stop_reason": None if finish is None else finish.stop_reason,
    }


def finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
