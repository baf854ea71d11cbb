"""Measures how long a request with a hostile body delays a server's other clients.

    .venv/bin/python scripts/bench/loop_lag.py [--url http://127.0.0.1:8300] [--only ids --only chat]

Starts `caraserve serve` with the demo model, or uses the server at `--url`, and sends one body after another: long
texts, many values, large answers. Meanwhile another process requests `/health` and reads a client's stream. The line
of each body has the longest time without a response from either, in the best of several attempts; the line `nothing`
is the delay of machine and client alone. The last line of stdout is one JSON document.
"""

import argparse
import asyncio
import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from urllib.parse import urlsplit

from caraserve.bench.servers import own_server

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_EMBEDDINGS, _RERANK = "/v1/embeddings", "/v1/rerank"
_TEXT, _PROMPT_OF_100 = b"The sea is blue. ", b"[10" + 99 * b",10" + b"]"
_LONG_TEXT = b'"%b"' % (25 * _TEXT)[:-1]
_SCORED = b'"echo":true,"max_tokens":0,"logprobs":20'
# Path, form of the body, what stands in it for %b, and how many times. %d is its number.
_BODIES: dict[str, tuple[str, bytes, bytes, int]] = {
    "nothing": ("/v1/models", b"", b"", 0),
    "16 answers": (_COMPLETIONS, b'{"prompt":"a","max_tokens":200,"ignore_eos":true,"n":16%b}', b"", 0),
    "15 MB text": (_COMPLETIONS, b'{"prompt":"%b"}', _TEXT, 900_000),
    "15 MB letter": (_COMPLETIONS, b'{"prompt":"%b"}', b"a", 15_000_000),
    "4 MB text": (_COMPLETIONS, b'{"prompt":"%b"}', _TEXT, 240_000),
    "4 MB chat": (_CHAT, b'{"messages":[{"role":"user","content":"%b"}]}', _TEXT, 240_000),
    "4 MB to count": ("/tokenize", b'{"prompt":"%b"}', _TEXT, 240_000),
    "tokens by name": ("/tokenize", b'{"prompt":"%b","return_token_strs":true}', _TEXT, 6_000),
    "text parts": (_CHAT, b'{"messages":[{"role":"user","content":[%b]}]}', b'{"type":"text","text":"a"},', 400_000),
    "5M ids": (_COMPLETIONS, b'{"prompt":[%b1]}', b"10,", 5_000_000),
    "ids to decode": ("/detokenize", b'{"tokens":[%b1]}', b"10,", 60_000),
    "lists": (_COMPLETIONS, b'{"prompt":[%b1]}', b"[],", 4_000_000),
    "biases": (_COMPLETIONS, b'{"prompt":"a","logit_bias":{%b"x":1}}', b'"%d":1,', 1_000_000),
    "unknown fields": (_COMPLETIONS, b'{"prompt":"a","max_tokens":1,%b"x":1}', b'"x%d":1,', 1_000_000),
    "60k unknown": (_COMPLETIONS, b'{"prompt":"a","max_tokens":1,%b"x":1}', b'"x%d":1,', 60_000),
    "2048 texts": (_COMPLETIONS, b'{"prompt":[%b"The"]}', b'"The sea is",', 2047),
    "2048 streamed": (_COMPLETIONS, b'{"prompt":[%b"The"],"stream":true}', b'"The sea is",', 2047),
    "2048 embedded": (_EMBEDDINGS, b'{"input":[%b"The"]}', b'"The sea is",', 2047),
    "2048 long ones": (_EMBEDDINGS, b'{"input":[%b"The"]}', _LONG_TEXT + b",", 2047),
    "2047 ranked": (_RERANK, b'{"query":"The sea","documents":[%b"The"]}', _LONG_TEXT + b",", 2046),
    "2047 compared": ("/v1/score", b'{"text_1":"The sea","text_2":[%b"The"]}', b'"The sea is",', 2046),
    "2048 prompts": (_COMPLETIONS, b'{"prompt":[%b[10]],"max_tokens":1}', b"[10],", 2047),
    "2048 scored": (_COMPLETIONS, b'{"prompt":[%b[10]],"max_tokens":16,"logprobs":20}', b"[10],", 2047),
    "2M logprobs": (_COMPLETIONS, b'{"prompt":[%b[10]],' + _SCORED + b"}", _PROMPT_OF_100 + b",", 960),
    "too many": (_COMPLETIONS, b'{"prompt":[%b[10]],' + _SCORED + b"}", _PROMPT_OF_100 + b",", 2047),
    "streamed": (_COMPLETIONS, b'{"prompt":[%b[10]],"stream":true,' + _SCORED + b"}", _PROMPT_OF_100 + b",", 120),
    "128 streamed": (_COMPLETIONS, b'{"prompt":"a","max_tokens":100,"n":128,"stream":true,"logprobs":20%b}', b"", 0),
}
_STREAM = b'{"prompt":"The sea","max_tokens":900,"ignore_eos":true,"stream":true,"user":"another"}'
_NOTHING_S = 1.0
_AFTER_S = 0.05  # watched after the answer too, when the server frees the request's memory


@dataclass(frozen=True)
class Seen:
    """The effect of one body: the time of its own answer, and the longest gaps in the responses to other clients."""

    status: int
    answer_bytes: int
    took_s: float
    health_ms: float
    stream_ms: float


def _ask(url: str, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    with suppress(ConnectionError):  # the server refused the body before all of it was sent
        connection.request(method, path, body, {"Content-Type": "application/json"})
    return connection.getresponse()


def _send(url: str, name: str) -> tuple[int, int, float]:
    """Sends a body; runs in another process. Returns the status, the bytes of the answer, and the seconds it took."""
    path, form, repeated, times = _BODIES[name]
    many = b"".join([repeated % number for number in range(times)]) if b"%d" in repeated else repeated * times
    body = form % many if form else None
    began_s, answer_bytes = time.perf_counter(), 0
    with _ask(url, "POST" if body else "GET", path, body) as answer:
        while piece := answer.read(1 << 20):
            answer_bytes += len(piece)
    took_s = time.perf_counter() - began_s
    time.sleep(_AFTER_S if body else _NOTHING_S)
    return answer.status, answer_bytes, took_s


def _health(url: str) -> Iterator[None]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    while True:
        connection.request("GET", "/health")
        connection.getresponse().read()
        yield
        time.sleep(0.001)


def _stream(url: str) -> Iterator[None]:
    """Requests streams one after another, and yields at each of their events."""
    while True:
        with _ask(url, "POST", _COMPLETIONS, _STREAM) as answer:
            while answer.readline().startswith(b"data"):
                answer.readline()
                yield


def _longest_ms(signs: Iterator[None], begun: threading.Barrier, stop: threading.Event) -> float:
    """Returns the longest time between two items of `signs` until `stop` is set."""
    next(signs)
    begun.wait()
    longest_s, last_s = 0.0, time.perf_counter()
    while not stop.is_set():
        next(signs)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return round(1000 * longest_s, 1)


def _measure(url: str, name: str, sender: ProcessPoolExecutor) -> Seen:
    begun, stop = threading.Barrier(3), threading.Event()
    with ThreadPoolExecutor(2) as watchers:
        longest = [watchers.submit(_longest_ms, signs(url), begun, stop) for signs in (_health, _stream)]
        begun.wait()
        try:
            status, answer_bytes, took_s = sender.submit(_send, url, name).result()
        finally:
            stop.set()
        health_ms, stream_ms = [one.result() for one in longest]
    return Seen(status, answer_bytes, round(took_s, 2), health_ms, stream_ms)


async def _measure_all(url: str | None, arguments: list[str], names: list[str], attempts: int) -> dict[str, Seen]:
    best: dict[str, Seen] = {}
    async with AsyncExitStack() as stack:
        url = url or (await stack.enter_async_context(own_server(arguments, asyncio.Event()))).url
        print(
            f"{'body':16} {'status':>6} {'answer MB':>9} {'took s':>7} {'/health ms':>10} {'stream ms':>9}", flush=True
        )
        sender = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        for name in names:
            seen = [await asyncio.to_thread(_measure, url, name, sender) for _ in range(attempts)]
            best[name] = one = min(seen, key=lambda each: each.health_ms)
            numbers = f"{one.status:6} {one.answer_bytes / 1e6:9.1f} {one.took_s:7.2f}"
            print(f"{name:16} {numbers} {one.health_ms:10.1f} {one.stream_ms:9.1f}", flush=True)
    return best


def main() -> None:
    """Measures the delays, and prints a line for each body and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already; its model's context must hold 1,000 tokens")
    parser.add_argument("--only", choices=list(_BODIES), action="append", help="this body; may be repeated")
    parser.add_argument("--attempts", type=int, default=3, help="with each body (default %(default)s)")
    args, server_arguments = parser.parse_known_args()
    best = asyncio.run(_measure_all(args.url, server_arguments, args.only or list(_BODIES), args.attempts))
    silences = {name: asdict(seen) for name, seen in best.items()}
    print(json.dumps({"benchmark": "loop_lag", "load": os.getloadavg(), "bodies": silences}))


if __name__ == "__main__":
    main()
