"""Tests of parsing responses of HTTP and the streams of three kinds of server, however they are cut into pieces."""

import base64
import json
from itertools import pairwise

import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from caraserve.bench.client.connection import HttpExchange, ResponseParser
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


def test_every_token_id_in_an_event_counts_also_without_text() -> None:
    stream = (
        b'data: {"choices":[{"text":"","token_ids":[0],"finish_reason":null}]}\n\n'
        b'data: {"choices":[{"text":"abc","token_ids":[5,6,7],"finish_reason":"length"}],"error":null}\n\n'
    )
    answer = decode(OpenAICompletions("base"), answered((1.0, stream)))
    assert (answer.token_s, answer.error) == ((1.0,) * 4, None)


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


def test_a_request_on_llama_cpps_base_model_names_every_adapter_with_a_scale_of_zero() -> None:
    """An empty list would apply all of them."""
    request, _, settings = ASKED
    assert LlamaCpp({"poet": 7, "chef": 8}).body(request, None, settings)["lora"] == [
        {"id": 7, "scale": 0.0},
        {"id": 8, "scale": 0.0},
    ]
    assert LlamaCpp({}).body(request, None, settings)["lora"] == []


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


# --- responses of HTTP ---

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Phases: a=1\r\n\r\n"
    b"6;ext=1\r\ndata: \r\n0b\r\n{\r\n\r\n1\r\n\n}\n\r\n0\r\nTrailer: x\r\n\r\n"
)
COUNTED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Too Many\r\nContent-Length: 5\r\nConnection: close\r\n\r\nagain"


def parsed(response: bytes, cuts: list[int]) -> tuple[ResponseParser, bytes]:
    parser, body = ResponseParser(), b""
    ends = [0, *sorted(min(cut, len(response)) for cut in cuts), len(response)]
    for start, end in pairwise(ends):
        assert not parser.is_complete or start == end
        body += parser.feed(response[start:end])
    return parser, body


@given(st.lists(st.integers(0, len(CHUNKED)), max_size=8))
def test_chunks_may_be_cut_anywhere(cuts: list[int]) -> None:
    parser, body = parsed(CHUNKED, cuts)
    assert (parser.status, parser.headers["x-phases"], body) == (200, "a=1", b"data: {\r\n\r\n1\r\n\n}\n")
    assert (parser.is_complete, parser.is_last) == (True, False)


@given(st.lists(st.integers(0, len(COUNTED)), max_size=8))
def test_a_counted_body_may_be_cut_anywhere_and_1xx_is_passed_over(cuts: list[int]) -> None:
    parser, body = parsed(COUNTED, cuts)
    assert (parser.status, body, parser.is_complete, parser.is_last) == (429, b"again", True, True)


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    parser, body = parsed(b"HTTP/1.0 200 OK\r\n\r\nall of it", [])
    assert (body, parser.is_complete, parser.is_last, parser.close()) == (b"all of it", False, True, True)


@pytest.mark.parametrize("cut", [5, 30, len(CHUNKED) - 1])
def test_a_response_that_is_cut_off_is_not_complete(cut: int) -> None:
    parser, _ = parsed(CHUNKED[:cut], [])
    assert not parser.close()


def test_a_response_without_a_body_is_complete_with_its_head() -> None:
    for head in (b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"):
        assert parsed(head, [])[0].is_complete


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH",
        b"HTTP/2",
        b"HTTP/1.1 fine\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nsix\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
    ],
)
def test_what_is_not_http_is_refused(response: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(b.|invalid literal)"):
        parsed(response, [])
