"""Lets many clients change one adapter's name at once, and checks every answer.

    .venv/bin/python scripts/bench/adapter_races.py [--clients 50] [--seconds 25] [--save DIR]

Starts `caraserve serve` with the demo model. Each client uploads, loads, unloads, deletes, labels and asks one name and
an alias of it, in random order; meanwhile a folder in --adapters-dir is renamed again and again. Every text must be
that of the version which the answer names, and every status one that a correct client expects: 400 and 5xx are faults,
except for a rollback of an alias that has stood for one adapter only.
The last line of stdout is one JSON document; exit code 1 if there was a fault.
"""

import argparse
import asyncio
import contextlib
import io
import json
import random
import shutil
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from caraserve import demo
from caraserve.bench.records import machine, versions
from caraserve.bench.report.files import as_json, make_folder, write_files
from caraserve.bench.servers import own_server, working_folder

_NAME, _ALIAS, _MOVING = "raced", "prod", ("moving-a", "moving-b")
_ASKED = {"prompt": "The sea is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
_RENAME_S = 0.2
_SHOWN_FAULTS = 20
_SERVED_BY = "x-caraserve-adapter"


def main() -> None:
    """Runs the race and prints what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="DIR")
    args = parser.parse_args()
    found = asyncio.run(_measured(args.clients, args.seconds, args.seed))
    if args.save is not None:
        make_folder(args.save)
        write_files(args.save, {"adapter_races.json": as_json(found)})
    print(json.dumps(found))
    raise SystemExit(1 if found["faults"] else 0)


async def _measured(clients: int, seconds: float, seed: int) -> dict[str, Any]:
    with working_folder() as root:
        options = ("--adapters-dir", str(root), "--allow-runtime-lora-updating", "--no-log-requests")
        async with own_server(options, asyncio.Event()) as server:
            result = await race(server.url, root, clients, seconds, seed)
        left = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
    arguments = {"clients": clients, "seconds": seconds, "seed": seed}
    head = {"bench": "adapter_races", "machine": machine(), "versions": versions(), "arguments": arguments}
    return head | result | {"hidden_folders_left": left}


@dataclass(frozen=True)
class _Version:
    """One of the adapters that clients give the name."""

    body: bytes  # of an upload
    digest: str
    text: str  # of its answer


@dataclass
class _Race:
    session: aiohttp.ClientSession
    url: str
    rng: random.Random
    versions: list[_Version] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # by digest
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def client(self, is_over: Callable[[], bool]) -> None:
        """Does one thing after the other until the race is over."""
        changes = (self.put, self.load, self.unload, self.delete, self.alias, self.roll_back, self.label, self.show)
        requests = (self.stream, self.stream, self.stream, self.whole, self.whole)
        while not is_over():
            await self.rng.choice((*changes, *requests))()

    async def put(self) -> None:
        force = {"force": "true"} if self.rng.random() < 0.5 else {}
        body = self.rng.choice(self.versions).body
        await self._change("put", "PUT", f"/v1/adapters/{_NAME}", {200, 201, 409}, data=body, params=force)

    async def load(self) -> None:
        body = {"lora_name": _NAME, "lora_path": f"source-{self.rng.randrange(2)}", "load_inplace": True}
        await self._change("load", "POST", "/v1/load_lora_adapter", {200, 409}, json=body)

    async def unload(self) -> None:
        await self._change("unload", "POST", "/v1/unload_lora_adapter", {200, 404, 409}, json={"lora_name": _NAME})

    async def delete(self) -> None:
        force = {"force": "true"} if self.rng.random() < 0.5 else {}
        await self._change("delete", "DELETE", f"/v1/adapters/{_NAME}", {200, 404, 409}, params=force)

    async def alias(self) -> None:
        body = {"adapter": self.rng.choice((_NAME, "source-0"))}
        await self._change("alias", "PUT", f"/v1/aliases/{_ALIAS}", {200, 201, 404, 409}, json=body)

    async def roll_back(self) -> None:
        await self._change("rollback", "POST", f"/v1/aliases/{_ALIAS}/rollback", {200, 400, 404, 409})

    async def label(self) -> None:
        body = {"labels": {"n": str(self.rng.randrange(9))}}
        await self._change("label", "PATCH", f"/v1/adapters/{_NAME}", {200, 404, 409}, json=body)

    async def show(self) -> None:
        await self._change("show", "GET", f"/v1/adapters/{_NAME}", {200, 404})

    async def whole(self) -> None:
        model = self.rng.choice((_NAME, _NAME, _ALIAS))
        async with self.session.post(f"{self.url}/v1/completions", json=_ASKED | {"model": model}) as answer:
            body = await answer.json(content_type=None)
            if self._is_good("whole", answer.status, {200, 404, 409}, body):
                self._check("whole", answer.headers[_SERVED_BY], body["choices"][0]["text"])

    async def stream(self) -> None:
        model = self.rng.choice((_NAME, _NAME, _ALIAS))
        asked = _ASKED | {"model": model, "stream": True}
        async with self.session.post(f"{self.url}/v1/completions", json=asked) as answer:
            if answer.status != 200:
                self._is_good("stream", answer.status, {404, 409}, await answer.text())
                return
            text = ""
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        is_busy = event["error"]["code"] == "adapter_busy"
                        self._is_good("stream", 409 if is_busy else 500, {409}, event)
                        return
                    text += "".join(choice["text"] for choice in event["choices"])
            self.counts["stream 200"] += 1
            self._check("stream", answer.headers[_SERVED_BY], text)

    async def _change(self, what: str, method: str, path: str, good: set[int], **options: Any) -> Any:
        async with self.session.request(method, self.url + path, **options) as answer:
            text = await answer.text()
            self._is_good(what, answer.status, good, text)
            return text

    def _is_good(self, what: str, status: int, good: set[int], body: object) -> bool:
        """Counts an answer; notes a fault unless its status is one that a correct client expects."""
        self.counts[f"{what} {status}"] += 1
        if status not in good:
            self.faults.append(f"{what}: {status} {body}")
        return status == 200

    def _check(self, what: str, served_by: str, text: str) -> None:
        if self.texts.get(served_by.partition("@")[2]) != text:
            self.faults.append(f"{what}: {served_by} answered {text!r}")

    async def prepare(self, root: Path) -> None:
        """Learns the text of each version, under a name of its own, before the race."""
        for number, adapter in enumerate(("pirate", "poet", "chef", "lawyer")):
            body = _tar(demo.adapters_folder() / adapter)
            async with self.session.put(f"{self.url}/v1/adapters/version-{number}", data=body) as answer:
                digest = (await answer.json())["digest"]
            self.versions.append(_Version(body, digest, await self._learn(f"version-{number}")))
            async with self.session.delete(f"{self.url}/v1/adapters/version-{number}") as answer:
                answer.raise_for_status()
        for name in ("source-0", "source-1", _MOVING[0]):
            await asyncio.to_thread(_copied, root / name, 8 + len(self.texts))
            load = {"lora_name": name, "lora_path": name}
            async with self.session.post(f"{self.url}/v1/load_lora_adapter", json=load) as answer:
                answer.raise_for_status()
            await self._learn(name)

    async def _learn(self, name: str) -> str:
        async with self.session.post(f"{self.url}/v1/completions", json=_ASKED | {"model": name}) as answer:
            answer.raise_for_status()
            text = str((await answer.json())["choices"][0]["text"])
            self.texts[answer.headers[_SERVED_BY].partition("@")[2]] = text
            return text


async def race(
    url: str, root: Path, clients: int, seconds: float, seed: int, *, least_streams: int = 0
) -> dict[str, Any]:
    """Runs the race against a server of the demo model with --adapters-dir `root`, for `seconds`, and on a busy machine
    for longer: until `least_streams` have been answered."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        here = _Race(session, url, random.Random(seed))
        await here.prepare(root)
        clock = asyncio.get_running_loop().time
        async with _renaming(root):
            end_s = clock() + seconds

            def is_over() -> bool:
                return clock() >= end_s and here.counts["stream 200"] >= least_streams

            await asyncio.gather(*(here.client(is_over) for _ in range(clients)))
    faults = Counter(here.faults).most_common(_SHOWN_FAULTS)
    return {"counts": dict(sorted(here.counts.items())), "faults": len(here.faults), "shown_faults": faults}


@asynccontextmanager
async def _renaming(root: Path) -> AsyncIterator[None]:
    """Renames a folder of an adapter again and again meanwhile."""

    async def rename() -> None:
        names = _MOVING
        while True:
            await asyncio.sleep(_RENAME_S)
            await asyncio.to_thread((root / names[0]).rename, root / names[1])
            names = names[1], names[0]

    task = asyncio.create_task(rename())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _copied(folder: Path, alpha: int) -> None:
    """Copies one of the demo's adapters with another scale, so that it is another version."""
    shutil.copytree(demo.adapters_folder() / "json", folder.with_name(f".{folder.name}"))
    path = folder.with_name(f".{folder.name}") / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": alpha}))
    folder.with_name(f".{folder.name}").rename(folder)


def _tar(folder: Path) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            archive.add(folder / name, name)
    return target.getvalue()


if __name__ == "__main__":
    main()
