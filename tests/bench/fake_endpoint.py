"""An OpenAI endpoint without a model: it sends tokens at given times, and records when it really sent them.

As a script, it serves on a free port, prints the port, and ends when its standard input closes.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class Fake:
    """An endpoint whose delays are in the model's name: `ttft-50-tpot-10` waits 50 ms, then 10 ms between tokens."""

    log: list[dict[str, object]] = field(default_factory=list)
    models: tuple[str, ...] = ("ttft-50-tpot-10", "refuse", "break", "hang-up")

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/log", self.show_log)
        return app

    async def list_models(self, _request: web.Request) -> web.Response:
        cards = [{"id": "base"}, *({"id": model, "parent": "base"} for model in self.models)]
        return web.json_response({"data": cards})

    async def show_log(self, _request: web.Request) -> web.Response:
        return web.json_response(self.log)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        came_s = time.perf_counter()
        asked = await request.json()
        model = str(asked["model"])
        if model == "refuse":
            return web.json_response({"error": {"message": "not today"}}, status=429)
        ttft_s, tpot_s = delays(model)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        sent_s = []
        for token in range(asked["max_tokens"]):
            await until(came_s + ttft_s + token * tpot_s)
            if model == "break" and token == 2:
                await answer.write(event({"error": {"message": "out of paper"}}))
                return answer
            if model == "hang-up" and token == 2:
                assert request.transport is not None
                request.transport.abort()
                return answer
            await answer.write(event(self.token(request.path, token)))
            sent_s.append(time.perf_counter())
        usage = {"prompt_tokens": 7, "completion_tokens": asked["max_tokens"]}
        await answer.write(event({"choices": [], "usage": usage}))
        await answer.write(b": phases queued=1.500;load=2.000\n\ndata: [DONE]\n\n")
        self.log.append({"came_s": came_s, "sent_s": sent_s, "model": model, "prompt": asked.get("prompt")})
        return answer

    @staticmethod
    def token(path: str, number: int) -> dict[str, object]:
        if "chat" in path:
            delta = {"role": "assistant", "content": ""} if number == 0 else {"content": f" {number}"}
            return {"choices": [{"delta": delta, "finish_reason": None}]}
        return {"choices": [{"text": f" {number}", "finish_reason": None}]}


def delays(model: str) -> tuple[float, float]:
    """Returns the seconds to the first token, and between tokens."""
    if not model.startswith("ttft-"):
        return 0.0, 0.0
    _, ttft_ms, _, tpot_ms = model.split("-")
    return float(ttft_ms) / 1000, float(tpot_ms) / 1000


def event(content: dict[str, object]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


async def until(moment_s: float) -> None:
    await asyncio.sleep(max(0.0, moment_s - time.perf_counter()))


@contextmanager
def fake_process(*models: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Yields the URL of an endpoint in a process of its own, and the process."""
    command = [sys.executable, __file__, *models]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
        finally:
            process.kill()


async def main() -> None:
    """Serves until standard input closes."""
    async with TestServer(Fake(models=tuple(sys.argv[1:]) or Fake().models).app()) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
