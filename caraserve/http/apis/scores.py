"""POST /v1/score and /v1/rerank: how similar texts are, as the cosine of the angle between their embeddings.

Scores have vLLM's shape; rankings have that of Jina and Cohere, the most similar document first.
"""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from caraserve.errors import InvalidRequest
from caraserve.http.access.adapter_choice import AdapterFinder
from caraserve.http.api_request import AnswerWriter, ApiRequest, ResponseTotals, TokenCounts
from caraserve.http.apis.choices import OpenAiStream
from caraserve.http.apis.completions import response_head
from caraserve.http.apis.embeddings import (
    NamedPrompt,
    check_count,
    embedding_requests,
    prompt_usage,
    vector_of,
)
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, shown
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.request_schema import RERANK, SCORE
from caraserve.http.client import Client
from caraserve.http.whole_answer import WholeAnswer, response_of
from caraserve.loop import Engine
from caraserve.util.tasks import in_turns

_PAIRED_FIELDS = (("text_1", "text_2"), ("queries", "documents"))


async def parse_score(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    check_fields(fields, SCORE)
    first, second = _paired_texts(fields, engine)
    response_id = f"score-{uuid.uuid4().hex}"
    model, requests = await embedding_requests(fields, engine, find, client, response_id, [*first, *second])
    writer = ScoresWriter(response_head(response_id, "list", model), len(first))
    return ApiRequest(requests, 1, stream=False, writer=writer)


async def parse_rerank(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    check_fields(fields, RERANK)
    query = body_fields.QUERY.read(fields)
    if query is None:
        raise InvalidRequest("Send query, a string.", param="query")
    documents = _texts(fields, "documents", engine)
    top_n = body_fields.TOP_N.read(fields) or len(documents)
    return_documents = body_fields.RETURN_DOCUMENTS.read(fields)
    response_id = f"rerank-{uuid.uuid4().hex}"
    prompts = [NamedPrompt("query", "", query), *documents]
    model, requests = await embedding_requests(fields, engine, find, client, response_id, prompts)
    shown_documents = [document.content for document in documents] if return_documents else None
    writer = RankingWriter({"id": response_id, "model": model}, top_n, shown_documents)
    return ApiRequest(requests, 1, stream=False, writer=writer)


def _paired_texts(fields: Fields, engine: Engine) -> tuple[list[NamedPrompt], list[NamedPrompt]]:
    """Returns the two sides: one text or several on the first, as many or several on the second."""
    sent = [names for names in _PAIRED_FIELDS if any(fields.raw(name) is not None for name in names)]
    if len(sent) != 1:
        raise InvalidRequest("Send text_1 and text_2, or queries and documents.", param=_PAIRED_FIELDS[0][0])
    first, second = (_texts(fields, name, engine) for name in sent[0])
    if len(first) not in (1, len(second)):
        name, other = sent[0]
        raise InvalidRequest(
            f"{name} has {len(first)} texts and {other} has {len(second)}; send as many, or one text as {name}.",
            param=name,
        )
    return first, second


def _texts(fields: Fields, name: str, engine: Engine) -> list[NamedPrompt]:
    """Reads a text, or a non-empty list of texts. A text may be an object that has it as `text`."""
    value = fields.raw(name)
    if not isinstance(value, list):
        return [NamedPrompt(name, "", _text(value, name, ""))]
    if not value:
        raise InvalidRequest(f"{name} is empty; at least one text is needed.", param=name)
    check_count(name, len(value), engine)
    return [NamedPrompt(name, place := f"[{at}]", _text(one, name, place)) for at, one in enumerate(value)]


def _text(value: object, name: str, place: str) -> str:
    if isinstance(value, dict) and value.keys() == {"text"}:
        value = value["text"]
    if not isinstance(value, str):
        what = "nothing" if value is None else shown(value)
        raise InvalidRequest(f"{name}{place} must be a string or an object with text alone, not {what}.", param=name)
    return value


def _similarity(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Returns the cosine of the angle between two vectors of length 1."""
    return float(np.dot(one, other))


class ScoresWriter(OpenAiStream, AnswerWriter):
    """Writes the entries of `data`, one for each text of the second side."""

    def __init__(self, head: dict[str, Any], first_texts: int) -> None:
        """`first_texts`: of the first side, which begin the prompts: one, or as many as on the second."""
        self._head, self._first_texts = head, first_texts

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        return await response_of(self._pieces(answers, totals.tokens))

    def _pieces(self, answers: Sequence[WholeAnswer], tokens: TokenCounts) -> Iterator[bytes]:
        yield orjson.dumps(self._head)[:-1] + b',"data":['
        one = vector_of(answers[0])
        for index, answer in enumerate(answers[self._first_texts :]):
            if index and self._first_texts > 1:
                one = vector_of(answers[index])
            score = {"index": index, "object": "score", "score": _similarity(one, vector_of(answer))}
            yield (b"," if index else b"") + orjson.dumps(score)
        yield b'],"usage":%b}' % orjson.dumps(prompt_usage(tokens))


class RankingWriter(OpenAiStream, AnswerWriter):
    """Writes the entries of `results`, best first. The first prompt is the query."""

    def __init__(self, head: dict[str, Any], top_n: int, documents: Sequence[object] | None) -> None:
        """`documents`: the texts to return; None: none."""
        self._head, self._top_n, self._documents = head, top_n, documents

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        query = vector_of(answers[0])
        scores = [_similarity(query, vector_of(answer)) async for answer in in_turns(answers[1:])]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._top_n]
        return await response_of(self._pieces(best, scores, totals.tokens))

    def _pieces(self, best: Sequence[int], scores: Sequence[float], tokens: TokenCounts) -> Iterator[bytes]:
        yield orjson.dumps(self._head)[:-1] + b',"results":['
        for place, index in enumerate(best):
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if self._documents is not None:
                result["document"] = {"text": self._documents[index]}
            yield (b"," if place else b"") + orjson.dumps(result)
        # Cohere's clients read `meta`, Jina's `usage`.
        meta = {"tokens": {"input_tokens": tokens.prompt, "output_tokens": 0}}
        yield b'],"meta":%b,"usage":%b}' % (orjson.dumps(meta), orjson.dumps(prompt_usage(tokens)))
