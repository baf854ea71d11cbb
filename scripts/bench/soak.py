"""Sends one kind of request again and again, and checks the server's memory and its answers to probes.

    .venv/bin/python scripts/bench/soak.py [--only streams --only "half requests"] [--scale 0.1] [--save DIR]

Each load has its own `caraserve serve` with the demo model. Another process sends the requests; meanwhile this one asks
for `/health` over a new connection every 100 ms, and looks at the server's memory. The row of a load says by how much
that has grown after the first requests, how many probes failed or took longest, and whether this is within the bounds
of the load. The last line of stdout is one JSON document; exit code 1 if a bound was exceeded.

    streams        short streamed requests, over and over
    refused NNN    requests that are refused while half of their body has arrived
    half requests  more connections than the server takes, each with half of a request
    begun at once  as many streams as connections, all sent in the same moment
    slow readers   answers with n=128, made faster than their clients read them
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from caraserve.bench.records import machine, versions
from caraserve.bench.report.files import as_json, make_folder, write_files
from caraserve.bench.servers import own_server

_KEY = "soak"
_PROBE_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_LINGER_S = 0.01  # for which a refused client leaves its connection open: the server then waits for the rest
_SLOW_S, _SLOW_BYTES, _SLOW_PAUSE_S = 240.0, 1 << 19, 8.0  # slow readers read so much, then nothing for 8 s
_SHORT = {"prompt": "The sea", "max_tokens": 1, "stream": True, "ignore_eos": True}
_LONG = {"prompt": "The sea", "max_tokens": 770, "stream": True, "ignore_eos": True, "logprobs": 20, "n": 128}
# The KV cache is full of reusable blocks at once; it would else grow for thousands of requests.
_SMALL = ("--kv-cache-bytes", "4MiB", "--no-log-requests", "--api-key", _KEY)

Address = tuple[str, int]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _head(length: int, path: str = "/v1/completions", key: str = _KEY, kind: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode()


def _whole(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return _head(len(content)) + content


_HALVES = {
    "401": _head(1000, key="other"),
    "404": _head(1000, "/v1/nothing"),
    "413": _head(1 << 40),
    "415": _head(1000, kind="text/plain"),
}


async def _send_all(load: "Load", count: int, address: Address, ended: Any) -> None:
    """Sends `count` requests of a load; `ended` counts them for the process that measures."""
    left = iter(range(count))

    async def go() -> None:
        connection: Connection | None = None
        for _ in left:
            try:
                connection = connection or await asyncio.open_connection(*address)
                is_usable = await load.one(connection)
            except (ConnectionError, asyncio.IncompleteReadError):
                if not load.may_break:
                    raise
                is_usable = False
            if connection is not None and not is_usable:
                connection[1].transport.abort()
                connection = None
            ended.value += 1
        if connection is not None:
            connection[1].transport.abort()

    await asyncio.gather(*(go() for _ in range(load.together)))


async def _stream(connection: Connection) -> bool:
    reader, writer = connection
    writer.write(_whole(_SHORT))
    status = await _status(reader)
    if status != 200:
        raise SystemExit(f"a stream was answered {status}")
    await reader.readuntil(b"\r\n0\r\n\r\n")
    return True


async def _refused(connection: Connection, status: str) -> bool:
    reader, writer = connection
    writer.write(_HALVES[status] + b"{")
    seen = await _status(reader)
    if str(seen) != status:
        raise SystemExit(f"a request to be answered {status} was answered {seen}")
    await asyncio.sleep(_LINGER_S)
    return False


async def _half(connection: Connection) -> bool:
    reader, writer = connection
    writer.write(_head(100_000) + b"{")
    await reader.read()  # until the server closes it
    return False


async def _slow(connection: Connection) -> bool:
    reader, writer = connection
    writer.write(_whole(_LONG))
    end_s = time.monotonic() + _SLOW_S
    while time.monotonic() < end_s:
        await reader.readexactly(_SLOW_BYTES)
        await asyncio.sleep(_SLOW_PAUSE_S)
    return False


async def _status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1])


def _refusal(status: str) -> "Load":
    async def refused(connection: Connection) -> bool:
        return await _refused(connection, status)

    return Load(refused, 10_000, 32, 1_000)


@dataclass(frozen=True)
class Load:
    """What is sent, and within which bounds the server must stay. `one` sends a request and returns whether its
    connection may be used again."""

    one: Callable[[Connection], Awaitable[bool]]
    count: int  # of requests
    together: int
    settled: int = 0  # requests after which memory must not grow
    most_grown_mb: float = 5.0
    most_failed: int = 0  # probes
    slowest_probe_s: float = 1.0
    may_break: bool = False  # whether the server may close a connection without an answer
    options: tuple[str, ...] = ()  # of the server


_LOADS = {
    "streams": Load(_stream, 100_000, 64, 10_000),
    **{f"refused {status}": _refusal(status) for status in _HALVES},
    "half requests": Load(_half, 20_000, 4_300, most_grown_mb=200.0, may_break=True),
    "begun at once": Load(_stream, 2_000, 2_000, most_grown_mb=200.0, slowest_probe_s=0.5),
    "slow readers": Load(_slow, 8, 8, most_grown_mb=250.0, may_break=True, options=("--kv-cache-bytes", "96MiB")),
}


@dataclass(frozen=True)
class Row:
    """The measurements of one load."""

    requests: int
    seconds: float
    settled_mb: float  # resident memory of the server after the first requests
    grown_mb: float  # from then on, at most
    probes: int
    failed_probes: int
    slowest_probe_s: float
    is_within_bounds: bool


def _send(name: str, scale: float, address: Address, ended: Any) -> None:
    load = _LOADS[name]
    count = max(load.together, round(scale * load.count))
    asyncio.run(_send_all(load, count, address, ended))


def _memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def _probe_s(address: Address) -> float | None:
    """Returns how long an answer to `/health` took over a new connection; None if there was none."""
    began_s = time.perf_counter()
    try:
        with contextlib.closing(http.client.HTTPConnection(*address, timeout=_PROBE_TIMEOUT_S)) as connection:
            connection.request("GET", "/health")
            if connection.getresponse().status != 200:
                return None
    except (OSError, http.client.HTTPException):
        return None
    return time.perf_counter() - began_s


def _measure(name: str, scale: float, url: str, pid: int) -> Row:
    load, context = _LOADS[name], get_context("spawn")
    address = urlsplit(url).hostname or "", urlsplit(url).port or 0
    ended = context.Value("q", 0)
    settled_mb = highest_mb = _memory_mb(pid)
    probes: list[float | None] = []
    sender = context.Process(target=_send, args=(name, scale, address, ended))
    began_s = time.perf_counter()
    sender.start()
    while sender.is_alive():
        probes.append(_probe_s(address))
        highest_mb = max(highest_mb, memory_mb := _memory_mb(pid))
        if load.settled and ended.value <= scale * load.settled:
            settled_mb = highest_mb = memory_mb
        sender.join(_PROBE_S)
    if sender.exitcode:
        raise SystemExit(f"the load {name} ended with exit code {sender.exitcode}")
    failed, slowest_s = Counter(probes)[None], max([one for one in probes if one is not None], default=0.0)
    grown_mb = max(0.0, highest_mb - settled_mb)
    is_within = grown_mb <= load.most_grown_mb and failed <= load.most_failed and slowest_s <= load.slowest_probe_s
    seconds, memory = round(time.perf_counter() - began_s, 1), (round(settled_mb, 1), round(grown_mb, 1))
    return Row(ended.value, seconds, *memory, len(probes), failed, round(slowest_s, 3), is_within)


async def _measure_all(names: list[str], scale: float, server_arguments: list[str]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    print("| load | requests | s | MB then | MB more | probes | failed | slowest s | |\n" + 9 * "| --- " + "|")
    for name in names:
        async with own_server([*_SMALL, *_LOADS[name].options, *server_arguments], asyncio.Event()) as server:
            rows[name] = row = await asyncio.to_thread(_measure, name, scale, server.url, server.pid)
        *numbers, is_within = asdict(row).values()
        print(f"| {name} | {' | '.join(map(str, numbers))} | {'ok' if is_within else 'FAILED'} |", flush=True)
    return rows


def main() -> None:
    """Runs the loads, and prints a row for each and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(_LOADS), action="append", help="this load; may be repeated")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests (default %(default)s)")
    parser.add_argument("--save", type=Path, metavar="DIR")
    args, server_arguments = parser.parse_known_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    began_load = os.getloadavg()
    rows = asyncio.run(_measure_all(args.only or list(_LOADS), args.scale, server_arguments))
    head = {"bench": "soak", "machine": machine(), "versions": versions(), "scale": args.scale, "load": began_load}
    found = head | {"loads": {name: asdict(row) for name, row in rows.items()}}
    if args.save is not None:
        make_folder(args.save)
        write_files(args.save, {"soak.json": as_json(found)})
    print(json.dumps(found))
    sys.exit(0 if all(row.is_within_bounds for row in rows.values()) else 1)


if __name__ == "__main__":
    main()
