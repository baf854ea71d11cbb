"""The server around the API: access, probes, request ids, start and stop, the page."""

import asyncio
import re
import socket
from contextlib import AsyncExitStack

import pytest

from caraserve.errors import BackendFailed, ConfigError
from caraserve.http.app import make_app, start_http
from caraserve.http.context import HttpTimings
from caraserve.telemetry.background import BackgroundTasks
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client, OneOff, http_config, new_metrics, serving


async def test_an_instance_whose_background_tasks_keep_failing_is_not_ready_and_says_which() -> None:
    third = asyncio.Event()
    failures = 0

    async def fail() -> None:
        nonlocal failures
        failures += 1
        raise ZeroDivisionError

    async def pause(pause_s: float) -> None:
        if failures == 3:
            third.set()
            await asyncio.Event().wait()

    tasks = BackgroundTasks(sleep=pause)
    async with AsyncExitStack() as stack, serving(FakeEngine(), background=tasks) as client:
        assert (await client.get("/ready")).status == 200
        tasks.run(stack, fail, "cluster planner")
        await third.wait()
        answer = await client.get("/ready")
        assert (answer.status, answer.error["code"]) == (503, "not_ready")
        assert "cluster planner" in answer.error["message"]
        assert (await client.get("/health")).status == 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80", "app.localhost", "10.0.0.7"]
)
async def test_requests_to_addresses_and_localhost_are_accepted(host: str) -> None:
    assert (await OneOff().complete(headers={"Host": host})).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:8000"},
        {"Host": "["},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
    ids=str,
)
async def test_web_pages_of_other_origins_cannot_use_a_local_server_without_keys(headers: dict[str, str]) -> None:
    answer = await OneOff(fake := FakeEngine()).complete(headers=headers)
    assert (answer.status, answer.error["type"]) == (403, "permission_error")
    assert not fake.streams


@pytest.mark.parametrize(
    ("origin", "host", "is_allowed"),
    [
        ("http://vm:8000", "vm:8000", True),
        ("http://vm:8000", "VM:8000", True),
        ("http://vm", "vm:80", True),
        ("https://chat.example", "chat.example", True),
        ("*", "vm:8000", True),
        ("http://vm:8000", "vm:8001", False),
        ("http://vm:8000", "evil.example:8000", False),
        ("https://chat.example", "chat.example:8000", False),
        ("https://chat.example", "chat.example:x", False),
    ],
)
async def test_a_local_server_without_keys_has_the_names_of_its_allowed_origins(
    origin: str, host: str, is_allowed: bool
) -> None:
    assert (await OneOff(allowed_origins=(origin,)).complete(headers={"Host": host})).status == (
        200 if is_allowed else 403
    )


async def test_the_refusal_of_a_name_says_which_option_allows_it() -> None:
    message = (await OneOff().complete(headers={"Host": "vm:8000"})).error["message"]
    (origin,) = re.findall(r"--allowed-origins (\S+)", message)
    assert (await OneOff(allowed_origins=(origin,)).complete(headers={"Host": "vm:8000"})).status == 200


async def test_local_web_pages_may_use_a_local_server() -> None:
    assert (await OneOff().complete(headers={"Origin": "http://localhost:3000"})).status == 200


async def test_any_host_is_accepted_with_a_key() -> None:
    async with serving(FakeEngine(), api_key=("k",)) as client:
        headers = {"Host": "llm.example", "Authorization": "Bearer k"}
        assert (await client.complete(headers=headers)).status == 200


async def test_request_id_comes_back(client: Client) -> None:
    assert (await client.complete(headers={"X-Request-Id": "abc-1"})).headers["X-Request-Id"] == "abc-1"
    assert (await client.complete(prompt=3, headers={"X-Request-Id": "abc-2"})).headers["X-Request-Id"] == "abc-2"


@pytest.mark.parametrize("given", ["a b", "x" * 129, "<script>", "é"])
async def test_an_unsafe_request_id_is_replaced(given: str) -> None:
    sent_back = (await OneOff().get("/health", headers={"X-Request-Id": given})).headers["X-Request-Id"]
    assert len(sent_back) == 32


async def test_version() -> None:
    assert (await OneOff().get("/version")).json["version"]


async def test_a_draining_server_is_alive_but_not_ready() -> None:
    """Kubernetes kills an instance that is not alive, and routes no requests to one that is not ready."""
    async with serving(FakeEngine(draining=True)) as client:
        statuses = {path: (await client.get(path)).status for path in ("/health", "/ping", "/ready", "/metrics")}
        assert statuses == {"/health": 200, "/ping": 200, "/ready": 503, "/metrics": 200}
        assert (await client.get("/ready")).headers["Retry-After"] == "1"


async def test_a_server_whose_device_has_failed_is_neither_alive_nor_ready() -> None:
    """Only a restart can repair it."""
    async with serving(FakeEngine(failure="CUDA_ERROR_ILLEGAL_ADDRESS")) as client:
        for path, status, code in (("/health", 500, "backend_failed"), ("/ready", 503, "not_ready")):
            answer = await client.get(path)
            assert (answer.status, answer.error["code"]) == (status, code)
            assert "CUDA_ERROR_ILLEGAL_ADDRESS" in answer.error["message"]


async def test_requests_that_run_at_the_stop_are_answered_and_new_connections_refused() -> None:
    fake = FakeEngine(script=None)
    app = make_app(fake, http_config(), new_metrics(), allow_lora_updates=False)
    runner, port = await start_http(app, http_config())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}')
    (stream,) = await fake.submitted()
    stopping = asyncio.create_task(runner.cleanup())
    refused = False
    while not refused:
        try:
            (await asyncio.open_connection("127.0.0.1", port))[1].close()
        except ConnectionError:
            refused = True
        await asyncio.sleep(0)
    stream.end()
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    await stopping


async def test_handlers_that_outlast_the_stop_are_cancelled() -> None:
    fake, config, timings = FakeEngine(script=None), http_config(), HttpTimings(stop_s=0.05)
    app = make_app(fake, config, new_metrics(), allow_lora_updates=False, timings=timings)
    runner, port = await start_http(app, config)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 14\r\n\r\n{"prompt":"a"}')
    (stream,) = await fake.submitted()
    await runner.cleanup()
    await stream.cancelled.wait()
    writer.close()


async def test_a_port_in_use_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = http_config(port=other.getsockname()[1])
        with pytest.raises(ConfigError, match=r"another process does; choose another --port"):
            await start_http(make_app(FakeEngine(), config, new_metrics(), allow_lora_updates=False), config)


async def test_a_host_of_another_machine_is_a_config_error() -> None:
    config = http_config(host="203.0.113.1")
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1.*--host"):
        await start_http(make_app(FakeEngine(), config, new_metrics(), allow_lora_updates=False), config)


async def test_metrics_count_responses_by_route_not_by_url(client: Client) -> None:
    await client.get("/v1/models/a")
    await client.get("/v1/models/absent")
    await client.get("/secret-1")
    answer = await client.get("/metrics")
    text = answer.body.decode()
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert (
        'caraserve:http_responses_total{route="/v1/models/{model}",status="404",model_name="org/base",engine="0"} 1\n'
        in text
    )
    assert 'route="unknown",status="404",model_name="org/base",engine="0"} 1\n' in text
    assert "secret-1" not in text


# --- web pages of other origins, which the operator may allow ---


CHAT, EVIL = "https://chat.example", "https://evil.example"
ASK = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/models/a"])
async def test_a_preflight_is_answered_without_a_key(path: str) -> None:
    answer = await OneOff(api_key=("k",), allowed_origins=(CHAT,)).request(
        "OPTIONS", path, headers=ASK | {"Origin": CHAT}
    )
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["Access-Control-Allow-Origin"] == CHAT
    assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST"
    assert answer.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
    assert "Origin" in answer.headers["Vary"]


@pytest.mark.parametrize("origins", [(), (CHAT,)])
async def test_other_origins_are_allowed_nothing(origins: tuple[str, ...]) -> None:
    async with serving(FakeEngine(), api_key=("k",), allowed_origins=origins) as client:
        asked = await client.request("OPTIONS", "/v1/models", headers=ASK | {"Origin": EVIL})
        got = await client.get("/v1/models", headers={"Origin": EVIL, "Authorization": "Bearer k"})
    assert (asked.status, got.status) == (401, 200)
    assert not [name for answer in (asked, got) for name in answer.headers if name.lower().startswith("access-")]


async def test_answers_streams_and_errors_may_be_read_by_the_page() -> None:
    fake = FakeEngine(refusals={2: BackendFailed("boom")})
    async with serving(fake, api_key=("k",), allowed_origins=(CHAT,)) as client:
        headers = {"Origin": CHAT, "Authorization": "Bearer k"}
        answers = [
            await client.complete(headers=headers),
            await client.complete(headers=headers, stream=True),
            await client.complete(headers=headers),
            await client.complete(headers=headers, temperature=-1),
            await client.get("/v1/models", headers={"Origin": CHAT}),
        ]
    assert [answer.status for answer in answers] == [200, 200, 500, 400, 401]
    for answer in answers:
        assert answer.headers["Access-Control-Allow-Origin"] == CHAT
        assert "Origin" in answer.headers["Vary"]
        assert "x-request-id" in answer.headers["Access-Control-Expose-Headers"]


async def test_a_star_allows_all_pages() -> None:
    async with serving(FakeEngine(), api_key=("k",), allowed_origins=("*",)) as client:
        for origin in (CHAT, EVIL, "null"):
            answer = await client.request("OPTIONS", "/v1/models", headers=ASK | {"Origin": origin})
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (204, "*")


async def test_an_allowed_page_may_use_a_local_server_without_keys_and_others_still_may_not() -> None:
    async with serving(FakeEngine(), allowed_origins=(CHAT,)) as client:
        assert (await client.complete(headers={"Origin": CHAT})).status == 200
        assert (await client.complete(headers={"Origin": EVIL})).status == 403


async def test_options_without_a_preflight_header_is_method_not_allowed() -> None:
    assert (
        await OneOff(allowed_origins=(CHAT,)).request("OPTIONS", "/v1/models", headers={"Origin": CHAT})
    ).status == 405
