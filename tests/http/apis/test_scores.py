"""Tests of POST /v1/score and /v1/rerank: pairs of texts, and the shapes of vLLM, Jina and Cohere."""

from typing import Any

import numpy as np
import pytest

from tests.http.fake_engine import BOS, embedding_of
from tests.http.serving import Answer, OneOff


async def asked(path: str, **fields: Any) -> Answer:
    return await OneOff().post(path, fields)


def cosine(one: str, other: str) -> float:
    a, b = (np.frombuffer(embedding_of([BOS, *text.encode()]), np.float32) for text in (one, other))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_have_the_shape_of_vllm(path: str) -> None:
    answer = (await asked(path, model="a", text_1="ab", text_2=["ab", "c"])).json
    assert answer.pop("id").startswith("score-")
    assert answer.pop("created") > 1_700_000_000
    scores = [one.pop("score") for one in answer["data"]]
    assert answer == {
        "object": "list",
        "model": "a",
        "data": [{"index": 0, "object": "score"}, {"index": 1, "object": "score"}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 0, "total_tokens": 8},
    }
    assert scores == pytest.approx([1.0, cosine("ab", "c")], abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "c"], [("a", "b"), ("a", "c")]),
        (["a"], ["b", {"text": "c"}], [("a", "b"), ("a", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
    ],
)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
async def test_texts_are_paired(names: tuple[str, str], first: Any, second: Any, pairs: list[tuple[str, str]]) -> None:
    answer = (await asked("/v1/score", **dict(zip(names, (first, second), strict=True)))).json
    expected = [cosine(one, other) for one, other in pairs]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_rankings_have_the_shape_of_jina_and_cohere(path: str) -> None:
    answer = (await asked(path, model="a", query="ab", documents=["zz", "ab", {"text": "b"}])).json
    assert answer.pop("id").startswith("rerank-")
    scores = [one.pop("relevance_score") for one in answer["results"]]
    texts = [one["document"]["text"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([cosine("ab", text) for text in texts], abs=1e-6)
    assert answer["results"][0] == {"index": 1, "document": {"text": "ab"}}
    assert answer["usage"] == {"prompt_tokens": 11, "completion_tokens": 0, "total_tokens": 11}
    assert answer["meta"] == {"tokens": {"input_tokens": 11, "output_tokens": 0}}
    assert answer.keys() == {"model", "results", "meta", "usage"}


@pytest.mark.parametrize(("top_n", "count"), [(0, 3), (2, 2), (9, 3)])
async def test_the_best_documents_alone(top_n: int, count: int) -> None:
    fields = {"query": "c", "documents": ["a", "b", "c"], "return_documents": False}
    every = (await asked("/rerank", **fields)).json["results"]
    assert (await asked("/rerank", **fields, top_n=top_n)).json["results"] == every[:count]
    assert every[0] == {"index": 2, "relevance_score": pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "queries": "b", "documents": "c"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": [3]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": {"image": "x"}}, "text_2"),
        ("/score", {"data_1": "a", "data_2": "b"}, "data_1"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"text": "a", "image": "b"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 2}, "max_chunks_per_doc"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2048}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b", "x" * 5000]}, "documents"),
    ],
)
async def test_mistakes_name_the_field(path: str, fields: dict[str, Any], param: str) -> None:
    answer = await asked(path, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
