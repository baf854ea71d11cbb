"""The servers whose pages are used: the demo with an admin's key, and what keeps it busy."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from scripts.page.browser import Failed

KEY = "sk-page-ü"
ASCII_KEY = "sk-page"  # OpenAI's client sends no other
_START_S = 240.0
_HEADERS = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Demo:
    """A running demo server. `stop` ends it, once its requests have ended."""

    url: str
    stop: Callable[[], None]


@asynccontextmanager
async def demo(more: Sequence[str] = ()) -> AsyncIterator[Demo]:
    """Runs the demo on a free port, with a key that is an admin's, and with a folder that it does not serve."""
    arguments = ["--port", "0", "--admin-key", KEY, "--api-key", ASCII_KEY, "--allow-runtime-lora-updating", *more]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as data:
        (Path(data) / "caraserve" / "adapters" / "half").mkdir(parents=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", "-m", "caraserve", "serve", *arguments),
            env=os.environ | {"XDG_DATA_HOME": data},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            yield Demo(await _address(process), process.terminate)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(_START_S):
        async for line in process.stdout:
            if b"ready at " in line:
                return line.split(b"ready at ")[1].split()[0].decode()
    raise Failed("the demo did not start")


async def ask(url: str, method: str, path: str, body: dict[str, Any]) -> None:
    """Sends one request to the server. Raises Failed."""
    async with (
        aiohttp.ClientSession(headers=_HEADERS) as session,
        session.request(method, f"{url}/{path}", json=body) as answer,
    ):
        if answer.status >= 300:
            raise Failed(f"{method} /{path}: {await answer.text()}")


@asynccontextmanager
async def load(url: str, names: Sequence[str], requests_per_s: float) -> AsyncIterator[None]:
    """Keeps the server busy: prompts to some adapters, more often to the first of them."""
    async with aiohttp.ClientSession(headers=_HEADERS) as session:
        sending = asyncio.create_task(_keep_sending(session, url, names, requests_per_s))
        try:
            yield
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _keep_sending(session: aiohttp.ClientSession, url: str, names: Sequence[str], requests_per_s: float) -> None:
    chance = Random(1)
    async with asyncio.TaskGroup() as group:
        while True:
            name = names[min(int(chance.expovariate(0.7)), len(names) - 1)]
            prompt = "The sea " * chance.randrange(1, 40)
            body = {"model": name, "prompt": prompt, "max_tokens": 100, "ignore_eos": True}
            group.create_task(_send(session, f"{url}/v1/completions", body))
            await asyncio.sleep(chance.expovariate(requests_per_s))


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as answer:
        await answer.read()
