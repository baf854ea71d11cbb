"""POST /v1/classify: vLLM's shape, the engine requests, and refusals; and scores by a head of one class."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from caraserve.core.adapter_facts import AdapterFacts
from caraserve.core.request import GenerateRequest, TokenDelta
from caraserve.core.score_head import Activation, ScoreHead
from caraserve.model.dtype import Dtype
from caraserve.model.sentence_format import Pooling, SentenceFormat
from tests.http.apis.test_sentence_formats import embedder
from tests.http.fake_engine import BOS, EOS, FakeAdapter, FakeEngine, embedding_of, finish
from tests.http.serving import Answer, OneOff, wrong

MATRIX = np.array([[0, 0, 0, 0.01], [0, 0, 0.01, 0], [0.5, 0, 0, 0]], np.float32)


def head(classes: int = 3, activation: Activation = "softmax") -> ScoreHead:
    return ScoreHead(("last", "before", "none")[:classes], activation, Dtype.F32, MATRIX[:classes].tobytes())


def engine(given: ScoreHead | None) -> FakeEngine:
    """An engine whose adapter a has a score head; `given`: that of the version that answers."""

    def script(request: GenerateRequest) -> Iterator[TokenDelta]:
        embedding = embedding_of(request.prompt_ids)
        yield TokenDelta("", (), finish=finish(request, 0, head=given), embedding=embedding)

    made = FakeEngine(script=script)
    num_classes = 3 if given is None else len(given.classes)
    made.loaded["a"] = FakeAdapter("a", "/adapters/a", facts=AdapterFacts(num_classes=num_classes))
    return made


async def asked(path: str, given: ScoreHead | None, **fields: Any) -> Answer:
    return await OneOff(engine(given)).post(path, {"model": "a"} | fields)


def logits(ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return MATRIX @ np.frombuffer(embedding_of(ids), np.float32)


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_the_answer_has_the_shape_of_vllm(path: str) -> None:
    answer = (await asked(path, head(), input=["ab", "ba"])).json
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 1_700_000_000
    data = answer.pop("data")
    assert answer == {
        "object": "list",
        "model": "a",
        "usage": {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6},
    }
    expected = [np.exp(logits([BOS, *text.encode()])) for text in ("ab", "ba")]
    for index, (one, label) in enumerate(zip(data, ("last", "before"), strict=True)):
        probs = one.pop("probs")
        assert one == {"index": index, "label": label, "num_classes": 3}
        assert probs == pytest.approx(expected[index] / expected[index].sum(), abs=1e-6)


async def test_without_activation_the_logits_are_returned_and_one_class_has_a_sigmoid() -> None:
    ids = [BOS, *b"ab"]
    plain = (await asked("/v1/classify", head(), input="ab", use_activation=False)).json["data"][0]
    assert plain["probs"] == pytest.approx(logits(ids), abs=1e-6)
    single = (await asked("/v1/classify", head(1, "sigmoid"), input="ab")).json["data"][0]
    assert (single["label"], single["probs"]) == ("last", pytest.approx([1 / (1 + np.exp(-logits(ids)[0]))], abs=1e-6))


async def test_padding_at_the_end_is_not_read() -> None:
    fake = engine(head())
    answer = await OneOff(fake).post("/v1/classify", {"model": "a", "input": [[1, 2, EOS, EOS], [EOS, EOS]]})
    assert answer.status == 200
    assert [request.prompt_ids for request in fake.requests] == [(1, 2), (EOS,)]
    assert all(request.embeds for request in fake.requests)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "b"}, "model"),
        ({"model": "org/base"}, "model"),
        *wrong("input", None, [], 7),
        *wrong("activation", False),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
)
async def test_what_cannot_be_classified_is_refused(fields: dict[str, Any], param: str) -> None:
    answer = await asked("/v1/classify", head(), **({"input": "ab"} | fields))
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "ab"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "ab"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
    ],
)
async def test_an_adapter_with_a_head_generates_nothing(path: str, fields: dict[str, Any]) -> None:
    answer = await asked(path, head(), **fields)
    assert answer.status == 400
    assert "a classifies texts and generates none" in answer.json["error"]["message"]


async def test_an_adapter_that_was_replaced_by_one_without_a_head_answers_busy() -> None:
    for path, fields in (("/v1/classify", {"input": "ab"}), ("/v1/score", {"text_1": "a", "text_2": "b"})):
        made = engine(None)
        made.loaded["a"] = FakeAdapter("a", "/adapters/a", facts=AdapterFacts(num_classes=1))
        answer = await OneOff(made).post(path, {"model": "a", **fields})
        assert (answer.status, answer.error["code"]) == (409, "adapter_busy")


async def test_a_head_of_one_class_scores_two_texts_that_are_read_as_one() -> None:
    fake = engine(head(1, "sigmoid"))
    client = OneOff(fake)
    answer = await client.post("/v1/score", {"model": "a", "text_1": "q", "text_2": ["ab", "z"]})
    prompts = [[BOS, *b"q", EOS, *b"ab"], [BOS, *b"q", EOS, *b"z"]]
    assert [list(request.prompt_ids) for request in fake.requests] == prompts
    expected = [1 / (1 + np.exp(-logits(ids)[0])) for ids in prompts]
    assert [one["score"] for one in answer.json["data"]] == pytest.approx(expected, abs=1e-6)
    ranking = (await client.post("/v1/rerank", {"model": "a", "query": "q", "documents": ["ab", "z"]})).json["results"]
    assert [one["index"] for one in ranking] == [1, 0]
    assert [one["relevance_score"] for one in ranking] == pytest.approx(sorted(expected, reverse=True), abs=1e-6)


async def test_a_head_of_several_classes_makes_no_scores() -> None:
    answer = await asked("/v1/score", head(), text_1="a", text_2="b")
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "/v1/classify" in answer.error["message"]


@pytest.mark.parametrize("pooling", ["mean", "first"])
async def test_a_head_reads_the_last_token_however_the_model_embeds(pooling: Pooling) -> None:
    fake = engine(head())
    fake.tokenizer = embedder(SentenceFormat(pooling))
    assert (await OneOff(fake).post("/v1/classify", {"model": "a", "input": "ab"})).status == 200
    assert [(request.prompt_ids, request.averages) for request in fake.requests] == [((BOS, 97, 98), False)]


async def test_a_head_reads_a_prompt_before_a_text_only_where_a_request_names_it() -> None:
    """The default one is for embeddings; peft trains classifiers without."""
    for fields, text in (({}, "ab"), ({"prompt_name": "query"}, "Q:ab")):
        fake = engine(head())
        fake.tokenizer = embedder(SentenceFormat(prompts={"query": "Q:"}, default_prompt="Q:"))
        await OneOff(fake).post("/v1/classify", {"model": "a", "input": "ab", **fields})
        assert [request.prompt_ids for request in fake.requests] == [(BOS, *text.encode())]
    fake = engine(head(1, "sigmoid"))
    fake.tokenizer = embedder(SentenceFormat(prompts={"query": "Q:"}))
    answer = await OneOff(fake).post("/v1/score", {"model": "a", "text_1": "a", "text_2": "b", "prompt_name": "query"})
    assert (answer.status, answer.error["param"]) == (400, "prompt_name")
