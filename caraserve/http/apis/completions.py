"""POST /v1/completions: parses the body into an `ApiRequest`, writes deltas as choices in OpenAI's shape.

Shares its parts with `chat.py`.
"""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

from caraserve.core.request import (
    GenerateRequest,
    PromptEmbeds,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    with_params,
)
from caraserve.core.tenant import Tenant
from caraserve.errors import InvalidRequest
from caraserve.http.access.adapter_choice import AdapterFinder, ChosenAdapter, choose_adapter
from caraserve.http.api_request import ApiRequest
from caraserve.http.apis.choices import (
    Choice,
    ChoicesWriter,
    Delivery,
    ResponseHeads,
    TokenNames,
    finish_fields,
    finite,
)
from caraserve.http.apis.prompt_embeds import embeds_prompts, has_embeds, mixed_prompt
from caraserve.http.apis.structured_output import parse_grammar
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, shown, token_ids
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.limits import AnswerLimits, Truncation, check_context, parse_truncation
from caraserve.http.body.request_schema import COMPLETIONS, STREAM_OPTIONS
from caraserve.http.body.sampling import default_limit, field_defaults, nth_seed, sampling_params
from caraserve.http.client import Client
from caraserve.loop import Engine
from caraserve.tokenizer.tokenizer import ENCODED_IN_PLACE_CHARACTERS, Tokenizer
from caraserve.util.tasks import in_turns

DEFAULT_MAX_TOKENS = 16
# Engine requests of one body: enough for an evaluation's batch; the body itself could hold 10⁶ prompts.
MAX_CHOICES = 2048

Prompt = str | list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class CommonFields:
    """The fields of completions and chat completions beside prompt and sampling."""

    model: str  # as the client named it; the response repeats it
    adapter: ChosenAdapter
    n: int
    tenant: Tenant
    cache_salt: str
    priority: int
    arrival_s: float  # monotonic; before the prompt is encoded, so that its time counts
    delivery: Delivery


def parse_common(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> CommonFields:
    """Reads the common fields of a body, which takes the adapter's defaults from then on. Raises NotFound or
    InvalidRequest, which name the field."""
    model, adapter = choose_adapter(fields, engine.base_name, find, client)
    adapter.refuse_generation()
    fields.take_defaults(field_defaults(adapter.defaults))
    return CommonFields(
        model=model,
        adapter=adapter,
        n=body_fields.N.read(fields),
        tenant=client.tenant(body_fields.USER.read(fields) or ""),
        cache_salt=body_fields.CACHE_SALT.read(fields) or "",
        priority=body_fields.PRIORITY.read(fields),
        arrival_s=time.monotonic(),
        delivery=parse_delivery(fields),
    )


def parse_delivery(fields: Fields) -> Delivery:
    """Reads the fields of a stream. Raises InvalidRequest, which names the field."""
    stream = body_fields.STREAM.read(fields)
    options = fields.nested("stream_options")
    check_fields(options, STREAM_OPTIONS)
    if fields.raw("stream_options") is not None and not stream:
        raise InvalidRequest("stream_options need stream to be true.", param="stream_options")
    include_usage = body_fields.INCLUDE_USAGE.read(options)
    continuous = body_fields.CONTINUOUS_USAGE_STATS.read(options)
    return Delivery(
        stream,
        include_usage,
        include_usage and continuous,
        token_ids=body_fields.RETURN_TOKEN_IDS.read(fields),
        tokens_as_ids=body_fields.RETURN_TOKENS_AS_TOKEN_IDS.read(fields),
    )


def parse_prompt_logprobs(fields: Fields, delivery: Delivery) -> int | None:
    """Reads `prompt_logprobs`, which only a whole response has. Raises InvalidRequest."""
    wanted = body_fields.PROMPT_LOGPROBS.read(fields)
    if wanted is not None and delivery.stream:
        raise InvalidRequest("prompt_logprobs needs stream to be false.", param="prompt_logprobs")
    return wanted


async def parse_completion(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    check_fields(fields, COMPLETIONS)
    common = parse_common(fields, engine, find, client)
    echo = body_fields.ECHO.read(fields)
    logprobs = body_fields.LOGPROBS.read(fields)
    prompt_logprobs = parse_prompt_logprobs(fields, common.delivery)
    scores = [count for count in (prompt_logprobs, logprobs if echo else None) if count is not None]
    params = sampling_params(fields, engine)
    params = with_params(
        params,
        logprobs=logprobs,
        prompt_logprobs=max(scores, default=None),
        grammar=await parse_grammar(fields, engine, params),
    )
    limits = _limits(fields, engine, common, params, prompt_logprobs, echo=echo)
    add_special_tokens = body_fields.ADD_SPECIAL_TOKENS.read(fields)
    reserved_tokens = limits.default_tokens if limits.wanted_tokens is None else limits.wanted_tokens
    truncation = parse_truncation(fields, engine.max_model_len, reserved_tokens or 0)
    prompts = with_suffix(fields, parse_prompts(fields), engine.tokenizer)
    if len(prompts) * common.n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={common.n} are over {MAX_CHOICES} answers; send several requests.",
            param="prompt",
        )
    response_id, return_token_ids = f"cmpl-{secrets.token_hex(16)}", common.delivery.token_ids
    requests: list[GenerateRequest] = []
    choices: list[CompletionChoice] = []
    names = TokenNames(engine.tokenizer, by_id=common.delivery.tokens_as_ids)
    async for position, prompt in in_turns(enumerate(prompts)):
        ids, embeds = await read_prompt(prompt, position, engine, truncation, add_special_tokens=add_special_tokens)
        if embeds is not None and (params.prompt_logprobs is not None or echo or return_token_ids):
            raise InvalidRequest("echo, prompt_logprobs and return_token_ids need a prompt of tokens.", param="prompt")
        sized = with_params(params, max_tokens=limits.most_tokens(len(ids)))
        is_whole = isinstance(prompt, str) and len(ids) < truncation.most_tokens
        echoed = None
        if echo:
            echoed = str(prompt) if is_whole else await decode(engine.tokenizer, ids)
        for request in fan_out(f"{response_id}-", len(requests), ids, common, sized, embeds):
            choices.append(CompletionChoice(len(choices), request, names, prompt_logprobs, return_token_ids, echoed))
            requests.append(request)
    head = response_head(response_id, "text_completion", common.model)
    writer = ChoicesWriter(choices, ResponseHeads(head, head, {}), common.delivery)
    return ApiRequest(tuple(requests), common.n, common.delivery.stream, writer)


def _limits(
    fields: Fields,
    engine: Engine,
    common: CommonFields,
    params: SamplingParams,
    prompt_logprobs: int | None,
    *,
    echo: bool,
) -> AnswerLimits:
    """Reads the limits of the answers. Raises InvalidRequest."""
    if body_fields.BEST_OF.read(fields) not in (None, common.n):
        raise InvalidRequest("best_of other than n is not supported; leave it out.", param="best_of")
    older_limit = body_fields.MAX_TOKENS.read(fields)
    limit = body_fields.MAX_COMPLETION_TOKENS.read(fields)  # clients that know it send both
    wanted_tokens = older_limit if limit is None else limit
    if wanted_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens may be 0 only with echo; ask for at least 1.", param="max_tokens")
    default_tokens = default_limit(common.adapter.defaults) or DEFAULT_MAX_TOKENS
    lengths = engine.max_model_len, wanted_tokens, default_tokens, params.min_tokens
    return AnswerLimits(*lengths, common.n, params.logprobs, prompt_logprobs, echoed=echo)


def fan_out(
    prefix: str,
    first: int,
    ids: tuple[int, ...],
    common: CommonFields,
    params: SamplingParams,
    prompt_embeds: PromptEmbeds | None = None,
    predicted_ids: tuple[int, ...] = (),
) -> list[GenerateRequest]:
    """The engine requests of one prompt's n answers, numbered from `first`; answer i samples with seed + i."""
    return [
        GenerateRequest(
            request_id=f"{prefix}{first + index}",
            prompt_ids=ids,
            adapter=common.adapter.name,
            params=with_params(params, seed=nth_seed(params.seed, index)),
            arrival_s=common.arrival_s,
            tenant=common.tenant,
            cache_salt=common.cache_salt,
            priority=common.priority,
            prompt_embeds=prompt_embeds,
            counts_prompt=index == 0,
            predicted_ids=predicted_ids,
        )
        for index in range(common.n)
    ]


def response_head(response_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": response_id, "object": kind, "created": int(time.time()), "model": model}


def parse_prompts(fields: Fields) -> list[Prompt]:
    """The prompts of `prompt` or `prompt_embeds`: a string, a list of strings, token ids, or a list of lists of token
    ids, among which there may be vectors."""
    if embeds := embeds_prompts(fields):
        return list(embeds)
    return listed_prompts(fields, "prompt")


def listed_prompts(fields: Fields, name: str) -> list[Prompt]:
    """The prompts of a field: a string, a list of strings, token ids, or a list of lists of token ids."""
    value = fields.raw(name)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        what = "nothing" if value is None else shown(value)
        raise InvalidRequest(
            f"{name} must be a string, token ids, or a non-empty list of either, not {what}.", param=name
        )
    if not isinstance(value[0], str | list):
        return [value]
    for position, prompt in enumerate(value):
        if not isinstance(prompt, str | list):
            raise InvalidRequest(f"{name}[{position}] must be a string or token ids, not {shown(prompt)}.", param=name)
    return value


def with_suffix(fields: Fields, prompts: list[Prompt], tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts for the text between each of `prompts` and `suffix`, if the body has one. Raises InvalidRequest."""
    suffix = body_fields.SUFFIX.read(fields)
    if not suffix:
        return prompts
    if (infill := tokenizer.infill_format) is None:
        raise InvalidRequest(
            "suffix is not supported by this model, whose vocabulary has no tokens for it; leave it out.",
            param="suffix",
        )
    for other in ("echo", "truncate_prompt_tokens"):
        if fields.raw(other):
            raise InvalidRequest(f"{other} and suffix exclude each other; send one of them.", param=other)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise InvalidRequest("prompt must be text if there is a suffix.", param="prompt")
    return [infill.prompt(text, suffix) for text in texts]


async def prompt_ids(
    prompt: Prompt, position: int, engine: Engine, truncation: Truncation, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """The token ids of one prompt, at least one and at most as many as the context holds.

    Raises InvalidRequest naming the position, or ContextLengthExceeded.
    """
    name = "prompt" if position == 0 else f"prompt[{position}]"
    tokenizer = engine.tokenizer
    if isinstance(prompt, str):
        with truncation.refusing("prompt"):
            most = truncation.most_encoded
            encoded = await encode(tokenizer, prompt, add_special_tokens=add_special_tokens, max_tokens=most)
        ids = tuple(truncation.cut(encoded))
    else:
        given = truncation.cut(prompt)
        check_context(len(given), engine.max_model_len)
        ids = token_ids(name, list(given), tokenizer.vocab_size)
    if not ids:
        raise InvalidRequest(f"{name} is empty; at least one token is needed.", param="prompt")
    return ids


async def read_prompt(
    prompt: Prompt, position: int, engine: Engine, truncation: Truncation, *, add_special_tokens: bool
) -> tuple[tuple[int, ...], PromptEmbeds | None]:
    """The tokens of one prompt, and the vectors among them. Raises as `prompt_ids` does."""
    if not await has_embeds(prompt):
        return await prompt_ids(prompt, position, engine, truncation, add_special_tokens=add_special_tokens), None
    if truncation.is_on:
        raise InvalidRequest("truncate_prompt_tokens needs a prompt of tokens.", param="truncate_prompt_tokens")
    check_context(len(prompt), engine.max_model_len)
    return await mixed_prompt("prompt" if position == 0 else f"prompt[{position}]", prompt, engine)


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, max_tokens: int) -> list[int]:
    """Encodes, long texts in a thread. Raises ContextLengthExceeded."""
    if len(text) <= ENCODED_IN_PLACE_CHARACTERS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)


async def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Decodes, long texts in a thread."""
    if len(ids) <= ENCODED_IN_PLACE_CHARACTERS:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)


@dataclasses.dataclass
class CompletionChoice(Choice):
    """Writes one entry of `choices`, which has the same shape in a stream and in a whole response. `echoed`: the
    prompt's text, None if the answer does not begin with it."""

    echoed: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pending_echo = self.echoed or ""
        self._prompt_written = False
        self._text_offset = 0

    def stream_chunks(self, delta: TokenDelta) -> list[dict[str, Any]]:
        is_visible = delta.text or self._pending_echo or delta.finish or self.return_token_ids
        if not is_visible and self.request.params.logprobs is None:
            return []  # the engine holds text back: an incomplete character, or the start of a stop string
        before, after = self._fields(delta)
        return [before | {"logprobs": self.logprobs(delta)} | after]

    async def fields_around_logprobs(self, answer: TokenDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._fields(answer)

    def _fields(self, answer: TokenDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        before = {"index": self.index, "text": self._pending_echo + answer.text}
        after = finish_fields(answer.finish)
        if self.return_token_ids:
            after["token_ids"] = answer.token_ids
            after["prompt_token_ids"] = self.request.prompt_ids if self._is_first else None
        self._is_first, self._pending_echo = False, ""
        return before, after

    def _scored(self, delta: TokenDelta) -> dict[str, list[Any]]:
        shape: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if not self._prompt_written and self.echoed is not None:
            self._add_token(shape, self.request.prompt_ids[0], None)  # the first token has no logprob
        self._prompt_written = True
        # A long prompt is computed in chunks, so several deltas hold parts of its logprobs.
        for scored in (*(() if self.echoed is None else delta.prompt_logprobs), *delta.logprobs):
            if scored is not None:
                self._add_token(shape, scored.token_id, scored)
        return shape

    def _add_token(self, shape: dict[str, list[Any]], token_id: int, scored: TokenLogprob | None) -> None:
        name = self.names.of(token_id)
        shape["tokens"].append(name)
        shape["text_offset"].append(self._text_offset)
        shape["token_logprobs"].append(None if scored is None else finite(scored.logprob))
        shape["top_logprobs"].append(None if scored is None else self._best(name, scored))
        self._text_offset += len(self.names.tokenizer.token_text(token_id))

    def _best(self, name: str, scored: TokenLogprob) -> dict[str, float]:
        """The alternatives by name, with the token itself if it is not among them."""
        best = {name: finite(scored.logprob)}
        most = self.request.params.logprobs  # tokens of the prompt may have more, for `prompt_logprobs`
        for token_id, logprob in zip(scored.top_ids[:most], scored.top_logprobs, strict=False):
            best.setdefault(self.names.of(token_id), finite(logprob))
        return best
