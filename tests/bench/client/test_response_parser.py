"""Tests of the parser of HTTP responses, however they are cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.bench.client.connection import ResponseParser

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
