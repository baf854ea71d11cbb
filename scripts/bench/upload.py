"""Measures the first token of an adapter that is being uploaded over a network of given speed, and what others notice.

    .venv/bin/python scripts/bench/upload.py --save report

Every upload brings a new adapter, its tensors in the order of the layers, and a prompt for it is sent as soon as the
server knows its name. Meanwhile other clients stream tokens of the base model. Rounds with uploads alternate with
rounds in which the same prompts go, as often, to an adapter that is loaded. The last line of stdout is one JSON
document.
"""

import argparse
import asyncio
import hashlib
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvloop

from caraserve.bench.options import TARGETS
from caraserve.bench.records import machine, versions
from caraserve.bench.report.files import as_json, make_folder, write_files
from caraserve.bench.servers import make_synthetic, own_server, working_folder
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.model.safetensors_reader import TensorFile

_PIECE_BYTES = 65536
_RETRY_S = 0.002  # until the server knows the adapter's name
_PAUSE_S = 0.5  # between two prompts


def main() -> None:
    """Measures and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="100M", help="shape of the random model")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--mb-per-s", type=float, default=50.0, help="of the network")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--uploads", type=int, default=10, help="of each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--others", type=int, default=2, help="clients that stream tokens meanwhile")
    parser.add_argument("--save", type=Path, metavar="DIR")
    args = parser.parse_args()
    found = uvloop.run(_measure(args))
    if args.save is not None:
        make_folder(args.save)
        write_files(args.save, {"upload.json": as_json(found)})
    print(json.dumps(found))


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    after_ms: list[float] = []
    loaded_ms: list[float] = []
    gaps_ms: dict[str, list[float]] = {"loaded": [], "uploads": []}
    with working_folder() as folder:
        made = make_synthetic(folder, args.model, "float32", 1024, [args.rank], TARGETS["all"])
        source = folder / "adapters" / made.names[0]
        config, body = (source / CONFIG_NAME).read_text(encoding="utf-8"), _in_layer_order(source / TENSORS_NAME)
        options = ("--allow-runtime-lora-updating", "--cpu-threads", "1", "--loading-mode", "auto")
        async with (
            own_server((*made.arguments, *options), asyncio.Event()) as server,
            aiohttp.ClientSession() as session,
        ):
            client = _Client(session, server.url, args.prompt_tokens)
            await client.first_token(made.names[0])
            for round_number in range(2 * args.rounds):
                kind = ("loaded", "uploads")[round_number % 2]
                others = [asyncio.create_task(client.gaps(gaps_ms[kind])) for _ in range(args.others)]
                for number in range(args.uploads):
                    if kind == "loaded":
                        began_s = time.monotonic()
                        loaded_ms.append(1000 * (await client.first_token(made.names[0]) - began_s))
                        await asyncio.sleep(len(body) / args.mb_per_s / 1e6 + _PAUSE_S)
                    else:
                        name = f"up-{round_number}-{number}"
                        after_ms.append(await client.upload(name, config, _changed(body, number), args.mb_per_s * 1e6))
                        await client.delete(name)
                        await asyncio.sleep(_PAUSE_S)
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
    gaps_ms = {kind: gaps or [0.0] for kind, gaps in gaps_ms.items()}  # without others there are none
    p99 = {kind: float(np.percentile(gaps, 99)) for kind, gaps in gaps_ms.items()}
    return {
        "bench": "upload",
        "machine": machine(),
        "versions": versions(),
        "arguments": {name: value for name, value in vars(args).items() if name != "save"},
        "body_bytes": len(body),
        "first_token_after_last_byte_ms": {
            name: float(np.percentile(after_ms, share)) for name, share in (("p50", 50), ("p90", 90), ("max", 100))
        },
        "first_token_of_loaded_adapter_ms": float(np.percentile(loaded_ms, 50)),
        "transfer_ms": len(body) / args.mb_per_s / 1000,
        "p99_token_gap_ms": p99,
        "p50_token_gap_ms": {kind: float(np.percentile(gaps, 50)) for kind, gaps in gaps_ms.items()},
        "uploads_over_loaded": p99["uploads"] / p99["loaded"] if args.others else None,
        "token_gaps": {kind: len(gaps) for kind, gaps in gaps_ms.items()},
        "all_first_token_after_last_byte_ms": after_ms,
    }


class _Client:
    """Requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, prompt_tokens: int) -> None:
        self._session, self._url, self._prompt_tokens = session, url, prompt_tokens

    async def gaps(self, into: list[float]) -> None:
        """Streams tokens of the base model until cancelled; adds the milliseconds between them to `into`."""
        while True:
            body = self._body(None, 400)
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                last_s = None
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        now_s = time.monotonic()
                        if last_s is not None:
                            into.append(1000 * (now_s - last_s))
                        last_s = now_s

    async def first_token(self, model: str) -> float:
        """Returns when the first token of a new prompt has come, in seconds of the monotonic clock."""
        while True:
            async with self._session.post(f"{self._url}/v1/completions", json=self._body(model, 1)) as answer:
                if answer.status == 200:
                    await answer.content.readline()
                    return time.monotonic()
                if answer.status != 404:
                    raise SystemExit(f"{model}: {answer.status} {await answer.text()}")
            await asyncio.sleep(_RETRY_S)

    async def upload(self, name: str, config: str, body: bytes, bytes_per_s: float) -> float:
        """Uploads an adapter and sends a prompt for it meanwhile. Returns the milliseconds from the body's last byte to
        the first token."""
        last_byte_s = 0.0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal last_byte_s
            began_s = time.monotonic()
            for start in range(0, len(body), _PIECE_BYTES):
                piece = body[start : start + _PIECE_BYTES]
                await asyncio.sleep(max(0.0, began_s + (start + len(piece)) / bytes_per_s - time.monotonic()))
                last_byte_s = time.monotonic()
                yield piece

        asked = asyncio.create_task(self.first_token(name))
        headers = {"Content-Length": str(len(body)), "x-content-sha256": hashlib.sha256(body).hexdigest()}
        url = f"{self._url}/v1/adapters/{name}"
        async with self._session.put(url, params={"config": config}, data=pieces(), headers=headers) as answer:
            if answer.status != 201:
                raise SystemExit(f"{name}: {answer.status} {await answer.text()}")
        return 1000 * (await asked - last_byte_s)

    async def delete(self, name: str) -> None:
        async with self._session.delete(f"{self._url}/v1/adapters/{name}") as answer:
            await answer.read()

    def _body(self, model: str | None, tokens: int) -> dict[str, Any]:
        """A random prompt, which no prefix cache has."""
        prompt = [random.randrange(100, 1000) for _ in range(self._prompt_tokens)]
        chosen = {} if model is None else {"model": model}
        return chosen | {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}


def _in_layer_order(path: Path) -> bytes:
    """Returns a tensor file's bytes with its tensors in the order of the layers; safetensors sorts them by name."""
    with TensorFile(path) as file:
        names = sorted(file.names, key=lambda name: (int(name.split(".layers.")[1].split(".")[0]), name))
        header, parts, at = dict[str, Any](), list[bytes](), 0
        for name in names:
            values = file.raw(name)
            parts.append(values.tobytes())
            header[name] = {
                "dtype": file.dtype(name).name,
                "shape": file.shape(name),
                "data_offsets": [at, at + values.nbytes],
            }
            at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _changed(body: bytes, number: int) -> bytes:
    """Returns the body with another last value, so that it is another adapter."""
    return body[:-2] + np.float16(0.001 * number).tobytes()


if __name__ == "__main__":
    main()
