"""Tests of what Responses and Messages share with completions: forwarding, deadlines, and the request's log line."""

import asyncio
import json
from typing import Any

import pytest

from caraserve.core.request import GenerateRequest, TokenDelta
from caraserve.errors import Overloaded
from tests.http.apis.test_tool_calls import engine
from tests.http.fake_engine import DIGEST, FakeEngine, finish
from tests.http.fleet import Fleet, fleet, streams
from tests.http.serving import Answer, OneOff, serving
from tests.http.test_deadlines import HEADERS, HOLDS_S, PassTime
from tests.http.test_request_log import Lines, lines  # noqa: F401
from tests.http.test_streaming import begun, read_event

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "a", "input": "hello"},
    "/v1/messages": {"model": "a", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
}
PATHS = pytest.mark.parametrize("path", ROUTES)
END = b"\n\n: end\n\n"


def last_event(body: bytes) -> Any:
    """Returns the data of the last event of a stream, which must have the comment at its end."""
    assert body.endswith(END)
    (*_, last) = [line for line in body.split(b"\n") if line.startswith(b"data: ")]
    return json.loads(last.removeprefix(b"data: "))


def error_of(path: str, event: Any) -> tuple[str, str]:
    """Returns the type and the message of an error event."""
    assert event["type"] == "error"
    return (event["code"], event["message"]) if path == "/v1/responses" else tuple(event["error"].values())


@PATHS
async def test_another_instance_answers_whole_and_streamed(path: str, lines: Lines) -> None:  # noqa: F811
    async with fleet("a", "b") as running:
        client = running["b"].client
        whole, stream = [await client.post(path, ROUTES[path] | {"stream": wanted}) for wanted in (False, True)]
        assert whole.status == stream.status == 200
        assert whole.headers["x-caraserve-phases"]
        assert stream.body.endswith(END)
        assert (len(running["a"].engine.requests), len(running["b"].engine.requests)) == (2, 0)
    forwarded = [line for line in lines.all if line["path"] == path]
    assert [line["forwarded_to"] for line in forwarded] == ["a", "a"]
    assert [line["completion_tokens"] for line in forwarded] == [3, 3]


async def test_arguments_of_a_call_are_not_taken_for_the_usage(lines: Lines) -> None:  # noqa: F811
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    async with fleet() as running:
        for name in "ab":
            call = '<tool_call>{"name": "f", "arguments": {"completion_tokens":0}}</tool_call>'
            await running.start(name, engine(call, size=len(call)))
        answer = await running["b"].client.post("/v1/messages", ROUTES["/v1/messages"] | {"tools": tools})
        assert answer.json["content"][0]["input"] == {"completion_tokens": 0}
    (line,) = [line for line in lines.all if line["path"] == "/v1/messages"]
    assert (line["forwarded_to"], line["completion_tokens"]) == ("a", answer.json["usage"]["output_tokens"])


@PATHS
async def test_a_refusal_of_another_instance_has_the_shape_of_the_api(path: str, running: Fleet) -> None:
    full = Overloaded("full", retry_after_s=1)
    for name in "ab":
        await running.start(name, FakeEngine(refusals=dict.fromkeys(range(9), full)))
    answer = await running["b"].client.post(path, ROUTES[path])
    assert answer.headers["Retry-After"] == "1"
    if path == "/v1/messages":
        assert (answer.status, answer.json["error"]["type"]) == (529, "overloaded_error")
    else:
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")


@PATHS
async def test_a_stream_whose_instance_dies_ends_with_an_error(path: str) -> None:
    async with fleet("b", raw={"a": streams(b'event: x\ndata: {"type":"x"}\n\n', die=True)}) as running:
        asked = ROUTES[path] | {"model": "org/base", "stream": True}
        body = (await running["b"].client.post(path, asked)).body
    event = last_event(body)
    kind, message = error_of(path, event)
    assert (kind, "has gone" in message) == ("instance_lost" if path == "/v1/responses" else "api_error", True)
    assert event.get("sequence_number", 1) == 1


@PATHS
async def test_a_deadline_before_the_first_byte_is_a_504(path: str, pass_time: PassTime) -> None:
    fake = FakeEngine(script=None)
    async with serving(fake) as client:
        asking = asyncio.create_task(client.post(path, ROUTES[path], headers=HEADERS))
        (stream,) = await fake.submitted()
        pass_time(HOLDS_S)
        answer: Answer = await asking
        assert answer.status == 504
        assert stream.cancelled.is_set()
    error = answer.json["error"]
    assert error["type"] == ("timeout_error" if path == "/v1/messages" else "server_error")


@PATHS
async def test_a_deadline_during_a_stream_ends_it_with_an_error(path: str, pass_time: PassTime) -> None:
    fake = FakeEngine(script=begun)
    body = ROUTES[path] | {"stream": True}
    async with serving(fake) as client, client.session.post(client.url + path, json=body, headers=HEADERS) as response:
        await read_event(response)
        pass_time(HOLDS_S)
        event = last_event(await response.content.read())
        if path == "/v1/messages":
            assert error_of(path, event)[0] == "timeout_error"
        else:
            assert event["response"]["error"]["code"] == "deadline_exceeded"
        assert fake.streams[0].cancelled.is_set()


@PATHS
async def test_a_client_that_leaves_ends_the_work(path: str) -> None:
    fake = FakeEngine(script=begun)
    async with serving(fake) as client:
        async with client.session.post(client.url + path, json=ROUTES[path] | {"stream": True}) as response:
            await read_event(response)
        await fake.streams[0].cancelled.wait()


@PATHS
async def test_the_log_line_and_the_count(path: str, lines: Lines) -> None:  # noqa: F811
    async with serving(FakeEngine()) as client:
        await client.post(path, ROUTES[path])
        metrics = (await client.get("/metrics")).body.decode()
    (line,) = lines.all
    assert (line["path"], line["status"], line["model"]) == (path, 200, f"a@{DIGEST[:12]}")
    assert (line["completion_tokens"], line["finish"]) == (3, "stop")
    assert f'caraserve:http_responses_total{{route="{path}",status="200",' in metrics


@PATHS
async def test_an_answer_without_text_is_one_empty_text(path: str) -> None:
    def silent(request: GenerateRequest) -> list[TokenDelta]:
        return [TokenDelta("", (), finish=finish(request, 0))]

    answer = (await OneOff(FakeEngine(script=silent)).post(path, ROUTES[path])).json
    content = answer["content"] if path == "/v1/messages" else answer["output"][0]["content"]
    assert [part["text"] for part in content] == [""]
