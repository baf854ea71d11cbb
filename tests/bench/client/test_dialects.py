"""Tests of parsing the streams of three kinds of server, however they are cut into pieces."""

import base64
import json
from itertools import pairwise

import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from caraserve.bench.client.connection import HttpExchange
from caraserve.bench.client.dialects import (
    Dialect,
    LlamaCpp,
    LoadSettings,
    OpenAIChat,
    OpenAICompletions,
    PromptEmbeds,
    decode,
)
from caraserve.bench.records import PlannedRequest

OPENAI = (
    b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n'  # a token without text of its own
    b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
    b": phases queued=0.5;load=3\n\n"
    b"data: [DONE]\n\n"
)
ASKED = PlannedRequest(index=3, at_s=0.0, adapter=0, prompt_tokens=5, output_tokens=9), "poet", LoadSettings(seed=0)


def answered(*pieces: tuple[float, bytes], status: int = 200) -> HttpExchange:
    exchange = HttpExchange(b"", lambda _: None)
    exchange.status, exchange.pieces = status, list(pieces)
    return exchange


@given(st.lists(st.integers(0, len(OPENAI)), max_size=8))
def test_pieces_may_be_cut_anywhere(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(OPENAI)]
    pieces = [(float(end), OPENAI[start:end]) for start, end in pairwise(ends)]
    answer = decode(OpenAICompletions("base"), answered(*pieces))
    assert len(answer.token_s) == 2
    assert (answer.prompt_tokens, answer.output_tokens, answer.error) == (5, 2, None)
    assert dict(answer.phases) == {"queued": 0.5, "load": 3.0}
    first_whole = OPENAI.index(b"\n") + 1
    assert answer.token_s[0] == min(end for end in ends if end >= first_whole)


def test_tokens_without_text_count_by_their_ids() -> None:
    stream = b'data: {"choices":[{"text":"","token_ids":[0],"finish_reason":"length"}]}\n\n'
    assert decode(OpenAICompletions("base"), answered((1.0, stream))).token_s == (1.0,)


def test_every_token_id_in_an_event_counts() -> None:
    stream = b'data: {"choices":[{"text":"abc","token_ids":[5,6,7],"finish_reason":null}],"error":null}\n\n'
    answer = decode(OpenAICompletions("base"), answered((1.0, stream)))
    assert (answer.token_s, answer.error) == ((1.0, 1.0, 1.0), None)


def test_chat_counts_content_and_not_its_role() -> None:
    stream = b"".join(
        b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}).encode() + b"\r\n\r\n"
        for delta in ({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"})
    )
    answer = decode(OpenAIChat("base"), answered((1.0, stream)))
    assert (len(answer.token_s), answer.output_tokens, answer.prompt_tokens) == (2, 2, None)


def test_llama_cpp_counts_its_own_tokens() -> None:
    stream = (
        b'data: {"content":"a","stop":false}\n\ndata: {"content":"b","stop":false}\n\n'
        b'data: {"content":"","stop":true,"tokens_predicted":3,"tokens_evaluated":5}\n\n'
    )
    answer = decode(LlamaCpp({"poet": 1}), answered((1.0, stream)))
    assert (len(answer.token_s), answer.output_tokens, answer.prompt_tokens) == (2, 3, 5)


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b'{"error":{"message":"no such model"}}', 404, "HTTP 404: no such model"),
        (b'{"detail":"slow down"}', 429, "HTTP 429: slow down"),
        (b"<html>bad gateway</html>", 502, "HTTP 502: <html>bad gateway</html>"),
        (b"", 500, "HTTP 500: an empty answer"),
        (b'data: {"error":{"message":"out of memory"}}\n\n', 200, "out of memory"),
        (b"data: {nonsense\n\n", 200, "not JSON: data: {nonsense"),
        (b"data: [DONE]\n\n", 200, "the answer has no tokens"),
        (b"data: 5\n\n", 200, "not an event: data: 5"),
        (b'data: {"choices":[null]}\n\n', 200, 'not an event: data: {"choices":[null]}'),
    ],
)
def test_invalid_answers_are_errors(body: bytes, status: int, error: str) -> None:
    assert decode(OpenAICompletions("base"), answered((1.0, body), status=status)).error == error


@pytest.mark.parametrize(
    "dialect", [OpenAICompletions("base"), PromptEmbeds("base", hidden=8), OpenAIChat("base"), LlamaCpp({"poet": 7})]
)
def test_requests_name_the_adapter_and_the_length(dialect: Dialect) -> None:
    body = dialect.body(*ASKED)
    assert body["stream"] is True
    assert body["ignore_eos"] is True
    assert body.get("max_tokens", body.get("n_predict")) == 9
    assert body.get("model", body.get("lora")) in ("poet", [{"id": 7, "scale": 1.0}])


def test_prompts_have_the_requested_number_of_tokens() -> None:
    assert len(OpenAICompletions("base").body(*ASKED)["prompt"]) == 5
    assert len(OpenAIChat("base").body(*ASKED)["messages"][0]["content"].split()) == 5


def test_without_ignore_eos_nothing_but_openais_own_fields_is_sent() -> None:
    body = OpenAICompletions("base").body(ASKED[0], None, LoadSettings(seed=0, ignore_eos=False))
    assert set(body) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert body["model"] == "base"


def test_prompts_of_vectors_are_one_tensor_and_ask_for_no_ids() -> None:
    body = PromptEmbeds("base", hidden=8).body(*ASKED)
    (vectors,) = safetensors.numpy.load(base64.b64decode(body["prompt_embeds"])).values()
    assert vectors.shape == (5, 8)
    assert "prompt" not in body
    assert "return_token_ids" not in body
