"""A real server over a fake engine, on a free port, and a client for it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from caraserve.config import HttpConfig
from caraserve.http.app import make_app, start_http
from caraserve.telemetry.metrics import Metrics
from tests.http.fake_engine import FakeEngine


def http_config(**changes: Any) -> HttpConfig:
    settings = {"port": 0, "max_body_bytes": 1 << 20, "max_connections": 1000, "drain_timeout_s": 1.0}
    return HttpConfig(**settings | changes)


def new_metrics() -> Metrics:
    return Metrics("org/base", max_loras=64, block_tokens=16)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Returns the error, after checking that it has OpenAI's four fields and no others."""
        document = self.json
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = document["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """Returns the data of all events before the final [DONE], which must be there."""
        lines = self.body.decode().split("\n\n")
        assert lines[-1] == ""
        assert lines[-2] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if not line.startswith(":")]


@dataclass(frozen=True)
class Client:
    session: aiohttp.ClientSession
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        if isinstance(body, bytes):
            options = {"data": body, "headers": {"Content-Type": "application/json"}} | options
        elif body is not None:
            options["json"] = body
        return await self.request("POST", path, **options)

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, self.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def complete(self, *, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": "ab"} | fields, headers=headers)

    async def embed(self, **fields: Any) -> Answer:
        return await self.post("/v1/embeddings", {"input": "ab"} | fields)

    async def chat(self, **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]} | fields)


async def exchange(port: int, data: bytes) -> bytes:
    """Sends raw bytes, and returns all that the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()


_OPTIONS = ("timings", "background", "cluster", "management", "tracer")  # of `make_app`


@asynccontextmanager
async def serving(
    engine: FakeEngine, *, allow_lora_updates: bool = True, metrics: Metrics | None = None, **settings: Any
) -> AsyncIterator[Client]:
    """Yields a client of a new server. `settings`: options of `make_app` and fields of HttpConfig."""
    options = {name: settings.pop(name) for name in _OPTIONS if name in settings}
    config = http_config(**settings)
    app = make_app(engine, config, metrics or new_metrics(), allow_lora_updates=allow_lora_updates, **options)
    runner, port = await start_http(app, config)
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(session, port)
    finally:
        await runner.cleanup()


class OneOff:
    """Sends one request by a method of `Client` to a server of its own: `await OneOff().complete()`."""

    def __init__(self, engine: FakeEngine | None = None, **settings: Any) -> None:
        self._engine, self._settings = engine or FakeEngine(), settings

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Answer]]:
        async def send(*args: Any, **options: Any) -> Answer:
            async with serving(self._engine, **self._settings) as client:
                answer: Answer = await getattr(client, method)(*args, **options)
                return answer

        return send


def wrong(field: str, *values: object) -> list[tuple[dict[str, Any], str]]:
    """Returns bodies with each of these values of a field, and the field's name, which the error must give."""
    return [({field: value}, field) for value in values]


def typed_events(answer: Answer) -> list[dict[str, Any]]:
    """Returns the data of all events of a stream that is not OpenAI's chunks; each must have its type as name."""
    assert answer.body.endswith(b"\n\n: end\n\n")
    events = []
    for lines in answer.body.decode().split("\n\n"):
        if not lines.startswith(":") and lines:
            name, data = lines.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events
