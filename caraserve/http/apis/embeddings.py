"""POST /v1/embeddings: prompts as engine requests, and their embeddings in OpenAI's shape.

An embedding is the hidden state of a prompt's last token after the final norm, scaled to length 1; or as the model's
folder says (`model/sentence_format.py`). `classify.py` and
`scores.py` share the parts.
"""

import asyncio
import base64
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from caraserve.core.request import GenerateRequest, SamplingParams
from caraserve.core.tenant import Tenant
from caraserve.errors import ContextLengthExceeded, InvalidRequest
from caraserve.http.access.adapter_choice import AdapterFinder, ChosenAdapter, choose_adapter
from caraserve.http.api_request import AnswerWriter, ApiRequest, ResponseTotals, TokenCounts
from caraserve.http.apis.choices import OpenAiStream
from caraserve.http.apis.completions import MAX_CHOICES, encode, listed_prompts, response_head
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, shown, token_ids
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.limits import Truncation, parse_truncation
from caraserve.http.body.request_schema import EMBEDDINGS
from caraserve.http.client import Client
from caraserve.http.whole_answer import WholeAnswer, response_of
from caraserve.loop import Engine
from caraserve.model.sentence_format import SentenceFormat
from caraserve.tokenizer.tokenizer import ENCODED_IN_PLACE_CHARACTERS
from caraserve.util.tasks import in_turns

_MAX_PROMPTS = MAX_CHOICES  # OpenAI's limit, too
_MAX_TOKENS = 1 << 19  # of all prompts of a body
_MAX_NUMBERS = 1 << 23  # in all embeddings of a response: 45 MB in base64, 100 MB as JSON numbers
_LEAST_LENGTH = 1e-12  # a shorter vector stays short
_NO_TOKENS = SamplingParams(max_tokens=0)


class NamedPrompt(NamedTuple):
    """A text, its token ids, or two texts that are read as one. `field`: of the body; `place`: in the field, as `[2]`;
    empty: all of it."""

    field: str
    place: str
    content: str | list[Any] | tuple[str, str]

    @property
    def name(self) -> str:
        return self.field + self.place


async def parse_embeddings(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    check_fields(fields, EMBEDDINGS)
    dimensions = body_fields.DIMENSIONS.read(fields, high=engine.embedding_size)
    in_base64 = body_fields.ENCODING_FORMAT.read(fields) == "base64"
    normalize = body_fields.NORMALIZE.read(fields, default=engine.tokenizer.sentences.normalizes)
    prompts = input_prompts(fields, engine)
    texts = EmbeddedTexts.read(fields, engine, find, client)
    response_id = f"embd-{secrets.token_hex(16)}"
    requests = await texts.requests(engine, response_id, prompts)
    head = response_head(response_id, "list", texts.model)
    writer = EmbeddingsWriter(head, dimensions, normalize=normalize, in_base64=in_base64)
    return ApiRequest(requests, 1, stream=False, writer=writer)


def input_prompts(fields: Fields, engine: Engine) -> list[NamedPrompt]:
    """Reads `input`: a text, token ids, or a list of either. Raises InvalidRequest."""
    contents = listed_prompts(fields, "input")
    check_count("input", len(contents), engine)
    return [NamedPrompt("input", f"[{at}]" if len(contents) > 1 else "", one) for at, one in enumerate(contents)]


@dataclass(frozen=True, slots=True)
class EmbeddedTexts:
    """The fields that all routes share whose answers are made of hidden states. `model`: as the client named it."""

    model: str
    adapter: ChosenAdapter
    arrival_s: float  # monotonic
    tenant: Tenant
    cache_salt: str
    priority: int
    add_special_tokens: bool
    truncation: Truncation
    prompt: str | None  # before each text, which `prompt_name` names; None: it is not given

    @classmethod
    def read(cls, fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> Self:
        """Reads the fields. Raises InvalidRequest or NotFound, which name the field."""
        arrival_s = time.monotonic()
        model, adapter = choose_adapter(fields, engine.base_name, find, client)
        return cls(
            model,
            adapter,
            arrival_s,
            client.tenant(body_fields.USER.read(fields) or ""),
            body_fields.CACHE_SALT.read(fields) or "",
            body_fields.PRIORITY.read(fields),
            body_fields.ADD_SPECIAL_TOKENS.read(fields),
            parse_truncation(fields, engine.max_model_len, answer_tokens=0),
            _prompt(fields, engine.tokenizer.sentences),
        )

    async def requests(
        self, engine: Engine, response_id: str, prompts: Sequence[NamedPrompt], *, reads_last: bool = False
    ) -> tuple[GenerateRequest, ...]:
        """Returns an engine request for each prompt. `reads_last`: for the hidden state of the last token that is none
        of padding, as transformers' classifiers read it, however the model embeds. Raises InvalidRequest or
        ContextLengthExceeded, which name the field."""
        check_count(prompts[-1].field, len(prompts), engine)
        requests: list[GenerateRequest] = []
        sentences = engine.tokenizer.sentences
        tokens, pooling = 0, "last" if reads_last else sentences.pooling
        default = "" if reads_last else sentences.default_prompt  # with which classifiers are not trained
        before = default if self.prompt is None else self.prompt
        async for prompt in in_turns(prompts):
            ids = await self._prompt_ids(prompt, engine, before)
            while reads_last and len(ids) > 1 and ids[-1] == engine.tokenizer.pad_id:
                ids = ids[:-1]
            if pooling == "first":  # which depends on no later one: attention is causal
                ids = ids[:1]
            tokens += len(ids)
            if tokens > _MAX_TOKENS:
                raise InvalidRequest(
                    f"All texts together have more than {_MAX_TOKENS} tokens; send several requests.",
                    param=prompt.field,
                )
            requests.append(
                GenerateRequest(
                    *(f"{response_id}-{len(requests)}", ids, self.adapter.name, _NO_TOKENS, self.arrival_s),
                    *(self.tenant, self.cache_salt, self.priority),
                    embeds=True,
                    averages=pooling == "mean",
                )
            )
        return tuple(requests)

    async def _prompt_ids(self, prompt: NamedPrompt, engine: Engine, before: str) -> tuple[int, ...]:
        """Returns the token ids of one prompt, at least one and at most as many as the context holds. `before`: a text
        to put before a single one."""
        limit, tokenizer, content, special = (
            engine.max_model_len,
            engine.tokenizer,
            prompt.content,
            self.add_special_tokens,
        )
        most = self.truncation.most_encoded
        if isinstance(content, list):
            given = self.truncation.cut(content)
            if len(given) > limit:  # before each id is looked at
                raise _too_long(prompt, str(len(given)), limit)
            ids = token_ids(prompt.name, list(given), tokenizer.vocab_size)
        else:
            try:
                if isinstance(content, str):
                    text = before + content
                    encoded = await encode(tokenizer, text, add_special_tokens=special, max_tokens=most)
                else:
                    pair = partial(tokenizer.encode_pair, *content, add_special_tokens=special, max_tokens=most)
                    in_place = sum(map(len, content)) <= ENCODED_IN_PLACE_CHARACTERS
                    encoded = pair() if in_place else await asyncio.to_thread(pair)
            except ContextLengthExceeded:
                raise _too_long(prompt, f"more than {most}", limit) from None
            ids = tuple(self.truncation.cut(encoded))
        if not ids:
            raise InvalidRequest(f"{prompt.name} is empty; at least one token is needed.", param=prompt.field)
        if len(ids) > limit:
            raise _too_long(prompt, str(len(ids)), limit)
        return ids


def _prompt(fields: Fields, sentences: SentenceFormat) -> str | None:
    """Returns the text that `prompt_name` names, None without. Raises InvalidRequest."""
    name = body_fields.PROMPT_NAME.read(fields)
    if name is None:
        return None
    if name not in sentences.prompts:
        known = f"has {', '.join(map(shown, sentences.prompts))}" if sentences.prompts else "has no prompts"
        raise InvalidRequest(f"prompt_name is {shown(name)}; the model {known}.", param="prompt_name")
    return sentences.prompts[name]


def check_count(field: str, texts: int, engine: Engine) -> None:
    """Raises InvalidRequest for a body with too many texts. To be called before each is looked at."""
    most = min(_MAX_PROMPTS, _MAX_NUMBERS // engine.embedding_size)
    if texts > most:
        raise InvalidRequest(
            f"{texts} texts are over {most}, the most in one request; send several requests.", param=field
        )


def _too_long(prompt: NamedPrompt, tokens: str, limit: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens. However, {prompt.name} has {tokens} tokens.",
        param=prompt.field,
    )


def vector_of(answer: WholeAnswer, dimensions: int | None = None, *, normalize: bool = True) -> NDArray[np.float32]:
    """Returns the first `dimensions` numbers of an answer's embedding, scaled to length 1 if `normalize`."""
    assert answer.embedding is not None, "the engine ended a request well, but without its embedding"
    vector = np.frombuffer(answer.embedding, np.float32)[:dimensions]
    return vector / max(np.linalg.norm(vector), np.float32(_LEAST_LENGTH)) if normalize else vector


def prompt_usage(tokens: TokenCounts) -> dict[str, int]:
    """Returns the token counts of an answer without output tokens."""
    return {"prompt_tokens": tokens.prompt, "completion_tokens": 0, "total_tokens": tokens.prompt}


def list_pieces(head: dict[str, Any], entries: Iterable[bytes], tokens: TokenCounts) -> Iterator[bytes]:
    """Yields an answer in pieces: its first fields, `data` with entries that are JSON, and `usage`."""
    yield orjson.dumps(head)[:-1] + b',"data":['
    for index, entry in enumerate(entries):
        yield (b"," if index else b"") + entry
    yield b'],"usage":%b}' % orjson.dumps(prompt_usage(tokens))


class EmbeddingsWriter(OpenAiStream, AnswerWriter):
    """Writes the entries of `data`, one for each prompt."""

    def __init__(self, head: dict[str, Any], dimensions: int | None, *, normalize: bool, in_base64: bool) -> None:
        self._head, self._dimensions, self._normalize, self._in_base64 = head, dimensions, normalize, in_base64

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        return await response_of(list_pieces(self._head, self._entries(answers), totals.tokens))

    def _entries(self, answers: Sequence[WholeAnswer]) -> Iterator[bytes]:
        for index, answer in enumerate(answers):
            yield b'{"object":"embedding","index":%d,"embedding":%b}' % (index, self._encoded(answer))

    def _encoded(self, answer: WholeAnswer) -> bytes:
        vector = vector_of(answer, self._dimensions, normalize=self._normalize)
        if self._in_base64:
            return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
        return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
