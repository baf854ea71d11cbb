"""Tests of POST /v1/embeddings: the engine requests that its fields give, and OpenAI's shape of the response; and of
/v1/score and /v1/rerank: pairs of texts, and the shapes of vLLM, Jina and Cohere."""

import base64
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.core.request import GenerateRequest, SamplingParams, TokenDelta
from caraserve.core.tenant import Tenant
from caraserve.errors import NonFiniteLogits
from tests.http.fake_engine import BOS, EMBEDDING_SIZE, FakeEngine, embedding_of, finish
from tests.http.fleet import fleet
from tests.http.serving import Answer, OneOff, wrong


async def asked(**fields: Any) -> Answer:
    """Returns the answer of a new server, which must be a good one."""
    answer = await OneOff().embed(**fields)
    assert answer.status == 200, answer.body
    return answer


async def submitted(**fields: Any) -> list[GenerateRequest]:
    answer = await OneOff(fake := FakeEngine()).embed(**fields)
    assert answer.status == 200, answer.body
    return fake.requests


def unit(ids: list[int], dimensions: int = EMBEDDING_SIZE) -> NDArray[np.float64]:
    """Returns the first numbers of the fake engine's embedding, scaled to length 1."""
    vector = np.frombuffer(embedding_of(ids), np.float32)[:dimensions].astype(np.float64)
    return vector / np.linalg.norm(vector)


async def test_answer_has_openai_shape() -> None:
    answer = (await asked(model="a", input=["ab", "c"])).json
    assert answer.pop("id").startswith("embd-")
    assert answer.pop("created") > 1_700_000_000
    data = answer.pop("data")
    assert answer == {
        "object": "list",
        "model": "a",
        "usage": {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5},
    }
    assert [(one["object"], one["index"]) for one in data] == [("embedding", 0), ("embedding", 1)]
    for one, ids in zip(data, ([BOS, 97, 98], [BOS, 99]), strict=True):
        np.testing.assert_allclose(one["embedding"], unit(ids), rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("ab", [(BOS, 97, 98)]),
        (["a", "b"], [(BOS, 97), (BOS, 98)]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
async def test_input_forms(given: object, expected: list[tuple[int, ...]]) -> None:
    requests = await submitted(input=given)
    assert [request.prompt_ids for request in requests] == expected
    assert all(request.embeds and request.params == SamplingParams(max_tokens=0) for request in requests)


async def test_an_embedding_belongs_to_its_adapter_and_its_tenant() -> None:
    (request,) = await submitted(model="a", user="u", cache_salt="s", priority=3)
    assert (request.adapter, request.cache_salt, request.priority) == ("a", "s", 3)
    assert request.tenant == Tenant("127.0.0.1", "u")


async def test_base64_has_the_same_numbers() -> None:
    plain, encoded = [(await asked(encoding_format=form)).json["data"][0]["embedding"] for form in ("float", "base64")]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == pytest.approx(plain, abs=1e-7)


async def test_fewer_dimensions_are_scaled_to_length_1_again() -> None:
    (one,) = (await asked(input=[3, 4, 12, 5], dimensions=2)).json["data"]
    np.testing.assert_allclose(one["embedding"], [0.6, 0.8], rtol=1e-6)


async def test_the_hidden_state_may_be_asked_for_as_it_is() -> None:
    (one,) = (await asked(input=[3, 4, 12, 5], normalize=False)).json["data"]
    assert one["embedding"] == [3.0, 4.0, 12.0, 5.0]


async def test_an_embedding_of_zeros_stays_zero() -> None:
    (one,) = (await asked(input=[0])).json["data"]
    assert one["embedding"] == [0.0] * EMBEDDING_SIZE


@pytest.mark.parametrize(("kept", "expected"), [(2, (98, 99)), (-1, (BOS, 97, 98, 99)), (900, (BOS, 97, 98, 99))])
async def test_the_last_tokens_are_kept(kept: int, expected: tuple[int, ...]) -> None:
    (request,) = await submitted(input="abc", truncate_prompt_tokens=kept)
    assert request.prompt_ids == expected
    (request,) = await submitted(input=list(expected), truncate_prompt_tokens=kept)
    assert request.prompt_ids == expected


async def test_a_text_longer_than_the_context_is_cut_only_if_asked_for() -> None:
    long = "x" * 5000
    for given in (long, [5] * 5000, ["a", long]):
        answer = await OneOff().embed(input=given)
        assert (answer.status, answer.error["param"]) == (400, "input")
        assert answer.error["code"] == "context_length_exceeded"
    (request,) = await submitted(input=long, truncate_prompt_tokens=-1)
    assert request.prompt_ids == (120,) * 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *wrong("input", None, [], ["a", 3], [[1], [-1]]),
        ({"input": "", "add_special_tokens": False}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": EMBEDDING_SIZE + 1}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        *wrong("truncate_prompt_tokens", 0, 1001),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"use_activation": False}, "use_activation"),
        ({"input_type": "query"}, "input_type"),
        ({"model": "c"}, "model"),
    ],
)
async def test_mistakes_name_the_field(fields: dict[str, Any], param: str) -> None:
    answer = await OneOff(fake := FakeEngine()).embed(**fields)
    assert answer.status in (400, 404), answer.body
    assert answer.error["param"] == param
    assert fake.requests == []


async def test_all_texts_together_are_bounded() -> None:
    answer = await OneOff(FakeEngine(max_model_len=10_000)).embed(input=["x" * 2000] * 300)
    assert answer.status == 400
    assert "524288 tokens" in answer.error["message"]


async def test_embeddings_together_are_bounded() -> None:
    answer = await OneOff(FakeEngine(embedding_size=1 << 20)).embed(input=["x"] * 9)
    assert (answer.status, answer.error["param"]) == (400, "input")
    assert "9 texts are over 8" in answer.error["message"]


async def test_one_failed_prompt_fails_the_answer() -> None:
    def second_fails(request: GenerateRequest) -> list[TokenDelta]:
        if request.request_id.endswith("-1"):
            return [TokenDelta("", (), finish=finish(request, 0, "error", error=NonFiniteLogits("a")))]
        return [TokenDelta("", (), finish=finish(request, 0), embedding=embedding_of(request.prompt_ids))]

    answer = await OneOff(FakeEngine(script=second_fails)).embed(model="a", input=["x", "y"])
    assert (answer.status, answer.error["code"]) == (422, "non_finite_logits")


async def test_any_instance_accepts_texts_to_embed() -> None:
    async with fleet("a", "b") as running:
        for path, fields in (
            ("/v1/embeddings", {"input": ["x", "y"], "model": "b"}),
            ("/score", {"text_1": "x", "text_2": "y"}),
            ("/v2/rerank", {"query": "x", "documents": ["x", "y"]}),
        ):
            one, other = [await running[name].client.post(path, fields) for name in "ab"]
            assert one.status == other.status == 200, other.body
            left, right = (
                {name: value for name, value in answer.json.items() if name not in ("id", "created")}
                for answer in (one, other)
            )
            assert left == right
            assert "x-caraserve-ignored" not in other.headers
        assert not running["b"].engine.requests


async def test_embeddings_do_not_shorten_the_answers_that_routing_expects() -> None:
    async with fleet("a") as running:
        selector = running["a"].router.selector
        before = selector.arrival("a", 5, 1000)
        assert (await running["a"].client.embed(model="a")).status == 200
        assert selector.arrival("a", 5, 1000) == before
        assert (await running["a"].client.complete(model="a")).status == 200
        assert selector.arrival("a", 5, 1000) != before


# --- scores ---


async def scored(path: str, **fields: Any) -> Answer:
    return await OneOff().post(path, fields)


def cosine(one: str, other: str) -> float:
    a, b = (np.frombuffer(embedding_of([BOS, *text.encode()]), np.float32) for text in (one, other))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_have_the_shape_of_vllm(path: str) -> None:
    answer = (await scored(path, model="a", text_1="ab", text_2=["ab", "c"])).json
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
    answer = (await scored("/v1/score", **dict(zip(names, (first, second), strict=True)))).json
    expected = [cosine(one, other) for one, other in pairs]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_rankings_have_the_shape_of_jina_and_cohere(path: str) -> None:
    answer = (await scored(path, model="a", query="ab", documents=["zz", "ab", {"text": "b"}])).json
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
    every = (await scored("/rerank", **fields)).json["results"]
    assert (await scored("/rerank", **fields, top_n=top_n)).json["results"] == every[:count]
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
async def test_mistakes_in_scores_name_the_field(path: str, fields: dict[str, Any], param: str) -> None:
    answer = await scored(path, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
