"""Tests of the log line of each request: its client, its model, its outcome, and no text of prompt or answer."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from msgspec.structs import replace

from caraserve.cluster.membership.swim import MemberState
from caraserve.core.request import TokenDelta
from caraserve.errors import BackendFailed
from caraserve.http.access.api_keys import key_name
from caraserve.http.apis.choices import OpenAiStream
from caraserve.http.client import CLIENT
from caraserve.http.client import Client as Sender
from caraserve.http.context import HttpTimings
from caraserve.http.request_log import SUMMARY, RequestSummary, log_request, note_end
from caraserve.http.streaming import EVENT_STREAM, EventStream
from caraserve.telemetry.log import configure
from tests.http.fake_engine import DIGEST, FakeEngine, spell
from tests.http.fleet import fleet
from tests.http.log_lines import LogLines, logged
from tests.http.managed import serving as managed
from tests.http.serving import Client, OneOff, serving
from tests.http.test_streaming import begun, read_chunk, read_event
from tests.lora.folders import write_adapter
from tests.lora.uploads import tar_of

CHAT = {"messages": [{"role": "user", "content": "hello"}], "stream": True}


Lines = LogLines[dict[str, Any]]  # the details of each


@pytest.fixture
def lines() -> Iterator[Lines]:
    with logged("caraserve.http.requests", lambda record: record.details) as found:  # type: ignore[attr-defined]
        yield found


async def test_a_line_has_client_model_and_phases(lines: Lines) -> None:
    fake = FakeEngine()
    answer = await OneOff(fake).complete(model="a", n=2, metadata={}, headers={"X-Request-Id": "my-id"})
    (line,) = await lines.until(1)
    assert line.pop("total_ms") >= 0
    usage = answer.json["usage"]
    assert line == {
        "id": "my-id",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "model": f"a@{DIGEST[:12]}",
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": 0,
        "completion_tokens": usage["completion_tokens"],
        "finish": "stop",
        "queued_ms": 1.0,
        "load_ms": 2.0,
        "prefill_ms": 3.0,
        "decode_ms": 4.0,
        "ignored": "metadata",
    }


async def test_a_stream_is_logged_when_it_ends(lines: Lines) -> None:
    fake = FakeEngine(script=begun)
    async with serving(fake) as client, client.session.post(client.url + "/v1/chat/completions", json=CHAT) as response:
        await read_chunk(response)
        assert lines.all == []
        fake.streams[0].end(7)
        await response.read()
        (line,) = await lines.until(1)
    assert (line["status"], line["completion_tokens"], line["model"]) == (200, 7, "org/base")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_logged_as_499(lines: Lines, stream: bool) -> None:
    fake = FakeEngine(script=begun)
    async with serving(fake) as client:
        asking = asyncio.create_task(client.chat(stream=stream))
        await fake.submitted()
        asking.cancel()
        (line,) = await lines.until(1)
    assert line["status"] == 499
    assert "finish" not in line


async def test_a_stream_without_done_is_logged_as_499(lines: Lines) -> None:
    request = make_mocked_request("POST", "/v1/completions")
    request[SUMMARY], request[CLIENT] = RequestSummary(), Sender("c")
    request[EVENT_STREAM] = EventStream(request, HttpTimings(), OpenAiStream())
    log_request(request, "my-id", note_end(request, 200))
    (line,) = lines.all
    assert line["status"] == 499


async def test_a_streams_error_is_logged(lines: Lines) -> None:
    fake = FakeEngine(script=begun)
    async with serving(fake) as client, client.session.post(client.url + "/v1/chat/completions", json=CHAT) as response:
        fake.streams[0].end(1, "error")
        await response.read()
        (line,) = await lines.until(1)
    assert (line["status"], line["error"]) == (200, "backend_failed")


async def test_a_deadline_that_cuts_a_stream_is_named(lines: Lines) -> None:
    fake = FakeEngine(script=begun)
    async with serving(fake, timings=HttpTimings(write_s=1)) as client:
        await client.post("/v1/chat/completions", CHAT, headers={"x-envoy-expected-rq-timeout-ms": "30"})
        (line,) = await lines.until(1)
    assert (line["status"], line["error"]) == (200, "deadline_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "x", "adapters": "a"}, (400, "invalid_request_error", "adapters")),
        ("/v1/completions", {"prompt": "x", "model": "absent"}, (404, "model_not_found", "model")),
        ("/v1/completions", {"prompt": [1] * 1000}, (400, "context_length_exceeded", "prompt")),
        ("/v1/nothing", {}, (404, None, None)),
        ("/tokenize", {"prompt": "x"}, (200, None, None)),
        ("/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "/c"}, (200, None, None)),
    ],
)
async def test_every_kind_of_end_is_logged(
    lines: Lines, path: str, body: dict[str, Any], expected: tuple[int, str | None, str | None]
) -> None:
    await OneOff().post(path, body)
    (line,) = await lines.until(1)
    assert line["path"] == path
    assert (line["status"], line.get("error"), line.get("param")) == expected


async def test_changes_of_adapters_and_aliases_are_logged_also_those_that_fail(lines: Lines, tmp_path: Path) -> None:
    labels, wrong = {"json": {"labels": {"n": "1"}}}, {"headers": {"If-Match": f'"{"0" * 64}"'}}
    body = {"data": tar_of(write_adapter(tmp_path / "made"))}
    asked: list[tuple[str, str, dict[str, Any], int, str | None]] = [
        ("PUT", "/v1/adapters/x", {"data": b"x"}, 400, "InvalidUserInput"),
        ("PUT", "/v1/adapters/x", body, 201, None),
        ("PATCH", "/v1/adapters/x", labels, 200, None),
        ("PATCH", "/v1/adapters/x", {**labels, **wrong}, 412, "adapter_version_differs"),
        ("PUT", "/v1/aliases/prod", {"json": {"adapter": "x"}}, 201, None),
        ("DELETE", "/v1/adapters/x", {}, 409, "adapter_aliased"),
        ("DELETE", "/v1/adapters/none", {}, 404, "model_not_found"),
        ("DELETE", "/v1/aliases/prod", {}, 200, None),
    ]
    async with managed(tmp_path / "root") as (client, _):
        for method, path, options, _, _ in asked:
            await client.request(method, path, **options)
        found = await lines.until(len(asked))
    ends = [(line["method"], line["path"], line["status"], line.get("error")) for line in found]
    assert ends == [(method, path, status, error) for method, path, _, status, error in asked]


async def test_pages_and_probes_leave_no_line(lines: Lines, client: Client) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nothing"):
        await client.get(path)
    await client.post("/ping")
    assert lines.all == []


async def test_clients_without_a_key_cannot_fill_the_log_and_those_with_one_are_named_by_it(lines: Lines) -> None:
    async with serving(FakeEngine(), api_key=("right",)) as client:
        for path in ("/v1/completions", "/cluster/v1/completions", "/nothing"):
            await client.post(path, {"prompt": "a"}, headers={"Authorization": "Bearer wrong"})
        await client.complete(headers={"Authorization": "Bearer right"})
    (line,) = await lines.until(1)
    assert (line["status"], line["client"]) == (200, key_name("right"))


async def test_the_lines_can_be_turned_off(lines: Lines) -> None:
    await OneOff(log_requests=False).complete()
    assert lines.all == []


async def test_a_forwarded_request_names_the_instance_that_answers(lines: Lines) -> None:
    async with fleet("a", "b") as running:
        await running["b"].client.complete(model="b", store=True)
        there, here = await lines.until(2)
    assert (here["forwarded_to"], here["completion_tokens"], here["ignored"]) == ("a", 3, "store")
    assert (there["model"], there["id"]) == (f"b@{DIGEST[:12]}", here["id"]) == (here["model"], here["id"])


async def test_a_forwarded_request_has_no_phases_of_an_attempt_on_this_instance(lines: Lines) -> None:
    async with fleet("b") as running:
        a = await running.start("a", FakeEngine(script=None))
        asked = asyncio.create_task(a.client.complete())
        (stream,) = await a.engine.submitted()
        stream.end(0, "error", BackendFailed("the iteration failed"))
        assert (await asked).status == 200
    there, here = await lines.until(2)
    assert (here["forwarded_to"], "queued_ms" in here, "queued_ms" in there) == ("b", False, True)


# --- what is written ---


def written(
    capsys: pytest.CaptureFixture[str], form: str, lines: list[dict[str, Any]], message: str = "request"
) -> list[str]:
    """Returns the text that the server's log has for a line with this message and these details."""
    configure(form, "info")
    try:
        for line in lines:
            logging.getLogger("caraserve.http.requests").info(message, extra={"details": line})
    finally:
        root = logging.getLogger("caraserve")
        root.handlers.clear()
        root.propagate = True
        root.setLevel(logging.NOTSET)
    return capsys.readouterr().err.splitlines()


async def asked_with_evil_names(client: Client) -> None:
    evil = "x\n12:00:00 I request status=200\x1b[2J\x9b2J\u2028"
    await client.complete(model=evil, **{evil: 1})
    await client.complete(prompt="SECRET", user="SECRET", headers={"Authorization": "Bearer SECRET"}, **{evil: 1})
    await client.post(f"/v1/%0A%C2%9B2J{'y' * 5000}", {})


@pytest.mark.parametrize("form", ["human", "json"])
async def test_clients_can_forge_no_line_and_their_prompts_are_not_logged(
    form: str, lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(FakeEngine(script=lambda request: spell(request, "SECRET"))) as client:
        await asked_with_evil_names(client)
    log = written(capsys, form, [*await lines.until(3)])
    assert len(log) == 3
    assert all(line.isprintable() and "SECRET" not in line and len(line) <= 1000 for line in log)
    if form == "json":
        assert [json.loads(line)["status"] for line in log] == [404, 200, 404]
    else:
        assert [line.partition("status=")[2][:3] for line in log] == ["404", "200", "404"]


@pytest.mark.parametrize("form", ["human", "json"])
def test_names_in_messages_are_escaped(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = written(capsys, form, [{}], "adapter ä\r\n\x1b[2J\x9b2J\u2028 loaded")
    assert line.isprintable()
    assert "ä" in line or form == "json"


@pytest.mark.parametrize("is_lost", [False, True], ids=["client leaves", "instance dies"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_a_forwarded_stream_that_is_cut_counts_the_tokens_that_came(
    lines: Lines, path: str, is_lost: bool
) -> None:
    """However many tokens an event has, and however many events a token has."""
    deltas = [TokenDelta("abc", (97, 98, 99)), TokenDelta("", (1, 2)), TokenDelta("last", (100,))]
    prompt: dict[str, Any] = {"prompt": "ab"} if path == "/v1/completions" else CHAT
    body = {"max_tokens": 50, "model": "org/base", "stream": True, **prompt}
    async with fleet("b") as running:
        await running.start("a", FakeEngine(script=lambda request: deltas))
        client, proxy = running["b"].client, running["b"].router.proxy
        async with client.session.post(client.url + path, json=body) as response:
            assert response.status == 200
            while b"last" not in (event := await read_event(response)):
                assert b"tokens_so_far" not in event
            if is_lost:
                proxy.member_changed(replace(running.world.records["a"], state=MemberState.DEAD))
                await response.read()
        while (line := await lines.next())["path"] != path:
            pass
    assert (line["forwarded_to"] if is_lost else "a", line["completion_tokens"]) == ("a", 6)
