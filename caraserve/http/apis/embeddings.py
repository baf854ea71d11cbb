"""POST /v1/embeddings: prompts as engine requests, and their embeddings in OpenAI's shape.

An embedding is the hidden state of a prompt's last token after the final norm, scaled to length 1. `scores.py` shares
the parts.
"""

import base64
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from caraserve.core.request import GenerateRequest, SamplingParams
from caraserve.errors import ContextLengthExceeded, InvalidRequest
from caraserve.http.access.adapter_choice import AdapterFinder, choose_adapter
from caraserve.http.api_request import AnswerWriter, ApiRequest, ResponseTotals, TokenCounts
from caraserve.http.apis.choices import OpenAiStream
from caraserve.http.apis.completions import MAX_CHOICES, encode, listed_prompts, response_head
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, token_ids
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.limits import Truncation, parse_truncation
from caraserve.http.body.request_schema import EMBEDDINGS
from caraserve.http.client import Client
from caraserve.http.whole_answer import WholeAnswer, response_of
from caraserve.loop import Engine
from caraserve.util.tasks import in_turns

_MAX_PROMPTS = MAX_CHOICES  # OpenAI's limit, too
_MAX_TOKENS = 1 << 19  # of all prompts of a body
_MAX_NUMBERS = 1 << 23  # in all embeddings of a response: 45 MB in base64, 100 MB as JSON numbers
_LEAST_LENGTH = 1e-12  # a shorter vector stays short
_NO_TOKENS = SamplingParams(max_tokens=0)


class NamedPrompt(NamedTuple):
    """A text or its token ids. `field`: of the body; `place`: in the field, as `[2]`; empty: all of it."""

    field: str
    place: str
    content: str | list[Any]

    @property
    def name(self) -> str:
        return self.field + self.place


async def parse_embeddings(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    check_fields(fields, EMBEDDINGS)
    dimensions = body_fields.DIMENSIONS.read(fields, high=engine.embedding_size)
    in_base64 = body_fields.ENCODING_FORMAT.read(fields) == "base64"
    normalize = body_fields.NORMALIZE.read(fields)
    contents = listed_prompts(fields, "input")
    check_count("input", len(contents), engine)
    prompts = [NamedPrompt("input", f"[{at}]" if len(contents) > 1 else "", one) for at, one in enumerate(contents)]
    response_id = f"embd-{uuid.uuid4().hex}"
    model, requests = await embedding_requests(fields, engine, find, client, response_id, prompts)
    head = response_head(response_id, "list", model)
    writer = EmbeddingsWriter(head, dimensions, normalize=normalize, in_base64=in_base64)
    return ApiRequest(requests, 1, stream=False, writer=writer)


async def embedding_requests(
    fields: Fields,
    engine: Engine,
    find: AdapterFinder,
    client: Client,
    response_id: str,
    prompts: Sequence[NamedPrompt],
) -> tuple[str, tuple[GenerateRequest, ...]]:
    """Reads the fields that all routes here share. Returns the model as the client named it, and an engine request for
    each prompt. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    arrival_s = time.monotonic()
    model, adapter = choose_adapter(fields, engine.base_name, find, client)
    tenant = client.tenant(body_fields.USER.read(fields) or "")
    cache_salt = body_fields.CACHE_SALT.read(fields) or ""
    priority = body_fields.PRIORITY.read(fields)
    add_special_tokens = body_fields.ADD_SPECIAL_TOKENS.read(fields)
    truncation = parse_truncation(fields, engine.max_model_len, answer_tokens=0)
    check_count(prompts[-1].field, len(prompts), engine)
    requests: list[GenerateRequest] = []
    tokens = 0
    async for prompt in in_turns(prompts):
        ids = await _prompt_ids(prompt, engine, truncation, add_special_tokens=add_special_tokens)
        tokens += len(ids)
        if tokens > _MAX_TOKENS:
            raise InvalidRequest(
                f"All texts together have more than {_MAX_TOKENS} tokens; send several requests.", param=prompt.field
            )
        request_id = f"{response_id}-{len(requests)}"
        requests.append(
            GenerateRequest(
                request_id, ids, adapter.name, _NO_TOKENS, arrival_s, tenant, cache_salt, priority, embeds=True
            )
        )
    return model, tuple(requests)


def check_count(field: str, texts: int, engine: Engine) -> None:
    """Raises InvalidRequest for a body with too many texts. To be called before each is looked at."""
    most = min(_MAX_PROMPTS, _MAX_NUMBERS // engine.embedding_size)
    if texts > most:
        raise InvalidRequest(
            f"{texts} texts are over {most}, the most in one request; send several requests.", param=field
        )


async def _prompt_ids(
    prompt: NamedPrompt, engine: Engine, truncation: Truncation, *, add_special_tokens: bool
) -> tuple[int, ...]:
    """Returns the token ids of one prompt, at least one and at most as many as the context holds."""
    limit, tokenizer, content = engine.max_model_len, engine.tokenizer, prompt.content
    if isinstance(content, str):
        most = truncation.most_encoded
        try:
            encoded = await encode(tokenizer, content, add_special_tokens=add_special_tokens, max_tokens=most)
        except ContextLengthExceeded:
            raise _too_long(prompt, f"more than {most}", limit) from None
        ids = tuple(truncation.cut(encoded))
    else:
        given = truncation.cut(content)
        if len(given) > limit:  # before each id is looked at
            raise _too_long(prompt, str(len(given)), limit)
        ids = token_ids(prompt.name, list(given), tokenizer.vocab_size)
    if not ids:
        raise InvalidRequest(f"{prompt.name} is empty; at least one token is needed.", param=prompt.field)
    if len(ids) > limit:
        raise _too_long(prompt, str(len(ids)), limit)
    return ids


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


class EmbeddingsWriter(OpenAiStream, AnswerWriter):
    """Writes the entries of `data`, one for each prompt."""

    def __init__(self, head: dict[str, Any], dimensions: int | None, *, normalize: bool, in_base64: bool) -> None:
        self._head, self._dimensions, self._normalize, self._in_base64 = head, dimensions, normalize, in_base64

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        return await response_of(self._pieces(answers, totals.tokens))

    def _pieces(self, answers: Sequence[WholeAnswer], tokens: TokenCounts) -> Iterator[bytes]:
        yield orjson.dumps(self._head)[:-1] + b',"data":['
        for index, answer in enumerate(answers):
            comma = b"," if index else b""
            yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, index, self._encoded(answer))
        yield b'],"usage":%b}' % orjson.dumps(prompt_usage(tokens))

    def _encoded(self, answer: WholeAnswer) -> bytes:
        vector = vector_of(answer, self._dimensions, normalize=self._normalize)
        if self._in_base64:
            return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())
        return orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
