"""Measures the CPU time that the server's main thread spends for each streamed token, over real HTTP.

    .venv/bin/python -m scripts.bench.host_path [--tree OTHER_CHECKOUT] [--device demo]

Starts the server with the demo model or with a clock as its device (scripts/bench/clock_server.py), and keeps a number
of streams open, each request followed by the next. A client on another core counts events. With `--tree` the servers
of several checkouts run in turns, so that their figures compare. The last line of stdout is one JSON document.
"""

import argparse
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench.checkout_server import CORES, OWN, server_of

_SETTLE_S = 2.0
_MOST_STREAMS = ("--max-num-seqs", "512")
_PROMPT = [65 + number % 20 for number in range(32)]
_TEXT = {"max_tokens": 0, "stream": True, "temperature": 0, "ignore_eos": True}
_CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
# Path and fields by kind of request.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": _PROMPT}),
    "chat": ("/v1/chat/completions", _CHAT),
    "logprobs": ("/v1/completions", {"prompt": _PROMPT, "logprobs": 1}),
    "stop": ("/v1/completions", {"prompt": _PROMPT, "stop": ["\x01\x02"]}),
}


@dataclass(frozen=True)
class Figure:
    """What one server took with one load."""

    tree: str
    kind: str
    streams: int
    tokens: int
    tokens_per_s: float
    main_us: float  # CPU time of the main thread for each token
    process_us: float  # of all threads


def main() -> None:
    """Measures every load on every server in turns, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to measure too")
    parser.add_argument("--device", choices=("clock", "demo"), default="clock", help="(default %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=list(_KINDS), default=["completions"], metavar="KIND")
    parser.add_argument("--streams", type=int, nargs="+", default=[256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128], help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement, after the start")
    args = parser.parse_args()
    trees, clock = [OWN, *args.tree], () if args.device == "clock" else None
    loads = [(kind, streams, tokens) for kind in args.kinds for streams in args.streams for tokens in args.tokens]
    figures: list[Figure] = []
    print(f"{'checkout':24} {'kind':12} {'streams':>7} {'tokens':>6} {'tokens/s':>8} {'main µs':>8} {'all µs':>7}")
    for number in range(args.rounds):
        for tree in trees if number % 2 == 0 else trees[::-1]:
            with server_of(tree, clock=clock, options=_MOST_STREAMS) as (port, pid):
                for load in loads:
                    figures.append(_measure(tree, port, pid, load, args.seconds))
                    _show(figures[-1])
    for load in loads:
        for tree in trees:
            mine = [one for one in figures if (one.tree, one.kind, one.streams, one.tokens) == (tree.name, *load)]
            main_us, process_us = median([one.main_us for one in mine]), median([one.process_us for one in mine])
            _show(Figure(tree.name, *load, median([one.tokens_per_s for one in mine]), main_us, process_us), "median")
    document = {"benchmark": "host_path", "device": args.device, "figures": [asdict(one) for one in figures]}
    print(json.dumps(document))


def _show(one: Figure, note: str = "") -> None:
    line = f"{one.tree:24} {one.kind:12} {one.streams:7} {one.tokens:6} {one.tokens_per_s:8.0f}"
    print(f"{line} {one.main_us:8.1f} {one.process_us:7.1f} {note}", flush=True)


def _measure(tree: Path, port: int, pid: int, load: tuple[str, int, int], seconds: float) -> Figure:
    kind, streams, tokens = load
    path, fields = _KINDS[kind]
    body = json.dumps(_TEXT | fields | {"max_tokens": tokens}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with _streams(port, streams, request) as counter:
        counter.read(_SETTLE_S)
        before = counter.events, _cpu_s(pid, pid), _cpu_s(pid), time.monotonic()
        counter.read(seconds)
        after = counter.events, _cpu_s(pid, pid), _cpu_s(pid), time.monotonic()
    events, main_s, process_s, took_s = (end - begin for begin, end in zip(before, after, strict=True))
    assert events > 0, "no event came"
    return Figure(tree.name, *load, events / took_s, 1e6 * main_s / events, 1e6 * process_s / events)


def _cpu_s(pid: int, thread: int | None = None) -> float:
    """Returns the CPU time of a thread, or of all threads that a process has now."""
    threads: Sequence[str | int] = os.listdir(f"/proc/{pid}/task") if thread is None else [thread]
    return sum(int(Path(f"/proc/{pid}/task/{one}/schedstat").read_text().split()[0]) for one in threads) / 1e9


class _Counter:
    """Reads streams and counts their events; sends the next request where an answer has ended."""

    def __init__(self, sockets: Sequence[socket.socket], request: bytes) -> None:
        self.events = 0
        self._request = request
        self._selector = selectors.DefaultSelector()
        for one in sockets:
            self._selector.register(one, selectors.EVENT_READ)
            one.sendall(request)

    def read(self, seconds: float) -> None:
        """Reads for some time."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for key, _ in self._selector.select(0.2):
                stream = key.fileobj
                assert isinstance(stream, socket.socket)
                piece = stream.recv(1 << 16)
                if not piece:
                    raise SystemExit("The server has closed a stream.")
                self.events += piece.count(b"data: {")
                if b"[DONE]" in piece:
                    stream.sendall(self._request)


@contextmanager
def _streams(port: int, count: int, request: bytes) -> Iterator[_Counter]:
    """Opens streams on another core than the server's."""
    os.sched_setaffinity(0, CORES[-1:])
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    try:
        yield _Counter(sockets, request)
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    main()
