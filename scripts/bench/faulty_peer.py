"""Shows what an instance that behaves badly costs the clients of three good ones, as a table in Markdown.

    .venv/bin/python scripts/bench/faulty_peer.py

Three servers of the bundled demo are joined by a fourth instance, this process. It has the cluster's secret and its
heartbeats are in order, so that requests and downloads go to it; what it then sends depends on the prompt or adapter.
`a` has the adapters, `b` forwards requests, `c` answers what it receives and downloads adapters. Takes three minutes.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from caraserve import demo
from caraserve.bench.servers import end_with_parent, free_ports
from caraserve.cluster.membership.auth import LOOPBACK_SECRET, Keyring
from caraserve.cluster.membership.member import Member, MemberConfig, MemberListener, QueryBody
from caraserve.cluster.membership.websocket import WEBSOCKET_PATH
from caraserve.cluster.routing.advertised import publish_speed
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.state.lww_map import Entry
from caraserve.cluster.state.persistence import ClusterRegistryFile
from caraserve.cluster.state.replicated_map import InstanceLoad, RegisteredAdapter, Tier
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.http.dispatch import ANSWERING_QUESTION
from caraserve.lora.manifest import ChunkHasher, identified, manifest_of
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.digest import model_digest
from caraserve.model.families import load_plan
from caraserve.util.hybrid_clock import hlc_of

SPEC = load_plan(demo.model_folder())
NAMED = b"HTTP/1.1 %b\r\nX-CaraServe-Instance: 0\r\n"
JSON, STREAM, BYTES = [
    NAMED % b"200 OK" + b"Content-Type: %b\r\n" % of for of in (b"application/json", b"text/event-stream", b"x/y")
]
SMALL, EVENT = b"Content-Length: 1000\r\n\r\n", b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"

# What is sent, what is sent again and again, and how often: 0 without anything to repeat ends the connection.
Sends = tuple[bytes, bytes, float]
FORWARDS: dict[str, Sends] = {  # by the prompt of a forwarded request
    "no head": (b"", b"", 1.0),
    "interim responses": (b"", INTERIM, 0.1),
    "head of an answer": (JSON + SMALL, b"", 1.0),
    "answer byte by byte": (JSON + SMALL + b"{", b" ", 5.0),
    "endless answer": (JSON + b'\r\n{"id":"', b"x" * 65536, 0.0),
    "302": (NAMED % b"302 Found" + b"Location: /\r\nContent-Length: 0\r\n\r\n", b"", 0.0),
    "500": (NAMED % b"500 No" + b"Content-Length: 4\r\n\r\nboom", b"", 0.0),
    "garbage": (b"\x00" * 100, b"", 0.0),
    "garbage in an answer": (JSON + b"Content-Length: 4\r\n\r\nboom", b"", 0.0),
    "head of a stream": (STREAM + b"\r\n", b"", 1.0),
    "half a stream": (STREAM + b"\r\n" + EVENT, b"", 1.0),
    "endless event": (STREAM + b"\r\n" + EVENT[:9], b"x" * 65536, 0.0),
}
DOWNLOADS: dict[str, Sends] = {  # by the name of an adapter, for its manifest
    "chef": (JSON + SMALL, b"x", 1.0),
    "lawyer": (b"", INTERIM, 0.1),
    "poet": (NAMED % b"200 OK" + b"X: ", b"x", 1.0),
}
SLOW = [f"slow{number}" for number in range(9)]


def answer_query(peer: str, body: QueryBody) -> QueryBody:
    """Offers to take every request at once, and no longer answers any of them."""
    return (0,) if body[0] == ANSWERING_QUESTION else (0.0, 0.0) * (body[0] == "route")


class FaultyPeer:
    """The fourth instance."""

    def __init__(self, address: str, peer: str, name: str) -> None:
        self.downloads: dict[str, Sends] = {}  # by digest
        self.images: dict[str, HostAdapter] = {}  # that it really has
        self._address = address
        digest = model_digest(demo.model_folder(), SPEC.dtype, "checkpoint")
        config = MemberConfig("caraserve", "0", digest, (peer,), Keyring((LOOPBACK_SECRET,)), base_name=name)
        self.member = Member(config, ClusterRegistryFile(None), rng=Random(1))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get(WEBSOCKET_PATH, self.member.accept)
        app.router.add_get("/cluster/adapters/{digest}/manifest", self._manifest)
        app.router.add_get("/cluster/adapters/{digest}", self._chunks)
        app.router.add_post("/cluster/{path:.*}", self._forwarded)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        host, port = self._address.split(":")
        await web.TCPSite(runner, host, int(port)).start()
        load = InstanceLoad("serving", kv_tokens=1 << 20, kv_free_tokens=1 << 20, queue_room=1000)
        listener = MemberListener(lambda lag_s: load, answer_query=answer_query)
        await self.member.start(self._address, listener)
        publish_speed(self.member, PerfModel(1e-6, 1e-6, 1e-3, False, 1e-3, 1e-6, 1e-9), LinkSpeeds())
        try:
            yield
        finally:
            await self.member.stop()
            await runner.cleanup()
            await self.member.close()

    async def _forwarded(self, request: web.Request) -> web.StreamResponse:
        prompt = json.loads(await request.read())["prompt"]
        return await _send(request, *FORWARDS.get(prompt, FORWARDS["500"]))

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        if digest in self.images:
            return web.Response(body=manifest_of(self.images[digest].spec))
        if digest in self.downloads:
            return await _send(request, *self.downloads[digest])
        return web.Response(body=HUGE)

    async def _chunks(self, request: web.Request) -> web.StreamResponse:
        image = self.images[request.match_info["digest"]]
        start, end = int(request.query["from"]), int(request.query["to"])
        if image.spec.digest in self.downloads:
            return await _send(request, *self.downloads[image.spec.digest])
        return await _send(request, BYTES + b"\r\n" + image.data[start:end].tobytes(), b"", 1.0)  # no end

    def add(self, name: str, image: HostAdapter) -> None:
        """Registers an adapter that only this instance has."""
        self.images[image.spec.digest] = image
        self.register(name, image.spec.digest, image.spec.num_bytes)
        self.member.advertise_tier(image.spec.digest, Tier.HOST)

    def register(self, name: str, digest: str, num_bytes: int) -> None:
        self.member.register(RegisteredAdapter(name, digest, 16, num_bytes))


HUGE = json.dumps([1, "float32", [[0, 0, 8, 10**400]], []]).encode()


async def _send(request: web.Request, start: bytes, again: bytes, pause_s: float) -> web.StreamResponse:
    transport = request.transport
    assert transport is not None
    transport.write(start)
    if not again and not pause_s:
        transport.close()
    while not transport.is_closing():
        if transport.get_write_buffer_size() < 1 << 20:
            transport.write(again)
        await asyncio.sleep(pause_s)
    return web.Response()  # for no client


def made_image(seed: int) -> HostAdapter:
    """Returns an adapter of the demo with some other bytes."""
    folder = demo.adapters_folder() / "poet"
    into = aligned_bytes(inspect_adapter(folder, SPEC).num_bytes)
    image = read_adapter(folder, SPEC, into)
    image.data[:256] = np.random.default_rng(seed).normal(0, 0.01, 64).astype(np.float32).view(np.uint8)
    hasher = ChunkHasher(image.spec.layer_ends)
    hasher.update(image.data.data)
    return HostAdapter(identified(image.spec, hasher.hashes), image.data)


class Instance:
    """A server of the demo."""

    def __init__(self, name: str, port: int, folder: Path, session: aiohttp.ClientSession) -> None:
        self.name, self.url, self.log = name, f"http://127.0.0.1:{port}", folder / f"{name}.log"
        self.registry, self._session = folder / f"{name}.db", session

    async def start(self, peers: str, *more: str) -> asyncio.subprocess.Process:
        sizes = ("--kv-cache-bytes", "32MiB", "--cpu-threads", "1", "--lora-cpus", "0", "--no-log-requests")
        own = ("--name", self.name, "--port", self.url.rpartition(":")[2], "--registry", str(self.registry))
        with self.log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "caraserve", "serve", *own, "--peers", peers, *sizes, *more),
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )
        while not await self.is_ready():
            await asyncio.sleep(0.2)
            assert process.returncode is None, self.log.read_text()
        self._pid = process.pid
        return process

    async def is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with self._session.get(f"{self.url}/ready") as answer:
                return answer.status == 200
        return False

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as answer:
            return await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def ask(self, prompt: str, model: str | None, timeout_s: float = 100.0, *, stream: bool = False) -> str:
        """Returns how a request ends, after how many seconds, and its text."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": stream}
        began_s, text = time.monotonic(), ""
        try:
            timeout = aiohttp.ClientTimeout(timeout_s)
            async with self._session.post(
                f"{self.url}/v1/completions", json=body | ({"model": model} if model else {}), timeout=timeout
            ) as answer:
                end, raw = str(answer.status), await answer.read()
                for line in raw.split(b"\n\n") if stream else [b"data: " + raw]:
                    value = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                    text += "".join(choice["text"] for choice in value.get("choices", ()))
                    end = (value.get("error") or {}).get("code") or end
        except TimeoutError:
            end = "no answer"
        return f"{end} | {time.monotonic() - began_s:.1f} | {text!r}"

    def memory_mb(self) -> float:
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


async def forwards(b: Instance, c: Instance) -> None:
    """All at once, as the instance is left out for a while once it has failed."""
    cases = [(prompt, stream) for prompt in FORWARDS for stream in (False, True)]
    before_mb = b.memory_mb()
    got = await asyncio.gather(*(b.ask(prompt, None, stream=stream) for prompt, stream in cases))
    memory_mb = b.memory_mb()
    for (prompt, stream), outcome in zip(cases, got, strict=True):
        wanted = await c.ask(prompt, None, stream=stream)
        is_same = outcome.split(" | ")[2] == wanted.split(" | ")[2]
        row("stream" if stream else "whole", prompt, *outcome.split(" | ")[:2], "same text" if is_same else "-")
    row("forwards", "memory of b", f"{before_mb:.0f} MB", f"{memory_mb:.0f} MB", "")


async def downloads(peer: FaultyPeer, a: Instance, c: Instance) -> None:
    digests = {one["name"]: one["digest"] for one in (await a.get("/v1/cluster/adapters"))["data"]}
    for name, sends in DOWNLOADS.items():
        peer.downloads[digests[name]] = sends
        peer.member.advertise_tier(digests[name], Tier.HOST)
    images = dict(zip([*SLOW, "after"], map(made_image, range(10)), strict=True))
    for name, image in images.items():
        peer.add(name, image)
        if name in SLOW:
            peer.downloads[image.spec.digest] = (BYTES + b"\r\n", b"x", 1.0)
    huge = hashlib.sha256(HUGE).hexdigest()
    peer.register("huge", huge, 1000)
    peer.member.advertise_tier(huge, Tier.HOST)
    await asyncio.sleep(2)
    for name, what in {
        **{name: f"{name}: also on a" for name in DOWNLOADS},
        "after": "all bytes, then the answer stays open",
        "huge": "a scale of 400 digits",
    }.items():
        row("download", what, *(await c.ask("x", name)).split(" | ")[:2], "")
    await asyncio.gather(*(c.ask("x", name, 3.0) for name in SLOW))
    row("download", "json, beside 9 slow downloads", *(await c.ask("x", "json")).split(" | ")[:2], "")
    await asyncio.sleep(8)
    metrics = str(await c.get("/metrics"))
    (running,) = [line.split()[-1] for line in metrics.splitlines() if line.startswith("caraserve:adapter_fetches_run")]
    row("download", "running 8 s after their clients have left, the placement's included", running, "", "")


async def settings(peer: FaultyPeer, a: Instance) -> None:
    lists = b'{"a":[' + b"[]," * 340_000 + b"[]]}"
    template = b'{"labels":{},"chat_template":"%b"}' % (b"x" * 65_000)
    before_mb = a.memory_mb()
    for kind, text in (("zz", lists), ("alias", lists), ("adapter", lists), ("adapter", template)):
        value = base64.b64encode(zlib.compress(text, 9)).decode()
        for number in range(500):
            hlc = hlc_of(int(time.time() * 1000))
            peer.member.share(Entry(f"{kind}/{kind}{number}{len(text)}", (value,), hlc, "0"))
    await asyncio.sleep(15)
    size = sum(file.stat().st_size for file in a.registry.parent.glob("a.*db*"))
    row(
        "settings",
        "2,000 of up to 24 MB, packed",
        f"{before_mb:.0f} MB",
        f"{a.memory_mb():.0f} MB",
        f"file {size / 1e6:.1f} MB",
    )


async def names(peer: FaultyPeer, a: Instance, b: Instance) -> None:
    peer.register("pirate", "f" * 64, 1000)
    began_s = time.monotonic()
    await asyncio.sleep(2)
    first = (await a.ask("x", "pirate")).split(" | ")[0]
    for one in (a, b):
        while not (await one.ask("x", "pirate")).startswith("200"):
            await asyncio.sleep(1)
            assert time.monotonic() - began_s < 120, one.log.read_text()
        what = f"of a's folder, registered without bytes; asked of {one.name}"
        row("name", what, f"{first}, then 200", f"{time.monotonic() - began_s:.0f}", "")


def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ports = free_ports(4)
        at = [f"127.0.0.1:{port}" for port in ports]
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)))
            a, b, c = [Instance(name, port, folder, session) for name, port in zip("abc", ports, strict=False)]
            adapters = ("--adapters-dir", str(demo.adapters_folder()))
            # `c` has no room to keep adapters, so that the placement does not fetch them before `c` is asked.
            arguments = {a: adapters, b: (), c: ("--routing", "local", "--adapter-disk-bytes", "1")}
            model = ("--model", str(demo.model_folder()), "--served-model-name", "demo")
            processes = []
            for one, more in arguments.items():
                processes.append(await one.start(",".join(at[:2]), *model, *more))
                stack.callback(_end, processes[-1])
            peer = FaultyPeer(at[3], at[0], "demo")
            row("what", "the faulty instance sends", "end", "seconds", "")
            row(*["---"] * 5)
            async with peer.running():
                await asyncio.sleep(5)  # it is a member
                await forwards(b, c)
                await downloads(peer, a, c)
                await settings(peer, a)
                await names(peer, a, b)
            await asyncio.sleep(1)
            ends = [(await one.ask("x", "chef")).split(" | ")[0] for one in (a, b, c)]
            row("afterwards", "answers of a, b and c", *ends)
            processes[0].kill()
            await asyncio.sleep(2)
            for process in processes[1:]:
                process.terminate()
                await process.wait()
            traces = sum(one.log.read_text().count("Traceback") for one in (a, b, c))
            row("afterwards", "tracebacks in the logs, also after kill -9 of a", traces, "", "")


if __name__ == "__main__":
    asyncio.run(main())
