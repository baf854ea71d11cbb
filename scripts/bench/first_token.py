"""Measures the time to the first token while answers are decoded, over real HTTP, with a clock as the device.

    .venv/bin/python -m scripts.bench.first_token [--tree OTHER_CHECKOUT] [--rows 0 64] [--rates 9]

Requests arrive at random (Poisson) while some streams, `--rows`, are decoded without end. The clock takes `--decode-ms`
for an iteration, `--prompt-ms` more for one with a prompt, and begins none before it has been launched, which takes
`--launch-ms`. With `--tree` the servers of several checkouts run in turns, so that their figures compare. The last line
of stdout is one JSON document.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

import uvloop

from caraserve.bench.client.connection import Connections, HttpExchange
from caraserve.bench.client.player import Pacer, undisturbed
from scripts.bench.checkout_server import CORES, OWN, server_of

_SETTLE_S = 2.0
_PROMPT_TOKENS, _ANSWER_TOKENS = 65, 130
_STREAM_TOKENS = 900  # of an answer that is only decoded beside; the next one follows
_EVENT = b"data: {"
_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True)
class Figure:
    """What clients of one server saw in one run. TTFT and TPOT are those of the requests that arrive at random."""

    tree: str
    rows: int
    rate: float
    requests: int
    ttft_ms: float  # mean
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_ms: float  # median
    tokens_per_s: float  # of all streams


def main() -> None:
    """Measures every load on every server in turns, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to measure too")
    parser.add_argument("--rows", type=int, nargs="+", default=[0], help="streams decoded beside (default 0)")
    parser.add_argument("--rates", type=float, nargs="+", default=[9.0], help="of arrivals, a second (default 9)")
    parser.add_argument("--decode-ms", type=float, default=7.0, help="(default %(default)s)")
    parser.add_argument("--prompt-ms", type=float, default=3.0, help="(default %(default)s)")
    parser.add_argument("--launch-ms", type=float, default=0.5, help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of arrivals in each run (default %(default)s)")
    args = parser.parse_args()
    trees = [OWN, *args.tree]
    clock = [f"--{name}-ms={getattr(args, f'{name}_ms')}" for name in ("decode", "prompt", "launch")]
    loads = [(rows, rate) for rows in args.rows for rate in args.rates]
    figures: list[Figure] = []
    print(f"{'checkout':16} rows  rate    n   TTFT    p50    p95   TPOT tokens/s")
    for number in range(args.rounds):
        for tree in trees if number % 2 == 0 else trees[::-1]:
            with server_of(tree, clock=clock, options=("--max-num-seqs", "512"), is_urgent=True) as (port, _):
                os.sched_setaffinity(0, CORES[-1:])
                for rows, rate in loads:
                    figures.append(uvloop.run(_measure(tree.name, port, rows, rate, args.seconds, number)))
                    _show(figures[-1])
    for load in loads:
        for tree in trees:
            mine = [one for one in figures if (one.tree, one.rows, one.rate) == (tree.name, *load)]
            _show(_median(mine), "median")
    print(json.dumps({"benchmark": "first_token", "clock": clock, "figures": [asdict(one) for one in figures]}))


async def _measure(tree: str, port: int, rows: int, rate: float, seconds: float, seed: int) -> Figure:
    return await _Load(port, rows, rate, seed).measure(tree, seconds)


def _show(one: Figure, note: str = "") -> None:
    ttft = f"{one.ttft_ms:6.2f} {one.ttft_p50_ms:6.2f} {one.ttft_p95_ms:6.2f}"
    load = f"{one.tree:16} {one.rows:4} {one.rate:5g} {one.requests:4}"
    print(f"{load} {ttft} {one.tpot_ms:6.3f} {one.tokens_per_s:8.1f} {note}", flush=True)


def _median(figures: Sequence[Figure]) -> Figure:
    """Returns the medians of the runs of one load on one server."""
    measured = ("ttft_ms", "ttft_p50_ms", "ttft_p95_ms", "tpot_ms", "tokens_per_s")
    medians = {name: median([getattr(one, name) for one in figures]) for name in measured}
    first = figures[0]
    return Figure(first.tree, first.rows, first.rate, sum(one.requests for one in figures), **medians)


class _Load:
    """Streams without end, and requests that arrive at random. Create it in the running event loop."""

    def __init__(self, port: int, rows: int, rate: float, seed: int) -> None:
        self._rows, self._rate, self._random = rows, rate, random.Random(seed)
        self._connections = Connections(f"http://127.0.0.1:{port}", None)
        self._exchanges: list[HttpExchange] = []
        self._open = 0
        self._ended = asyncio.Event()

    async def measure(self, tree: str, seconds: float) -> Figure:
        """Sends requests for some time, and waits for their answers."""
        await self._connections.warm_up()
        arrived: list[HttpExchange] = []
        with undisturbed():
            for _ in range(self._rows):  # of different lengths, so that they do not end together
                self._stream(self._random.randrange(1, _STREAM_TOKENS))
            moments_s = [time.perf_counter() + _SETTLE_S]
            while moments_s[-1] < moments_s[0] + seconds:
                moments_s.append(moments_s[-1] + self._random.expovariate(self._rate))
            self._open = len(moments_s)
            Pacer(moments_s, lambda _: arrived.append(self._send(_ANSWER_TOKENS, self._end)))
            await self._ended.wait()
        self._connections.close()
        times = [(one.sent_s, [at_s for at_s, piece in one.pieces if _EVENT in piece]) for one in arrived]
        ttft_ms = sorted(1000 * (events[0] - sent_s) for sent_s, events in times)
        tpot_ms = [1000 * (events[-1] - events[0]) / (_ANSWER_TOKENS - 1) for _, events in times]
        pieces = [piece for one in self._exchanges for piece in one.pieces]
        tokens = sum(piece.count(_EVENT) for at_s, piece in pieces if moments_s[0] <= at_s < moments_s[-1])
        mean_ms, p95_ms = fmean(ttft_ms), ttft_ms[int(0.95 * len(ttft_ms))]
        tokens_per_s = tokens / (moments_s[-1] - moments_s[0])
        return Figure(
            *(tree, self._rows, self._rate, len(times)),
            *(mean_ms, median(ttft_ms), p95_ms, median(tpot_ms), tokens_per_s),
        )

    def _stream(self, tokens: int) -> None:
        self._send(tokens, lambda ended: None if ended.error else self._stream(_STREAM_TOKENS))

    def _end(self, exchange: HttpExchange) -> None:
        if exchange.status != 200 or exchange.error is not None:
            raise SystemExit(f"A request failed: {exchange.error or exchange.body!r}")
        self._open -= 1
        if self._open == 0:
            self._ended.set()

    def _send(self, tokens: int, done: Callable[[HttpExchange], None]) -> HttpExchange:
        prompt = [self._random.randrange(16, 240) for _ in range(_PROMPT_TOKENS)]  # cached for no other request
        fields = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        body = json.dumps(fields).encode()
        exchange = HttpExchange(f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body, done)
        self._exchanges.append(exchange)
        self._connections.send(exchange)
        return exchange


if __name__ == "__main__":
    main()
