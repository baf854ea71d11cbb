"""Measures how much one greedy client delays another one that needs new grammars or an adapter's chat template.

    .venv/bin/python scripts/bench/greedy_client.py [--url http://127.0.0.1:8300] [--only grammars]

Starts `caraserve serve` with the demo model, or uses the server at `--url`. It gives two of its adapters chat
templates, and takes them away at the end. In each attack, many connections of the user `greedy` send one request after
another as fast as they are answered; meanwhile the user `modest` sends a small request every 50 ms, and a third one
reads a stream of the base model. The lines say how the modest user's requests ended, without and with the attack, and
the longest gap in the stream. The last line of stdout is one JSON document.
"""

import argparse
import asyncio
import http.client
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any
from urllib.parse import urlsplit

from caraserve.bench.servers import own_server

_CHAT = "/v1/chat/completions"
_PAUSE_S = 0.05  # between the modest user's requests
_LOOPS = (
    "{% for m in messages %}{% for k in messages %}{% if k.content == m.content %}{% endif %}{% endfor %}{% endfor %}"
    "{{ messages[-1].content }}"
)
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHORT = "{{ messages[-1].content }}!"
_STREAM = {"prompt": "The sea", "max_tokens": 900, "ignore_eos": True, "stream": True, "user": "third"}
_WORDS = "|".join(f"w{number}" for number in range(24_000))

Body = dict[str, Any]


def _chat(user: str, messages: int = 1, model: str | None = None, **more: Any) -> Body:
    body = {"messages": [{"role": "user", "content": "x"}] * messages, "max_tokens": 1, "user": user} | more
    return body if model is None else body | {"model": model}


def _slow_grammar(number: int) -> Body:
    """Takes about 0.14 s to compile with the demo's vocabulary."""
    return _chat("greedy", structured_outputs={"regex": f"(z{number}_{time.time_ns()}|{_WORDS}){{1,50}}"})


def _endless_grammar(number: int) -> Body:
    """Takes longer to compile than is allowed."""
    schema = {"type": "integer", "multipleOf": 9_999_991 + 2 * (time.time_ns() % 10**6)}
    return _chat("greedy", structured_outputs={"json": schema})


def _small_grammar(number: int) -> Body:
    return _chat("modest", structured_outputs={"choice": [f"yes{time.time_ns()}", "no"]})


@dataclass(frozen=True)
class Attack:
    """What the greedy and the modest user send. `template`: of the greedy user's adapter."""

    connections: int
    greedy: Callable[[int], Body]
    modest: Callable[[int], Body]
    template: str = _SHORT


def _attacks(greedy_model: str, modest_model: str) -> dict[str, Attack]:
    def loops(number: int) -> Body:
        return _chat("greedy", 1020, greedy_model)

    def long_chat(number: int) -> Body:
        return _chat("greedy", 4096, greedy_model)

    def template(number: int) -> Body:
        return _chat("modest", 1, modest_model)

    return {
        "grammars": Attack(20, _slow_grammar, _small_grammar),
        "refused grammars": Attack(100, _slow_grammar, _small_grammar),
        "endless grammars": Attack(20, _endless_grammar, _small_grammar),
        "loops in a template": Attack(30, loops, template, _LOOPS),
        "long chats": Attack(60, long_chat, template, _CHATML),
    }


@dataclass(frozen=True)
class Answers:
    """How the requests of one user ended."""

    statuses: dict[int, int]
    median_ms: float
    p95_ms: float
    longest_ms: float

    @classmethod
    def of(cls, statuses: Counter[int], taken_s: list[float]) -> "Answers":
        """`taken_s`: of each request, refused ones included."""
        ordered = [1000 * one for one in sorted(taken_s)] or [0.0]
        at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95)]
        return cls(dict(statuses), *(round(one, 1) for one in (*at, ordered[-1])))


def _send(connection: http.client.HTTPConnection, method: str, path: str, body: Body | None) -> tuple[int, bytes]:
    content = None if body is None else json.dumps(body).encode()
    connection.request(method, path, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def _connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)


def _be_greedy(url: str, name: str, models: tuple[str, str], seconds: float) -> None:
    """Runs in another process: sends the greedy user's requests over all its connections."""
    attack, counted = _attacks(*models)[name], Counter[int]()
    end_s, numbers = time.monotonic() + seconds, itertools.count()

    def send_on(connection: http.client.HTTPConnection) -> None:
        while time.monotonic() < end_s:
            counted[_send(connection, "POST", _CHAT, attack.greedy(next(numbers)))[0]] += 1

    def run() -> None:
        try:
            send_on(_connect(url))
        except OSError:  # the server has ended
            counted[0] += 1

    for _ in range(attack.connections):
        threading.Thread(target=run, daemon=True).start()
    time.sleep(seconds)
    print(f"  greedy user: {dict(counted)}", flush=True)


def _be_modest(url: str, body: Callable[[int], Body], seconds: float) -> Answers:
    connection, end_s = _connect(url), time.monotonic() + seconds
    statuses, taken_s = Counter[int](), list[float]()
    for number in itertools.count():
        if time.monotonic() >= end_s:
            break
        began_s = time.perf_counter()
        statuses[_send(connection, "POST", _CHAT, body(number))[0]] += 1
        taken_s.append(time.perf_counter() - began_s)
        time.sleep(_PAUSE_S)
    return Answers.of(statuses, taken_s)


def _longest_gap_ms(url: str, seconds: float) -> float:
    """Returns the longest time between two events of streams that are read one after another."""
    end_s, longest_s = time.monotonic() + seconds, 0.0
    connection = _connect(url)
    while time.monotonic() < end_s:
        connection.request("POST", "/v1/completions", json.dumps(_STREAM), {"Content-Type": "application/json"})
        answer, last_s = connection.getresponse(), None
        while line := answer.readline():
            if line.startswith(b"data"):
                now_s = time.perf_counter()
                longest_s = max(longest_s, 0.0 if last_s is None else now_s - last_s)
                last_s = now_s
    return round(1000 * longest_s, 1)


def _observe(url: str, attack: Attack, seconds: float) -> tuple[Answers, float]:
    with ThreadPoolExecutor(2) as users:
        answers = users.submit(_be_modest, url, attack.modest, seconds)
        gap = users.submit(_longest_gap_ms, url, seconds)
        return answers.result(), gap.result()


@contextmanager
def _templates(url: str, templates: dict[str, str]) -> Iterator[None]:
    """Gives adapters chat templates for a while."""
    connection = _connect(url)

    def give(name: str, template: str | None) -> None:
        status, body = _send(connection, "PATCH", f"/v1/adapters/{name}", {"chat_template": template})
        if status != 200:
            raise SystemExit(f"the template of {name} cannot be set: {body.decode()}")

    for name, template in templates.items():
        give(name, template)
    try:
        yield
    finally:
        connection.close()  # the server may have closed it meanwhile
        for name in templates:
            give(name, None)


def _measure(url: str, name: str, models: tuple[str, str], seconds: float) -> dict[str, Any]:
    attack = _attacks(*models)[name]
    with _templates(url, dict(zip(models, (attack.template, _SHORT), strict=True))):
        alone, quiet_ms = _observe(url, attack, seconds / 3)
        greedy = get_context("spawn").Process(target=_be_greedy, args=(url, name, models, seconds + 2))
        greedy.start()
        time.sleep(1.5)  # until its requests wait
        under_attack, gap_ms = _observe(url, attack, seconds)
        greedy.join()
    for what, answers, longest_ms in (("alone", alone, quiet_ms), ("attacked", under_attack, gap_ms)):
        latencies = f"{answers.median_ms:9.1f} {answers.p95_ms:9.1f} {answers.longest_ms:9.1f} {longest_ms:9.1f}"
        print(f"{name:20} {what:9} {latencies}  {answers.statuses}", flush=True)
    return {"alone": asdict(alone), "attacked": asdict(under_attack), "gap_ms": [quiet_ms, gap_ms]}


def _adapters(url: str) -> tuple[str, str]:
    models = json.loads(_send(_connect(url), "GET", "/v1/models", None)[1])["data"]
    names = [model["id"] for model in models if model.get("parent")]
    if len(names) < 2:
        raise SystemExit("the server must have two adapters")
    return names[0], names[1]


async def _measure_all(args: argparse.Namespace, server_arguments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        url = args.url
        if url is None:
            arguments = ["--allow-runtime-lora-updating", *server_arguments]
            url = (await stack.enter_async_context(own_server(arguments, asyncio.Event()))).url
        models = await asyncio.to_thread(_adapters, url)
        print(f"{'attack':20} {'':9} {'median ms':>9} {'p95 ms':>9} {'most ms':>9} {'gap ms':>9}  statuses", flush=True)
        for name in args.only or list(_attacks(*models)):
            found[name] = await asyncio.to_thread(_measure, url, name, models, args.seconds)
    return found


def main() -> None:
    """Measures the delays, and prints two lines for each attack and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already, with two adapters that may be changed")
    parser.add_argument("--only", choices=list(_attacks("", "")), action="append", help="this attack; may be repeated")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each attack (default %(default)s)")
    args, server_arguments = parser.parse_known_args()
    found = asyncio.run(_measure_all(args, server_arguments))
    print(json.dumps({"benchmark": "greedy_client", "load": os.getloadavg(), "attacks": found}))


if __name__ == "__main__":
    main()
