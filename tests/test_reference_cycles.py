"""Requests leave nothing for the garbage collector: while it is off, no object of a request that has ended is left."""

import asyncio
import gc
import io
import json
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from aiohttp import web

from caraserve import demo
from caraserve.core.request import GenerateRequest, TokenDelta
from caraserve.errors import BackendFailed
from caraserve.http.app import make_app, start_http
from caraserve.http.context import HttpTimings
from caraserve.lora.management import AdapterManagement
from caraserve.serve import build_engine
from tests.http.fake_engine import FakeEngine, finish
from tests.http.serving import http_config, new_metrics
from tests.serving import engine_config, lora_config, model_config

REQUESTS = 8  # of each kind
AT_ONCE = 4
COMPLETIONS = "/v1/completions"
DONE, ANSWER = b"[DONE]", b'"usage"'
ERROR = b'"error"'
LATE = b"deadline_exceeded"
DEADLINE = (("x-envoy-expected-rq-timeout-ms", "40"),)
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 700, "ignore_eos": True}


@dataclass(frozen=True)
class Kind:
    """A kind of request. `until`: the last that is read; empty: nothing. `missing_bytes`: of the body, not sent."""

    path: str = COMPLETIONS
    body: Any = None
    until: bytes = ANSWER
    missing_bytes: int = 0
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    is_aborted: bool = False

    def data(self) -> bytes:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        headers = {"Host": "localhost", "Content-Type": "application/json"} | dict(self.headers)
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        head = f"{self.method} {self.path} HTTP/1.1\r\n{''.join(lines)}Content-Length: "
        return head.encode() + b"%d\r\n\r\n" % (len(body) + self.missing_bytes) + body


def short(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 3} | fields


def adapter_tar() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path in (demo.adapters_folder() / "poet").iterdir():
            tar.add(path, path.name)
    return packed.getvalue()


MESSAGES = [{"role": "user", "content": "Hi"}]
ANSWERED = {
    "stream": Kind(body=short(stream=True), until=DONE),
    "stream of 3": Kind(body=short(stream=True, n=3), until=DONE),
    "whole": Kind(body=short()),
    "whole of 3": Kind(body=short(n=3, logprobs=2)),
    "chat": Kind("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stream": True}, DONE),
    "response": Kind("/v1/responses", {"input": "a", "max_output_tokens": 3, "stream": True}, b": end"),
    "message": Kind("/v1/messages", {"messages": MESSAGES, "max_tokens": 3, "stream": True}, b": end"),
    "embedding": Kind("/v1/embeddings", {"input": ["a", "b"]}),
    "probe": Kind("/health", b"", b"200", method="GET"),
}
ENDED_EARLY = {
    "cancelled": Kind(body=LONG, until=b"", is_aborted=True),
    "cancelled stream": Kind(body=LONG | {"stream": True}, until=b"data:", is_aborted=True),
    "cancelled stream of 3": Kind(body=LONG | {"stream": True, "n": 3}, until=b"data:", is_aborted=True),
    "timed out": Kind(body=LONG, until=LATE, headers=DEADLINE),
    "timed out stream": Kind(body=LONG | {"stream": True}, until=LATE, headers=DEADLINE),
    "timed out stream of 3": Kind(body=LONG | {"stream": True, "n": 3}, until=LATE, headers=DEADLINE),
    "bad": Kind(body={"prompt": 3}, until=ERROR),
    "unknown model": Kind(body=short(model="unknown"), until=ERROR),
}
HALF = {"body": b"{", "missing_bytes": 1000, "until": ERROR}
REFUSED = {
    "left in its body": Kind(**HALF | {"until": b""}),
    "unknown URL": Kind("/nothing", **HALF),
    "wrong encoding": Kind(headers=(("Content-Encoding", "gzip"),), **HALF),
    "wrong header": Kind(headers=(("x-envoy-expected-rq-timeout-ms", "x"),), **HALF),
    "too large": Kind(**HALF | {"missing_bytes": 1 << 30}),
    "late body": Kind(**HALF),
    "half an upload": Kind("/v1/adapters/new", method="PUT", **HALF | {"body": b"not an adapter"}),
}
UPLOADS = (
    Kind("/v1/adapters/new", adapter_tar(), b'"digest"', method="PUT"),
    Kind("/v1/adapters/new", b"", b'"deleted"', method="DELETE"),
)
WITHOUT_KEY = {"no key": Kind(body=short(), until=ERROR), "no key, half a body": Kind(**HALF)}
FAILED = {
    "failed": Kind(body=short(), until=ERROR),
    "failed of 3": Kind(body=short(n=3), until=ERROR),
    "failed stream": Kind(body=short(stream=True), until=DONE),
    "failed stream of 3": Kind(body=short(stream=True, n=3), until=DONE),
}


@dataclass
class Running:
    """A server in this process. `last`: a request after which the engine refers to none before it."""

    runner: web.AppRunner
    port: int
    last: Kind
    tasks: int  # while nothing is under way

    async def talk(self, kind: Kind) -> None:
        """Sends one request over a connection of its own, reads what the kind says, and closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(kind.data())
        received = b""
        while kind.until not in received:
            received += (piece := await reader.read(1 << 16))
            assert piece, received
        if not kind.until:
            await asyncio.sleep(0.005)  # the server is about its work
        if kind.is_aborted:
            writer.transport.abort()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def left_by(
        self, kinds: Mapping[str, Sequence[Kind]], forget: Callable[[], None] = lambda: None
    ) -> dict[str, dict[str, int]]:
        """Sends requests of each kind, some several times. Returns the objects left, by type; `forget`: by the test."""
        for kind in chain(*kinds.values()):  # what the first request leaves for all later ones
            await self.talk(kind)
        left = {}
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for name, row in kinds.items():
                left[name] = await self._left_by(row, forget)
                gc.collect()
        finally:
            gc.enable()
        return {name: objects for name, objects in left.items() if objects}

    async def _left_by(self, row: Sequence[Kind], forget: Callable[[], None]) -> dict[str, int]:
        at_once = AT_ONCE if len(row) == 1 else 1
        for _ in range(REQUESTS // at_once):
            for kind in row:
                await asyncio.gather(*(self.talk(kind) for _ in range(at_once)))
        await self.talk(self.last)
        assert self.runner.server is not None
        async with asyncio.timeout(20):
            while self.runner.server.connections or len(asyncio.all_tasks()) > self.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        forget()
        left = Counter(_name(one) for one in gc.get_objects() if _is_of_requests(one))
        return {name: count for name, count in left.items() if count >= REQUESTS // 2}  # fewer: of the last ones


def _name(one: object) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _is_of_requests(one: object) -> bool:
    module = type(one).__module__
    if module == "caraserve.engine.batch_timeline":  # of the last iterations
        return False
    return module.partition(".")[0] in ("caraserve", "aiohttp") or isinstance(one, BaseException)


@asynccontextmanager
async def listening(
    engine: Any, last: Kind, management: AdapterManagement | None = None, **settings: Any
) -> AsyncIterator[Running]:
    config, timings = http_config(log_requests=False, **settings), HttpTimings(body_s=0.05, linger_s=0.05)
    app = make_app(engine, config, new_metrics(), allow_lora_updates=True, timings=timings, management=management)
    runner, port = await start_http(app, config)
    try:
        yield Running(runner, port, last, len(asyncio.all_tasks()))
    finally:
        await runner.cleanup()


async def test_requests_leave_no_objects_in_cycles(tmp_path: Path) -> None:
    lora = lora_config({"pirate": demo.adapters_folder() / "pirate"}, adapters_dir=tmp_path)
    async with AsyncExitStack() as stack:
        served = await build_engine(stack, model_config(demo.model_folder()), lora, engine_config())
        async with listening(served.engine, ANSWERED["whole"], served.management) as server:
            kinds = {name: [kind] for name, kind in (ANSWERED | ENDED_EARLY | REFUSED).items()}
            assert not await server.left_by(kinds | {"upload": UPLOADS})
        async with listening(served.engine, WITHOUT_KEY["no key"], api_key=("secret",)) as server:
            assert not await server.left_by({name: [kind] for name, kind in WITHOUT_KEY.items()})


async def test_failed_requests_leave_no_objects_in_cycles() -> None:
    def fail(request: GenerateRequest) -> list[TokenDelta]:
        failed = finish(request, 1, "error", error=BackendFailed("device lost"))
        return [TokenDelta("x", (1,)), TokenDelta("", (), finish=failed)]

    fake = FakeEngine(script=fail)
    async with listening(fake, FAILED["failed"]) as server:
        assert not await server.left_by({name: [kind] for name, kind in FAILED.items()}, fake.streams.clear)
