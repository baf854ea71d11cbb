"""Reading vectors in place of prompt tokens: safetensors in base64, alone or between token ids."""

import base64
import pickle
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from tests.http.fake_engine import EMBEDDING_SIZE, FakeEngine
from tests.http.serving import OneOff

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
