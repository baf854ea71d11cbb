"""Mistakes in requests are answered in OpenAI's shape, and never reach the engine."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from caraserve.http.context import HttpTimings
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client, OneOff, exchange, serving, wrong

NOT_JSON_OBJECTS = {
    "not JSON": b"hello",
    "empty": b"",
    "an array": b'["prompt"]',
    "a number": b"3",
    "invalid UTF-8": b'{"prompt":"\xff\xfe"}',
    "nested arrays": b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "nested objects": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "nested below orjson's limit": b'{"prompt":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "NaN": b'{"prompt":"a","temperature":NaN}',
    "Infinity": b'{"prompt":"a","temperature":Infinity}',
    "a number too large for a double": b'{"prompt":"a","temperature":1e999}',
    "a lone surrogate": b'{"prompt":"\\ud800"}',
    "a key twice": b'{"prompt":"a","prompt":"b"}',
    "a key twice inside": b'{"prompt":"a","logit_bias":{"1":1,"1":2}}',
    "trailing bytes": b'{"prompt":"a"}{"prompt":"b"}',
}


@pytest.mark.parametrize("body", NOT_JSON_OBJECTS.values(), ids=NOT_JSON_OBJECTS.keys())
async def test_body_must_be_one_json_object(body: bytes, client: Client, fake: FakeEngine) -> None:
    answer = await client.post("/v1/completions", body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert len(answer.error["message"]) < 300
    assert (await client.complete()).status == 200
    assert len(fake.streams) == 1


# Beside the bounds of each field, which test_openapi.py checks.
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    *wrong("prompt", None, [], 7, {"text": "x"}, ["a", 3], [[]], [["a"]]),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"prompt": ["x"] * 2049}, "prompt"),
    ({"model": 3}, "model"),
    *wrong("temperature", "hot", True),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 1, "best_of": 2}, "best_of"),
    *wrong("max_tokens", 10**12, 0),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    *wrong("stop", ["x"] * 10_000, ["x"] * 17, ["x", 1], "", "x" * 2000),
    *wrong("stop_token_ids", [258], 3),
    ({"seed": 1.5}, "seed"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": 1}, "echo"),
    *wrong("logit_bias", [1], {"258": 1}, {"-1": 1}, {"٣": 1}, {"x": 1}, {"1": 101}, {"1": None}),
    *wrong("logit_bias", {str(key): 1 for key in range(301)}),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"user": 3}, "user"),
    ({"cache_salt": []}, "cache_salt"),
    *wrong("priority", 1.5, True),
    *wrong("response_format", {"type": "yaml"}, {"schema": {}}, {"type": "json_schema"}),
    *wrong("response_format", {"type": "json_schema", "json_schema": {"schema": 3}}),
    *wrong("response_format", {"type": "structural_tag", "structures": []}, "json"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "whitespace_pattern"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"guided_json": 3}, "guided_json"),
    ({"guided_regex": ["a*"]}, "guided_regex"),
    *wrong("guided_choice", "yes", ["yes", ""]),
    ({"regex": "a", "grammar": 'root ::= "a"'}, "regex"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"structural_tag": "{"}, "structural_tag"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"input_embeds": "x"}, "input_embeds"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=str)
async def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    answer = await OneOff(fake := FakeEngine()).complete(**fields)
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", param)
    assert param.split("_")[0] in answer.error["message"]
    assert len(answer.error["message"]) < 300
    assert not fake.streams


@pytest.mark.parametrize("bad", [258, -1, 1.0, True, None, "a", 10**30])
async def test_bad_token_ids_are_named_by_position(bad: object, client: Client) -> None:
    flat = await client.complete(prompt=[1, 2, bad])
    nested = await client.complete(prompt=[[1], [2, bad]])
    assert (flat.status, nested.status) == (400, 400)
    assert "prompt[2]" in flat.error["message"]
    assert "prompt[1][1]" in nested.error["message"]


@pytest.mark.parametrize(
    "neutral",
    [
        {"suffix": None},
        {"suffix": ""},
        {"response_format": {"type": "text"}},
        {"use_beam_search": False},
        {"best_of": 1},
        {"stop": []},
        {"logit_bias": {}},
        {"max_tokens": None},
        {"stream_options": None},
    ],
)
async def test_fields_that_ask_for_nothing_are_accepted(neutral: dict[str, Any]) -> None:
    assert (await OneOff().complete(**neutral)).status == 200


async def test_body_over_the_limit() -> None:
    async with serving(FakeEngine(), max_body_bytes=1000) as client:
        answer = await client.complete(prompt="x" * 2000)
        assert (answer.status, answer.error["type"]) == (413, "invalid_request_error")
        assert (await client.complete()).status == 200


async def endless() -> AsyncIterator[bytes]:
    for _ in range(100_000):
        yield b"x" * 1000


async def test_body_of_unknown_length_over_the_limit() -> None:
    answer = await OneOff(max_body_bytes=10_000).request(
        "POST", "/v1/completions", data=endless(), headers={"Content-Type": "application/json"}
    )
    assert answer.status == 413


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_other_content_types(content_type: str) -> None:
    answer = await OneOff().post("/v1/completions", b'{"prompt":"a"}', headers={"Content-Type": content_type})
    assert answer.status == 415
    assert "application/json" in answer.error["message"]


async def test_a_body_with_a_too_large_content_length_is_refused_at_once() -> None:
    async with serving(FakeEngine(), timings=HttpTimings(body_s=60, linger_s=0.01)) as client:
        answer = await exchange(
            client.port, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n{"
        )
    assert answer.startswith(b"HTTP/1.1 413")


async def test_missing_content_type_is_json(client: Client) -> None:
    answer = await exchange(
        client.port,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 14\r\n\r\n"
        b'{"prompt":"a"}',
    )
    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_body_that_does_not_arrive_is_a_408() -> None:
    async with serving(FakeEngine(), timings=HttpTimings(body_s=0.05, linger_s=0.05)) as client:
        answer = await exchange(
            client.port, b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"pro'
        )
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"type":"invalid_request_error"' in answer


async def test_headers_that_do_not_arrive_end_the_connection() -> None:
    async with serving(FakeEngine(), timings=HttpTimings(keepalive_s=0.5)) as client:
        assert await exchange(client.port, b"POST /v1/completions HTTP/1.1\r\nHost: loc") == b""


async def test_header_block_over_the_limit(client: Client) -> None:
    answer = await client.get("/health", headers={f"X-{index}": "x" * 6000 for index in range(3)})
    assert answer.status == 431
    assert answer.error["type"] == "invalid_request_error"


async def test_unknown_url_and_wrong_method(client: Client) -> None:
    unknown = await client.get("/v1/nothing")
    wrong = await client.get("/v1/completions")
    assert (unknown.status, unknown.error["code"]) == (404, "unknown_url")
    assert (wrong.status, wrong.error["type"], wrong.headers["Allow"]) == (405, "invalid_request_error", "POST")
