"""Fields of the prompt and its scores: truncation, suffix, prompt_logprobs, tokens by their ids, vectors as tokens."""

import base64
import pickle
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from caraserve.core.request import GenerateRequest, TokenDelta, TokenLogprob
from caraserve.http.body.fields import MAX_TOKENIZED
from tests.http.fake_engine import BOS, EMBEDDING_SIZE, FakeEngine, FakeTokenizer, finish
from tests.http.serving import Answer, Client, OneOff, serving

KINDS = ["complete", "chat"]
CHAT_PROMPT = b"user:hello;assistant:"


async def ask(client: Client, kind: str, **fields: Any) -> Answer:
    answer: Answer = await getattr(client, kind)(**fields)
    return answer


async def prompt_of(kind: str, *, context: int = 1000, **fields: Any) -> list[int]:
    """Returns the token ids that the engine gets."""
    fake = FakeEngine(max_model_len=context)
    async with serving(fake) as client:
        answer = await ask(client, kind, **fields)
    assert answer.status == 200, answer.body
    return list(fake.requests[0].prompt_ids)


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"truncate_prompt_tokens": 2}, b"ef"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, b"ef"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [BOS, *b"ab"]),
        ({"truncate_prompt_tokens": 7}, [BOS, *b"abcdef"]),
        ({"truncate_prompt_tokens": 2, "prompt": [9, 8, 7]}, [8, 7]),
        ({"truncation_side": "left"}, [BOS, *b"abcdef"]),
    ],
)
async def test_a_long_prompt_keeps_its_last_tokens_or_its_first(fields: dict[str, Any], ids: Any) -> None:
    assert await prompt_of("complete", **{"prompt": "abcdef"} | fields) == list(ids)


async def test_a_conversation_keeps_its_last_tokens() -> None:
    assert await prompt_of("chat", truncate_prompt_tokens=5) == list(CHAT_PROMPT[-5:])


@pytest.mark.parametrize("kind", KINDS)
async def test_minus_one_keeps_what_the_context_has_room_for_beside_the_answer(kind: str) -> None:
    long = {"prompt": "x" * 90} if kind == "complete" else {"messages": [{"role": "user", "content": "x" * 90}]}
    assert len(await prompt_of(kind, context=50, truncate_prompt_tokens=-1, max_tokens=20, **long)) == 30
    assert len(await prompt_of(kind, context=50, truncate_prompt_tokens=-1, **long)) == 34


async def test_token_ids_beyond_the_context_are_cut_and_those_left_are_checked() -> None:
    assert await prompt_of("complete", context=50, prompt=[7] * 500, truncate_prompt_tokens=3) == [7] * 3
    answer = await OneOff().complete(prompt=[7, 7, 999], truncate_prompt_tokens=2)
    assert (answer.status, answer.error["param"]) == (400, "prompt")


async def test_the_echo_of_a_cut_prompt_is_what_is_left_of_it() -> None:
    answer = await OneOff().complete(prompt="abcdef", truncate_prompt_tokens=2, echo=True)
    assert answer.json["choices"][0]["text"] == "efHi!"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1001}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_truncation_that_cannot_be_is_refused(kind: str, fields: dict[str, Any], param: str) -> None:
    async with serving(FakeEngine()) as client:
        answer = await ask(client, kind, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_prompt_too_long_to_be_cut_is_refused_by_the_true_limit() -> None:
    answer = await OneOff().complete(prompt="x" * (MAX_TOKENIZED + 1), truncate_prompt_tokens=2)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert f"more than {MAX_TOKENIZED} tokens" in answer.error["message"]


async def test_a_suffix_is_written_with_the_tokens_of_the_model() -> None:
    assert await prompt_of("complete", prompt="ab", suffix="cd") == [BOS, *b"<P>ab<S>cd<M>"]
    assert await prompt_of("complete", prompt="ab", suffix="") == [BOS, *b"ab"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "echo"), ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"), ({"prompt": [1]}, "prompt")],
)
async def test_what_contradicts_a_suffix_is_refused(fields: dict[str, Any], param: str) -> None:
    answer = await OneOff().complete(suffix="x", **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_model_without_such_tokens_refuses_a_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "infill_format", None)
    answer = await OneOff().complete(suffix="x")
    assert (answer.status, answer.error["param"]) == (400, "suffix")


def entry(token_id: int, rank: int, text: str, logprob: float = -0.5) -> dict[str, Any]:
    return {str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text}}


async def test_prompt_logprobs_of_a_completion_are_in_each_choice() -> None:
    choices = (await OneOff().complete(prompt="ab", n=2, prompt_logprobs=2)).json["choices"]
    expected = [None, entry(97, 1, "a") | entry(98, 2, "b", -1.5), entry(98, 1, "b") | entry(99, 2, "c", -1.5)]
    assert [choice["prompt_logprobs"] for choice in choices] == [expected] * 2
    assert [choice["logprobs"] for choice in choices] == [None] * 2


async def test_prompt_logprobs_of_a_chat_are_in_the_response_once() -> None:
    response = (await OneOff(fake := FakeEngine()).chat(n=2, prompt_logprobs=0, logprobs=True)).json
    scores = response["prompt_logprobs"]
    assert scores[0] is None
    assert scores[1:] == [entry(token_id, 1, chr(token_id)) for token_id in CHAT_PROMPT]
    assert ["prompt_logprobs" in choice for choice in response["choices"]] == [False] * 2
    assert response["choices"][0]["logprobs"]["content"][0]["token"] == "H"
    assert [request.params.prompt_logprobs for request in fake.requests] == [0, None]


async def test_the_rank_of_a_token_is_the_one_among_all_tokens() -> None:
    def script(request: GenerateRequest) -> list[TokenDelta]:
        scores = [TokenLogprob(token_id, -7.0, (65, 66), (-0.5, -1.5), rank=40) for token_id in request.prompt_ids[1:]]
        return [TokenDelta("", (), prompt_logprobs=(None, *scores), finish=finish(request, 0))]

    choice = (await OneOff(FakeEngine(script=script)).complete(prompt="x", prompt_logprobs=2)).json["choices"][0]
    expected = entry(120, 40, "x", -7.0) | entry(65, 1, "A") | entry(66, 2, "B", -1.5)
    assert choice["prompt_logprobs"] == [None, expected]


async def test_a_prompt_of_one_token_has_one_null() -> None:
    choice = (await OneOff().complete(prompt=[65], prompt_logprobs=1)).json["choices"][0]
    assert choice["prompt_logprobs"] == [None]


async def test_echoed_logprobs_and_prompt_logprobs_have_each_their_alternatives() -> None:
    choice = (await OneOff().complete(prompt="ab", echo=True, logprobs=1, prompt_logprobs=2, max_tokens=1)).json
    choice = choice["choices"][0]
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "H"]
    assert [best and len(best) for best in choice["logprobs"]["top_logprobs"]] == [None, 1, 1, 1]
    assert [best and len(best) for best in choice["prompt_logprobs"]] == [None, 2, 2]


async def test_logprobs_of_the_answer_do_not_begin_with_those_of_the_prompt() -> None:
    choice = (await OneOff().complete(prompt="ab", logprobs=0, prompt_logprobs=0, max_tokens=1)).json["choices"][0]
    assert choice["logprobs"]["tokens"] == ["H"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": 101}])
async def test_prompt_logprobs_that_cannot_be_are_refused(kind: str, fields: dict[str, Any], client: Client) -> None:
    answer = await ask(client, kind, **fields)
    assert (answer.status, answer.error["param"]) == (400, "prompt_logprobs")


async def test_tokens_are_named_by_their_ids(client: Client) -> None:
    named = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    completion = (await client.complete(prompt="ab", echo=True, logprobs=2, **named)).json["choices"][0]
    chat = (await client.chat(logprobs=True, top_logprobs=2, **named)).json["choices"][0]
    assert completion["logprobs"]["tokens"] == ["token_id:256", "token_id:97", "token_id:98", "token_id:72"]
    assert completion["logprobs"]["top_logprobs"][-1] == {"token_id:72": -0.5, "token_id:73": -1.5}
    assert completion["logprobs"]["text_offset"] == [0, 3, 4, 5]
    assert chat["logprobs"]["content"][0]["token"] == "token_id:72"
    assert chat["logprobs"]["content"][0]["bytes"] == [72]
    assert [top["token"] for top in chat["logprobs"]["content"][0]["top_logprobs"]] == ["token_id:72", "token_id:73"]


# --- prompt_embeds: safetensors in base64, alone or between token ids ---


VECTORS = np.arange(12, dtype=np.float32).reshape(3, EMBEDDING_SIZE)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_of(values: np.ndarray[Any, Any] = VECTORS) -> str:
    return encoded(save({"embeds": values}))


async def test_a_file_is_a_whole_prompt() -> None:
    answer = await OneOff(fake := FakeEngine()).complete(prompt=None, prompt_embeds=file_of())
    (request,) = fake.requests
    assert (answer.status, answer.json["usage"]["prompt_tokens"]) == (200, 3)
    assert request.prompt_ids == (-1, -2, -3)
    assert request.prompt_embeds is not None
    np.testing.assert_array_equal(request.prompt_embeds.values, VECTORS)


async def test_several_files_are_several_prompts() -> None:
    answer = await OneOff(fake := FakeEngine()).complete(prompt="", prompt_embeds=[file_of(), file_of(VECTORS[:1])])
    assert [len(request.prompt_ids) for request in fake.requests] == [3, 1]
    assert len(answer.json["choices"]) == 2


@pytest.mark.parametrize("many", [False, True], ids=["one", "list"])
async def test_files_stand_between_token_ids(many: bool) -> None:
    prompt = [7, {"prompt_embeds": file_of()}, 8, 9, {"prompt_embeds": file_of(VECTORS[1:2])}]
    fake = FakeEngine()
    await OneOff(fake).complete(prompt=[prompt] if many else prompt)
    (request,) = fake.requests
    assert request.prompt_ids == (7, -1, -2, -3, 8, 9, -4)
    assert request.prompt_embeds is not None
    np.testing.assert_array_equal(request.prompt_embeds.values, np.concatenate([VECTORS, VECTORS[1:2]]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_half_precision_is_converted_exactly(dtype: str) -> None:
    if dtype == "float16":
        data = save({"embeds": VECTORS.astype(np.float16)})
    else:
        bits = (VECTORS.view(np.uint32) >> 16).astype(np.uint16)  # small integers are exact
        data = _bfloat16(bits)
    fake = FakeEngine()
    await OneOff(fake).complete(prompt=None, prompt_embeds=encoded(data))
    assert fake.requests[0].prompt_embeds is not None
    np.testing.assert_array_equal(fake.requests[0].prompt_embeds.values, VECTORS)


def _bfloat16(bits: np.ndarray[Any, Any]) -> bytes:
    header = b'{"embeds":{"dtype":"BF16","shape":[3,4],"data_offsets":[0,24]}}'
    return len(header).to_bytes(8, "little") + header + bits.tobytes()


INFINITE = np.full((1, EMBEDDING_SIZE), np.inf, np.float32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "base64": ({"prompt_embeds": "?"}, "not valid base64"),
    "pickle": ({"prompt_embeds": encoded(pickle.dumps([1.0]))}, "not a valid safetensors file"),
    "empty": ({"prompt_embeds": file_of(VECTORS[:0])}, "shape [0, 4]"),
    "width": ({"prompt_embeds": file_of(np.zeros((2, 5), np.float32))}, "shape [2, 5]"),
    "dtype": ({"prompt_embeds": file_of(VECTORS.astype(np.float64))}, "F64"),
    "two": ({"prompt_embeds": encoded(save({"a": VECTORS, "b": VECTORS}))}, "2 tensors"),
    "infinite": ({"prompt_embeds": file_of(INFINITE)}, "infinite"),
    "number": ({"prompt_embeds": 3}, "base64"),
    "both": ({"prompt": "x", "prompt_embeds": file_of()}, "whole prompts"),
    "object": ({"prompt": [1, {"other": 2}]}, "token ids and"),
    "id": ({"prompt": [-1, {"prompt_embeds": file_of()}]}, "token id"),
    "echo": ({"prompt_embeds": file_of(), "echo": True}, "echo"),
    "long": ({"prompt": [1] * 999 + [{"prompt_embeds": file_of()}]}, "maximum context length"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_anything_else_is_refused_with_the_reason(case: str) -> None:
    body, reason = REFUSED[case]
    answer = await OneOff(fake := FakeEngine()).complete(**({"prompt": None} | body))
    assert (answer.status, fake.requests) == (400, [])
    assert reason in answer.error["message"]
