"""Measures the time to the first token with an adapter that another instance holds, over a network of given speed.

    .venv/bin/python -m scripts.bench.peer_fetch --save report

One instance has all adapters, the other one none; a relay slows down the traffic between them. Each request goes to the
second instance, for one token, with an adapter that it has not had yet. `overlapped` waits for the whole adapter;
`auto` computes as many layers of the prompt as have arrived. The two modes alternate in one run, so that drift of the
machine's speed does not change their ratio. The last line of stdout is one JSON document.
"""

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop

from caraserve.bench.options import TARGETS
from caraserve.bench.records import machine, versions
from caraserve.bench.report.files import as_json, make_folder, write_files
from caraserve.bench.servers import OwnServer, Synthetic, make_synthetic, own_server, working_folder
from scripts.laboratory.papers.fetches import await_adapters

_MODES = ("overlapped", "auto")
_LATE_S = 0.003  # lateness of a timer that is made up for, as by a network's buffers
_PIECE_BYTES = 16384  # that the relay passes on at a time


def main() -> None:
    """Measures both modes and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="100M", help="shape of the random model")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--targets", choices=tuple(TARGETS), default="all")
    parser.add_argument("--mb-per-s", type=float, default=50.0, help="of the network")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--adapters", type=int, default=12, help="cold starts of each mode and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", type=Path, metavar="DIR")
    args = parser.parse_args()
    found = uvloop.run(_measure(args))
    if args.save is not None:
        make_folder(args.save)
        write_files(args.save, {"peer_fetch.json": as_json(found)})
    print(json.dumps(found))


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    cold_ms: dict[str, list[float]] = {mode: [] for mode in _MODES}
    warm_ms: dict[str, list[float]] = {mode: [] for mode in _MODES}
    with working_folder() as folder:
        made = make_synthetic(folder, args.model, "float32", 1024, [args.rank] * args.adapters, TARGETS[args.targets])
        for _ in range(args.rounds):
            for mode in _MODES:
                async with _pair(made, mode, args.mb_per_s * 1e6) as (url, session):
                    await await_adapters(url, made.names)
                    for name in made.names:
                        cold_ms[mode].append(await _first_token_ms(session, url, name, args.prompt_tokens))
                    for name in made.names:
                        warm_ms[mode].append(await _first_token_ms(session, url, name, args.prompt_tokens))
    cold = {mode: median(times) for mode, times in cold_ms.items()}
    return {
        "bench": "peer fetch",
        "machine": machine(),
        "versions": versions(),
        "arguments": {name: value for name, value in vars(args).items() if name != "save"},
        "adapter_bytes": made.sizes[0],
        "cold_ttft_ms": cold,
        "warm_ttft_ms": {mode: median(times) for mode, times in warm_ms.items()},
        "auto_over_overlapped": cold["auto"] / cold["overlapped"],
        "all_cold_ttft_ms": cold_ms,
    }


@asynccontextmanager
async def _pair(made: Synthetic, mode: str, bytes_per_s: float) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """Starts an instance with all adapters behind a slow relay, and one without; yields the URL of the latter."""
    holder_port = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connects to the holder; each direction of the connection has the given bandwidth."""
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", holder_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pass_on(reader, far_writer, bytes_per_s), _pass_on(far_reader, writer, bytes_per_s))

    async with contextlib.AsyncExitStack() as stack:
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        stack.callback(server.close)
        at = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        common = ("--loading-mode", mode, "--routing", "local", "--cpu-threads", "1", "--peers", at)

        async def start(*arguments: str) -> OwnServer:
            return await stack.enter_async_context(own_server((*arguments, *common), asyncio.Event()))

        holder = await start(*made.arguments, "--name", "holder", "--advertise", at)
        holder_port = urlsplit(holder.url).port or 0
        asker = await start(*made.model_arguments, "--name", "asker")
        yield asker.url, await stack.enter_async_context(aiohttp.ClientSession())


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float) -> None:
    free_s = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(_PIECE_BYTES):
            free_s = max(free_s, time.monotonic() - _LATE_S) + len(piece) / bytes_per_s
            if (ahead_s := free_s - time.monotonic()) > _LATE_S:
                await asyncio.sleep(ahead_s)
            writer.write(piece)
            await writer.drain()
    writer.close()


async def _first_token_ms(session: aiohttp.ClientSession, url: str, name: str, prompt_tokens: int) -> float:
    """Sends a random prompt, which no prefix cache has, and returns the time until the answer."""
    prompt = [random.randrange(100, 1000) for _ in range(prompt_tokens)]
    body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    started_s = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"{name}: {answer.status} {await answer.text()}")
        await answer.read()
    return 1000 * (time.monotonic() - started_s)


if __name__ == "__main__":
    main()
