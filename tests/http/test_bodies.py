"""Tests that request bodies stay within memory limits, each alone and all together."""

import asyncio
import gzip

import pytest

from caraserve.http import context as budget
from caraserve.http import responses
from caraserve.http.context import HttpTimings
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client, OneOff, exchange, serving
from tests.http.test_transport import HEAD, parsed

BODY = b'{"prompt":"' + b"a" * 900 + b'"}'


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_LEAST_BODY_BYTES", 10_000)
    monkeypatch.setattr(budget, "_UNCOUNTED_BYTES", 1000)


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "identity, gzip"])
async def test_compressed_bodies_are_refused(encoding: str, caplog: pytest.LogCaptureFixture, client: Client) -> None:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    answer = await client.request("POST", "/v1/completions", data=gzip.compress(BODY), headers=headers)
    assert (answer.status, answer.error["type"]) == (415, "invalid_request_error")
    assert "Content-Encoding" in answer.error["message"]
    assert not caplog.records


async def test_identity_is_no_compression(client: Client) -> None:
    headers = {"Content-Encoding": "identity", "Content-Type": "application/json"}
    assert (await client.request("POST", "/v1/completions", data=BODY, headers=headers)).status == 200


async def unfinished(client: Client, num_bytes: int, *, chunked: bool) -> asyncio.StreamWriter:
    """Sends a part of a body, but not its end."""
    _, writer = await asyncio.open_connection("127.0.0.1", client.port)
    if chunked:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (num_bytes, b"a" * num_bytes))
    else:
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%b" % (num_bytes + 1, b"a" * num_bytes))
    return writer


@pytest.mark.parametrize("chunked", [False, True])
async def test_all_bodies_together_are_bounded_and_small_ones_are_always_taken(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = asyncio.Event()
    real = budget.BodyBudget.reserve

    def reserve(self: budget.BodyBudget, *args: object) -> None:
        real(self, *args)  # type: ignore[arg-type]
        if self.held_bytes >= 9_000:
            held.set()

    monkeypatch.setattr(budget.BodyBudget, "reserve", reserve)
    async with serving(FakeEngine(), max_body_bytes=2_500) as client:
        writers = [await unfinished(client, 2_500 - 1, chunked=chunked) for _ in range(6)]
        writers.append(await unfinished(client, 2_000, chunked=chunked))
        await asyncio.wait_for(held.wait(), 20.0)
        large = await client.complete(prompt="a" * 2_000)
        assert (large.status, large.error["code"], large.headers["Retry-After"]) == (503, "server_busy", "1")
        assert (await client.complete(prompt="a" * 900)).status == 200
        for writer in writers:
            writer.close()


async def test_the_memory_of_a_body_is_released_when_its_request_ends() -> None:
    fake, timings = FakeEngine(max_model_len=10_000), HttpTimings(body_s=0.05, linger_s=0.05)
    async with serving(fake, timings=timings, max_body_bytes=6_000) as client:
        for _ in range(4):
            assert (await client.complete(prompt="a" * 5_000)).status == 200
            assert (await client.complete(prompt="a" * 5_000, temperature=-1)).status == 400
            late = HEAD + b"Content-Length: 5000\r\nConnection: close\r\n\r\n" + b"a" * 4_000
            assert parsed(await exchange(client.port, late)).status == 408


async def test_a_lack_of_memory_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lacking(body: bytes, most_numbers: int) -> None:
        raise MemoryError

    monkeypatch.setattr(responses, "parse_object", lacking)
    answer = await OneOff().complete()
    assert (answer.status, answer.error["code"]) == (503, "server_busy")


async def test_the_parsers_lack_of_memory_is_not_reported_as_bad_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(body: bytes) -> None:
        raise ValueError("Not enough memory to allocate buffer for parsing: line 1 column 1 (char 0)")

    monkeypatch.setattr("caraserve.http.body.json_reader.orjson.loads", lacking)
    assert (await OneOff().complete()).status == 503
