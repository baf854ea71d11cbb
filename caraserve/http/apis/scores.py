"""POST /v1/score and /v1/rerank: how similar texts are, as the cosine of the angle between their embeddings.

With an adapter whose score head has one class, two texts are read as one, and the score is the class's probability.
Scores have vLLM's shape; rankings have that of Jina and Cohere, the best document first.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from caraserve.core.request import GenerateRequest
from caraserve.errors import InvalidRequest
from caraserve.http.access.adapter_choice import AdapterFinder
from caraserve.http.api_request import AnswerWriter, ApiRequest, ResponseTotals, TokenCounts
from caraserve.http.apis.choices import OpenAiStream
from caraserve.http.apis.classify import class_scores
from caraserve.http.apis.completions import response_head
from caraserve.http.apis.embeddings import (
    EmbeddedTexts,
    NamedPrompt,
    check_count,
    list_pieces,
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

Scores = Callable[[Sequence[WholeAnswer]], Iterable[float]]
"""Makes scores of the answers to engine requests. Raises AdapterBusy."""

_PAIRED_FIELDS = (("text_1", "text_2"), ("queries", "documents"))


async def parse_score(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    check_fields(fields, SCORE)
    first, second = _paired_texts(fields, engine)
    texts = EmbeddedTexts.read(fields, engine, find, client)
    response_id = f"score-{secrets.token_hex(16)}"
    requests, scores = await _scored(texts, engine, response_id, first, second)
    writer = ScoresWriter(response_head(response_id, "list", texts.model), scores)
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
    texts = EmbeddedTexts.read(fields, engine, find, client)
    response_id = f"rerank-{secrets.token_hex(16)}"
    requests, scores = await _scored(texts, engine, response_id, [NamedPrompt("query", "", query)], documents)
    shown_documents = [document.content for document in documents] if return_documents else None
    writer = RankingWriter({"id": response_id, "model": texts.model}, scores, top_n, shown_documents)
    return ApiRequest(requests, 1, stream=False, writer=writer)


async def _scored(
    texts: EmbeddedTexts,
    engine: Engine,
    response_id: str,
    first: Sequence[NamedPrompt],
    second: Sequence[NamedPrompt],
) -> tuple[tuple[GenerateRequest, ...], Scores]:
    """Returns the engine requests of two sides, one text or as many on the first, and what makes scores of their
    answers. Raises InvalidRequest or ContextLengthExceeded."""
    if not texts.adapter.num_classes:
        return await texts.requests(engine, response_id, [*first, *second]), partial(_similarities, len(first))
    if texts.adapter.num_classes > 1:
        raise InvalidRequest(
            f"The score head of {texts.adapter.name} has {texts.adapter.num_classes} classes; a score is that of one. "
            "Send the texts to /v1/classify.",
            param="model",
        )
    if texts.prompt is not None:
        raise InvalidRequest(
            "prompt_name cannot be applied: the two texts are read as one by a score head; leave it out.",
            param="prompt_name",
        )
    pairs = [
        NamedPrompt(other.field, other.place, (str(one.content), str(other.content)))
        for one, other in zip([*first] * len(second) if len(first) == 1 else first, second, strict=True)
    ]
    requests = await texts.requests(engine, response_id, pairs, reads_last=True)
    return requests, lambda answers: (float(class_scores(answer)[0]) for answer in answers)


def _similarities(first_texts: int, answers: Sequence[WholeAnswer]) -> Iterator[float]:
    """Yields the cosine of the angle between the vectors of each pair. `first_texts`: of the first side, which begin
    the prompts: one, or as many as on the second."""
    one = vector_of(answers[0])
    for index, answer in enumerate(answers[first_texts:]):
        if index and first_texts > 1:
            one = vector_of(answers[index])
        yield float(np.dot(one, vector_of(answer)))


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


class ScoresWriter(OpenAiStream, AnswerWriter):
    """Writes the entries of `data`, one for each text of the second side."""

    def __init__(self, head: dict[str, Any], scores: Scores) -> None:
        self._head, self._scores = head, scores

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        scores = [score async for score in in_turns(self._scores(answers))]
        entries = (
            orjson.dumps({"index": index, "object": "score", "score": score}) for index, score in enumerate(scores)
        )
        return await response_of(list_pieces(self._head, entries, totals.tokens))


class RankingWriter(OpenAiStream, AnswerWriter):
    """Writes the entries of `results`, best first."""

    def __init__(self, head: dict[str, Any], scores: Scores, top_n: int, documents: Sequence[object] | None) -> None:
        """`documents`: the texts to return; None: none."""
        self._head, self._scores, self._top_n, self._documents = head, scores, top_n, documents

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        scores = [score async for score in in_turns(self._scores(answers))]
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
