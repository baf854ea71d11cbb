"""Streams to a thousand clients, of which some read slowly, stop for seconds, or leave, and checks all answers.

    .venv/bin/python scripts/bench/slow_readers.py [--streams 1000] [--seconds 60]

The server has a clock as its device (scripts/bench/clock_server.py), whose tokens are all the same, so that a client
can tell whether an answer is whole. Prints a row for each kind of client, the server's memory before and at most, and
how late its event loop's timers were. The last line of stdout is one JSON document; exit code 1 if an answer was
incomplete.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from caraserve.bench.servers import OwnServer, own_server

_PROFILE = Path(__file__).resolve().parents[2] / "tests" / "profile.json"  # a clock cannot be measured
_CLOCK_SERVER = Path(__file__).with_name("clock_server.py")
_TOKENS = 200
_BODY = json.dumps(
    {"prompt": "The sea", "max_tokens": _TOKENS, "stream": True, "ignore_eos": True, "temperature": 0}
).encode()
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_TEXT = re.compile(rb'"text":"((?:[^"\\]|\\.)*)"')
_LAST_ANSWERS_S = 30.0
_CORES = sorted(os.sched_getaffinity(0))
_RECEIVED_BYTES = 8 << 10  # of the kernel's buffer of a client, so that the server notices a slow one
_END = b"data: [DONE]"


class Client:
    """One connection, which sends a request after the other until the end of the time."""

    def __init__(self, kind: str, port: int, end_s: float, counts: Counter[str], seed: int) -> None:
        self._kind, self._port, self._end_s, self._counts = kind, port, end_s, counts
        self._random = random.Random(seed)

    async def run(self) -> None:
        """Reads answers in its kind's way, and counts those that were whole, incomplete or left."""
        read = _KINDS[self._kind]
        while time.monotonic() < self._end_s:
            link = socket.socket()
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)
            link.setblocking(False)
            await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", self._port))
            reader, writer = await asyncio.open_connection(sock=link, limit=_RECEIVED_BYTES)
            try:
                while time.monotonic() < self._end_s and await self._one(reader, writer, read):
                    pass
            finally:
                writer.transport.abort()

    async def _one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pause_s: Callable[[random.Random, int], float | None],
    ) -> bool:
        """Sends a request and reads its answer. Returns whether the connection may be used again."""
        writer.write(_REQUEST)
        received, pieces = bytearray(), 0
        while _END not in received[-64:]:
            wait_s = pause_s(self._random, pieces)
            if wait_s is None:
                self._counts[f"{self._kind}: left"] += 1
                return False
            if wait_s:
                await asyncio.sleep(wait_s)
            piece = await reader.read(_RECEIVED_BYTES)
            if not piece:
                self._counts[f"{self._kind}: cut"] += 1
                return False
            received += piece
            pieces += 1
        await reader.readuntil(b"\r\n0\r\n\r\n") if not received.endswith(b"\r\n0\r\n\r\n") else None
        text = b"".join(_TEXT.findall(received))
        is_whole = text == text[: len(text) // _TOKENS] * _TOKENS and len(text) >= _TOKENS
        self._counts[f"{self._kind}: {'whole' if is_whole else 'INCOMPLETE'}"] += 1
        return True


# By kind of client: how long it waits before it reads the next piece; None: it leaves.
_KINDS: dict[str, Callable[[random.Random, int], float | None]] = {
    "quick": lambda chance, pieces: 0.0,
    "slow": lambda chance, pieces: 0.3,
    "stopping": lambda chance, pieces: 5.0 if chance.random() < 0.05 else 0.0,
    "vanishing": lambda chance, pieces: None if chance.random() < 0.05 else 0.0,
}


async def _measure(server: OwnServer, streams: int, seconds: float) -> tuple[Counter[str], dict[str, float]]:
    port, counts = urlsplit(server.url).port or 0, Counter[str]()
    before_bytes = most_bytes = server.memory_bytes()
    end_s = time.monotonic() + seconds
    kinds = list(_KINDS)
    clients = [Client(kinds[number % 4], port, end_s, counts, number) for number in range(streams)]
    tasks = [asyncio.create_task(client.run()) for client in clients]
    while time.monotonic() < end_s:
        await asyncio.sleep(1.0)
        most_bytes = max(most_bytes, server.memory_bytes())
    await asyncio.wait(tasks, timeout=_LAST_ANSWERS_S)
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return counts, {"before_mb": before_bytes / 1e6, "most_mb": most_bytes / 1e6}


def _take_first_core() -> None:
    os.sched_setaffinity(0, _CORES[:1])


async def _run(streams: int, seconds: float, decode_ms: float, folder: str) -> int:
    lag_file = Path(folder) / "lag.json"
    clock = [sys.executable, str(_CLOCK_SERVER), "--decode-ms", str(decode_ms), "--one-token", "--lag", str(lag_file)]
    options = [
        "--device",
        "cpu",
        "--cpu-threads",
        "1",
        "--max-num-seqs",
        "256",
        "--max-queue",
        "4096",
        "--num-speculative-tokens",
        "0",
    ]
    options += ["--profile", str(_PROFILE)]
    options += ["--max-connections", str(4 * streams), "--no-log-requests"]
    async with own_server(options, asyncio.Event(), caraserve=clock, join=_take_first_core) as server:
        os.sched_setaffinity(0, _CORES[1:] or _CORES)
        counts, figures = await _measure(server, streams, seconds)
    lag = json.loads(lag_file.read_text())
    for name, count in sorted(counts.items()):
        print(f"{name:24} {count:7}")
    print(
        f"memory {figures['before_mb']:.0f} MB before, {figures['most_mb']:.0f} MB at most; lag of the loop, ms: {lag}"
    )
    print(json.dumps({"benchmark": "slow_readers", "streams": streams, "answers": counts, "lag_ms": lag, **figures}))
    return 1 if any(name.endswith(("INCOMPLETE", "cut")) for name in counts) else 0


def main() -> None:
    """Runs the clients and prints what they received."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--decode-ms", type=float, default=30.0, help="of an iteration (default %(default)s)")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(asyncio.run(_run(args.streams, args.seconds, args.decode_ms, folder)))


if __name__ == "__main__":
    main()
