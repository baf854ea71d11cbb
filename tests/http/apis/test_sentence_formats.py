"""Embeddings of models whose folder says how: pooling, length and prompts before texts."""

from typing import Any

import numpy as np
import pytest

from caraserve.core.request import GenerateRequest
from caraserve.model.sentence_format import SentenceFormat
from tests.http.fake_engine import BOS, FakeEngine, FakeTokenizer, embedding_of
from tests.http.serving import Answer, OneOff

PROMPTS = {"query": "Q:", "document": ""}


def embedder(sentences: SentenceFormat) -> FakeTokenizer:
    """A tokenizer of a model that embeds in that way."""
    made = FakeTokenizer()
    made.sentences = sentences
    return made


async def asked(sentences: SentenceFormat, path: str = "/v1/embeddings", **fields: Any) -> tuple[Answer, FakeEngine]:
    fake = FakeEngine(tokenizer=embedder(sentences))
    body = {"input": "ab"} if path == "/v1/embeddings" else {}
    return await OneOff(fake).post(path, body | fields), fake


async def submitted(sentences: SentenceFormat, path: str = "/v1/embeddings", **fields: Any) -> list[GenerateRequest]:
    answer, fake = await asked(sentences, path, **fields)
    assert answer.status == 200, answer.body
    return fake.requests


async def test_the_mean_is_asked_of_the_engine_and_the_first_token_needs_no_later_one() -> None:
    (mean,) = await submitted(SentenceFormat("mean"))
    assert (mean.prompt_ids, mean.embeds, mean.averages) == ((BOS, 97, 98), True, True)
    (first,) = await submitted(SentenceFormat("first"))
    assert (first.prompt_ids, first.embeds, first.averages) == ((BOS,), True, False)


@pytest.mark.parametrize(
    ("fields", "is_scaled"), [({}, False), ({"normalize": True}, True), ({"normalize": False}, False)]
)
async def test_vectors_are_scaled_as_the_folder_says_unless_the_request_does(
    fields: dict[str, Any], is_scaled: bool
) -> None:
    answer, _ = await asked(SentenceFormat(normalizes=False), **fields)
    vector = np.frombuffer(embedding_of([BOS, 97, 98]), np.float32)
    length = np.linalg.norm(vector) if is_scaled else 1.0
    assert answer.json["data"][0]["embedding"] == pytest.approx(vector / length, rel=1e-6)


@pytest.mark.parametrize(
    ("default", "fields", "text"),
    [
        ("", {}, "ab"),
        ("", {"prompt_name": "query"}, "Q:ab"),
        ("Q:", {}, "Q:ab"),
        ("Q:", {"prompt_name": "document"}, "ab"),
    ],
)
async def test_a_prompt_is_put_before_texts_by_its_name(default: str, fields: dict[str, Any], text: str) -> None:
    (request,) = await submitted(SentenceFormat(prompts=PROMPTS, default_prompt=default), **fields)
    assert request.prompt_ids == (BOS, *text.encode())


async def test_token_ids_and_both_sides_of_scores() -> None:
    sentences = SentenceFormat(prompts=PROMPTS, default_prompt="Q:")
    (request,) = await submitted(sentences, input=[1, 2])
    assert request.prompt_ids == (1, 2)
    one, other = await submitted(sentences, "/v1/score", text_1="a", text_2="b", prompt_name="query")
    assert (one.prompt_ids, other.prompt_ids) == ((BOS, *b"Q:a"), (BOS, *b"Q:b"))


@pytest.mark.parametrize(
    ("prompts", "message"), [(PROMPTS, "the model has 'query', 'document'"), ({}, "the model has no prompts")]
)
async def test_a_prompt_that_there_is_not_is_refused(prompts: dict[str, str], message: str) -> None:
    answer, _ = await asked(SentenceFormat(prompts=prompts), prompt_name="passage")
    assert (answer.status, answer.error["param"]) == (400, "prompt_name")
    assert message in answer.error["message"]
