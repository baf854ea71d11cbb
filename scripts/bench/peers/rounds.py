"""Sends the same requests to every server in turns, in random order within a round, and collects what they took."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import aiohttp

from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.player import Player
from caraserve.bench.records import PlannedRequest, RequestRecord, Workload
from caraserve.bench.servers import busy_s
from caraserve.errors import BackendFailed
from scripts.bench.peers.servers import LLAMA, MOST_REQUESTS, RunningServer

_COMPARED_TOKENS, _COMPARED_PROMPT = 16, 32


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are sent together or one after another, and the figures that are taken from them."""

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    metrics: tuple[str, ...]
    prefix: str = ""  # of the metrics' names
    at_once: bool = True
    adapters: bool = False  # each request has its own


LOADS = (
    Load("one request", 3, 128, 64, ("ttft_ms", "tpot_ms"), at_once=False),
    Load("one long prompt", 1, 2048, 1, ("ttft_ms",), prefix="long_"),
    Load("16 requests", MOST_REQUESTS, 128, 64, ("tokens_per_s",)),
    Load("16 adapters", MOST_REQUESTS, 128, 64, ("tokens_per_s",), prefix="adapters_", adapters=True),
)
_WARM_UP = Load("warm-up", 1, 16, 4, ())  # after a pause a server's weights are not in the caches
_FIRST_TOKENS = 8  # of each answer before the first round
_MOST_S = 240.0  # for a load
_WARM_UP_SEED = 1 << 20  # no round has it


async def warm_up(servers: Sequence[RunningServer], loads: Sequence[Load], report: Callable[[str], None]) -> None:
    """Sends every load once with short answers: servers compile, allocate and load adapters at first requests. Raises
    BackendFailed for an answer that is not whole."""
    for server in servers:
        with server.awake():
            for load in loads:
                if server.command.takes_part(load.adapters):
                    report(f"warm-up: {load.name}, {server.command.name}")
                    await _send(
                        server, replace(load, output_tokens=min(_FIRST_TOKENS, load.output_tokens)), _WARM_UP_SEED
                    )


async def run_round(
    servers: Sequence[RunningServer], loads: Sequence[Load], seed: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the figures of one round by server and metric, a list each, and the cores that others used meanwhile.

    Raises BackendFailed for an answer that is not whole.
    """
    rng = random.Random(seed)
    samples: dict[str, dict[str, list[float]]] = {server.command.name: {} for server in servers}
    others: list[float] = []
    for load in loads:
        turns = [server for server in servers if server.command.takes_part(load.adapters)]
        rng.shuffle(turns)
        for server in turns:
            with server.awake():
                await _send(server, _WARM_UP, seed)
                before = busy_s(), _own_s(server), time.perf_counter()
                records = await _send(server, load, seed)
                after = busy_s(), _own_s(server), time.perf_counter()
            busy, own, wall = (late - early for late, early in zip(after, before, strict=True))
            others.append(max(0.0, busy - own) / wall)
            figures = figures_of(records)
            shown = ", ".join(f"{name} {median(figures[name]):.4g}" for name in load.metrics)
            report(f"{load.name}, {server.command.name}: {shown} ({wall:.1f} s)")
            for metric in load.metrics:
                values = samples[server.command.name].setdefault(load.prefix + metric, [])
                values += figures[metric]
    return {"samples": samples, "cores_of_others": fmean(others)}


def figures_of(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Returns the times of each request in ms, and the output tokens/s of all together."""
    first_s, last_s = min(one.sent_s for one in records), max(one.done_s for one in records)
    return {
        "ttft_ms": [1000 * (one.token_s[0] - one.sent_s) for one in records],
        "tpot_ms": [
            1000 * (one.token_s[-1] - one.token_s[0]) / (one.output_tokens - 1)
            for one in records
            if one.output_tokens > 1
        ],
        "tokens_per_s": [sum(one.output_tokens for one in records) / (last_s - first_s)],
    }


async def _send(server: RunningServer, load: Load, seed: int) -> Sequence[RequestRecord]:
    planned = tuple(
        PlannedRequest(index, 0.0, index if load.adapters else None, load.prompt_tokens, load.output_tokens)
        for index in range(load.requests)
    )
    settings = LoadSettings(seed, max_concurrency=None if load.at_once else 1)
    names = sorted(server.endpoint.adapters)
    workload = Workload(planned, (1,) * load.requests)
    try:
        async with asyncio.timeout(_MOST_S):
            run = await Player(server.endpoint, workload, names, settings, server.command.name).play()
    except TimeoutError:
        raise BackendFailed(f"{server.command.name}, {load.name}: not answered within {_MOST_S:.0f} s") from None
    for record in run.records:
        if record.error is not None or record.output_tokens != load.output_tokens:
            problem = record.error or f"{record.output_tokens} of {load.output_tokens} tokens"
            raise BackendFailed(f"{server.command.name}, {load.name}: {problem}")
    return run.records


async def first_tokens(server: RunningServer, adapter: bool) -> list[int]:
    """Returns the first tokens of one answer, which show whether servers compute the same model."""
    model = sorted(server.endpoint.adapters)[0] if adapter else None
    request = PlannedRequest(0, 0.0, None, _COMPARED_PROMPT, _COMPARED_TOKENS)
    dialect = server.endpoint.dialect
    body = dialect.body(request, model, LoadSettings(0)) | {"stream": False}
    body.pop("stream_options", None)
    body |= {"return_tokens": True} if server.command.kind == LLAMA else {"return_token_ids": True}
    with server.awake():
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.endpoint.root}{dialect.path}", json=body) as answer,
        ):
            content = await answer.json(content_type=None)
            if answer.status != 200:
                raise BackendFailed(f"{server.command.name}: HTTP {answer.status}: {str(content)[:500]}")
    tokens: list[int] = content["tokens"] if server.command.kind == LLAMA else content["choices"][0]["token_ids"]
    return tokens


def _own_s(server: RunningServer) -> float:
    return server.process.cpu_s() + time.process_time()
