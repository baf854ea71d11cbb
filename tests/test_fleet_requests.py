"""Several `caraserve serve` processes forward requests to one another, while one of them is killed or terminated."""

import json
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations
from pathlib import Path
from threading import Semaphore
from typing import Any

from tests.processes import NAMES, Server, all_alive, fleet, free_ports, until

TOKENS = 256  # long enough for an instance to be killed meanwhile
SHORT = 48
LONG = 1000  # none of several streams ends before the last has begun
VOICES = ("caraserve-demo", "poet", "chef", "pirate")
ASKED: list[dict[str, Any]] = [
    {"model": voice, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, **how}
    for voice in VOICES
    for prompt, how in (("The sea", {"temperature": 0}), ("A storm", {"temperature": 1, "seed": 7}))
]
SHORT_ASKED = [asked | {"max_tokens": SHORT} for asked in ASKED]


def stream(server: Server, asked: dict[str, Any], begun: Semaphore | None = None) -> tuple[list[int], str | None]:
    """Returns the tokens of a stream and the error with which it ended; the last event must be [DONE] in any case.
    `begun`: released when its first event has come."""
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(asked | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    tokens: list[int] = []
    error = None
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = list[str]()
        for line in answer:
            if line.startswith(b"data: "):
                lines.append(line.decode().removeprefix("data: ").strip())
                if begun is not None and len(lines) == 1:
                    begun.release()
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        document = json.loads(line)
        if "error" in document:
            error = document["error"]["code"]
        else:
            tokens += document["choices"][0]["token_ids"]
    return tokens, error


def whole(server: Server, asked: dict[str, Any]) -> list[int]:
    tokens: list[int] = server.ask("/v1/completions", asked)["choices"][0]["token_ids"]
    return tokens


def first_tokens(server: Server) -> int:
    """Returns the number of answers that a server has begun so far."""
    return int(server.metric("vllm:time_to_first_token_seconds_count{"))


def routing(name: str) -> tuple[str, str]:
    """Returns round-robin for a and b, so that each instance has some of their requests when it is killed. The
    others route by cost, with which the instance is not predictable."""
    return "--routing", "round-robin" if name in "ab" else "auto"


def test_every_request_ends_when_an_instance_is_killed_or_terminated(tmp_path: Path) -> None:
    with fleet(free_ports(len(NAMES)), tmp_path, routing) as servers, ThreadPoolExecutor(32) as pool:
        a, b, c, d = servers.values()
        until(lambda: all_alive(servers), 4)
        # The right answers: the same tokens on every instance.
        right = list(pool.map(partial(whole, a), ASKED))
        assert all(len(tokens) == TOKENS for tokens in right)
        starts = [tokens[:SHORT] for tokens in right]
        assert list(pool.map(partial(whole, b), SHORT_ASKED)) == starts
        vectors = [a.answer("/v1/embeddings", {"model": "poet", "input": "The sea"}) for _ in servers]
        assert all(one["data"] == vectors[0][0]["data"] for one, _ in vectors)
        assert {headers["x-caraserve-instance"] for _, headers in vectors} == set(NAMES)  # each in its turn

        before = first_tokens(c)
        streams = [(index, pool.submit(stream, one, ASKED[index])) for index in range(6) for one in (a, b)]
        until(lambda: first_tokens(c) >= before + 2, 30)
        c.process.kill()
        late = [(index, pool.submit(whole, one, SHORT_ASKED[index])) for index in range(4) for one in (a, b, d)]
        late_streams = [(index, pool.submit(stream, one, SHORT_ASKED[index])) for index in range(4) for one in (a, b)]
        assert [answer.result(60) for _, answer in late] == [starts[index] for index, _ in late]
        assert [answer.result(60) for _, answer in late_streams] == [(starts[index], None) for index, _ in late_streams]
        ended = [(index, *answer.result(60)) for index, answer in streams]
        lost = [tokens == right[index][: len(tokens)] for index, tokens, code in ended if code == "instance_lost"]
        kept = [tokens == right[index] for index, tokens, code in ended if code is None]
        assert len(lost) + len(kept) == len(streams), [code for _, _, code in ended]
        assert lost, "nothing was under way on the one that was killed"
        assert all(lost)
        assert all(kept)
        # The metrics of the remaining instances agree: each lost stream is counted once.
        metrics = [line for one in (a, b, d) for line in one.ask("/metrics").splitlines()]
        counted = [line for line in metrics if "lost_streams_total{" in line]
        assert sum(int(line.split()[-1]) for line in counted) == len(lost)

        # A terminated instance finishes the requests that it has begun, without an error for any client.
        before = first_tokens(b)
        streams = [(index, pool.submit(stream, a, ASKED[index])) for index in range(8)]
        until(lambda: first_tokens(b) >= before + 2, 30)
        b.process.send_signal(signal.SIGTERM)
        late = [(index, pool.submit(whole, a, SHORT_ASKED[index])) for index in range(4)]
        assert [answer.result(60) for _, answer in late] == [starts[index] for index, _ in late]
        assert [answer.result(60) for _, answer in streams] == [(right[index], None) for index, _ in streams]
        assert b.process.wait(20) == 0


def test_a_drain_that_times_out_ends_forwarded_streams_with_an_error(tmp_path: Path) -> None:
    def more(name: str) -> tuple[str, ...]:
        return *routing(name), "--drain-timeout", "0.1"

    with fleet(free_ports(2), tmp_path, more) as servers, ThreadPoolExecutor(16) as pool:
        a, b = servers.values()
        until(lambda: bool(whole(a, ASKED[0])) and first_tokens(b) > 0, 10)  # until a forwards requests to b
        before = first_tokens(b)
        asked, begun = [one | {"max_tokens": LONG} for one in (*ASKED, *ASKED)], Semaphore(0)
        streams = [pool.submit(stream, a, one, begun) for one in asked]
        assert all(begun.acquire(timeout=30) for _ in streams)
        assert before < first_tokens(b) < before + len(streams), "a answers some of them, and b the others"
        a.process.send_signal(signal.SIGTERM)
        ended = [answer.result(60) for answer in streams]
        assert {code for _, code in ended} == {"draining"}
        assert a.process.wait(20) == 0


def test_requests_are_forwarded_in_modes_that_load_whole_adapters(tmp_path: Path) -> None:
    """Instances in these modes need no profile to load adapters, but others route to them by it."""
    modes = {"a": "cached", "b": "ondemand"}

    def serving(name: str) -> tuple[str, ...]:
        return "--loading-mode", modes[name], "--routing", "round-robin"

    with fleet(free_ports(len(modes)), tmp_path, serving) as servers:
        until(lambda: all(server.states() == dict.fromkeys(modes, "alive") for server in servers.values()), 4)
        for one, other in permutations(servers.values()):
            until(partial(forwards, one, other), 5)


def forwards(one: Server, other: Server) -> bool:
    """Sends a request to one instance; returns whether the other has answered one for it, now or before."""
    whole(one, SHORT_ASKED[2])
    return other.metric("caraserve:received_requests_total{") > 0
