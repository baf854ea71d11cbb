"""Stage `fleet`: a whole server with as many streams as it can be given, of the base model and of many adapters.

Clients send a request as soon as their last one is answered. An adapter's first request reads its files, so runs with
few streams show that, too. The server's CPU time by thread tells what limits it.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.endpoint import Endpoint, find_endpoint
from caraserve.bench.options import TARGETS
from caraserve.bench.records import PlannedRequest, Run, Workload
from caraserve.bench.report.summary import summarize
from caraserve.bench.runner import BenchmarkRunner
from caraserve.bench.servers import own_server
from caraserve.bench.synthetic import write_adapters, write_model
from caraserve.errors import BackendFailed
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup

_RANK = 16
_REQUESTS_EACH = 3  # of a stream, in a run
_LEAST_REQUESTS = 4
_THREADS = 4  # that are reported, the busiest


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """A run. `thread_us`: CPU time of the server's main thread, and of its busiest others, per token of an answer."""

    adapters: bool
    streams: int
    tokens_per_s: float
    ttft_ms: dict[str, float]  # by percentile
    tpot_ms: dict[str, float]
    thread_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """All runs, with prompts and answers of `tokens` tokens."""

    tokens: int
    adapters: int
    rank: int
    points: tuple[FleetPoint, ...]


def fleet(setup: CheckSetup) -> StageResult[FleetFigures]:
    """Runs the stage. Raises BackendFailed when the server does not start or an answer fails."""
    effort, lines = setup.effort, Lines()
    folder, dtype = setup.folder / "model", effort.fleet_dtype
    plan = write_model(folder / "base", effort.fleet_shape, dtype, 32 * effort.fleet_tokens, weights=False)
    write_adapters(
        folder / "adapters", plan, count=effort.fleet_adapters, ranks=(_RANK,), targets=TARGETS["all"], dtype="float16"
    )
    arguments = (
        *(str(folder / "base"), "--load-format", "dummy", "--served-model-name", "base", "--dtype", dtype),
        *("--adapters-dir", str(folder / "adapters"), "--registry", str(setup.folder / "fleet.sqlite")),
        *("--device", "cuda", "--max-host-adapters-bytes", "8GiB"),
    )
    points = asyncio.run(_measured(setup, arguments, lines))
    return StageResult(FleetFigures(effort.fleet_tokens, effort.fleet_adapters, _RANK, tuple(points)), lines.all)


async def _measured(setup: CheckSetup, arguments: Sequence[str], lines: Lines) -> list[FleetPoint]:
    points, streams = list[FleetPoint](), sorted(setup.effort.fleet_streams)
    few = sorted({streams[0], streams[len(streams) // 2], streams[-1]})
    runner = BenchmarkRunner(LoadSettings(0, True, None))
    async with own_server(arguments, runner.stopped, caraserve=setup.caraserve) as server:
        endpoint = await find_endpoint(server.url, "openai", None, None)
        for count, has_adapters in [*((each, False) for each in few), *((each, True) for each in streams)]:
            if points and setup.left_s < 0:
                break
            before_s = _threads_s(server.pid)
            run = await _run(setup, runner, endpoint, count, has_adapters=has_adapters)
            points.append(_point(run, count, has_adapters, _spent_us(server.pid, before_s, run)))
            of = f"{len(endpoint.adapters)} adapters" if has_adapters else "the base model"
            lines.add(f"{count} streams of {of}", _text(points[-1]))
    return points


async def _run(
    setup: CheckSetup, runner: BenchmarkRunner, endpoint: Endpoint, streams: int, *, has_adapters: bool
) -> Run:
    """Raises BackendFailed for an answer that fails."""
    names, tokens = endpoint.adapters, setup.effort.fleet_tokens
    count = max(_LEAST_REQUESTS, _REQUESTS_EACH * streams)
    requests = [
        PlannedRequest(index, 0.0, index % len(names) if has_adapters else None, tokens, tokens)
        for index in range(count)
    ]
    label = f"{streams} streams, {'adapters' if has_adapters else 'base'}"
    run = await runner.play(endpoint, Workload(tuple(requests), ()), names, label, concurrency=streams)
    if error := next((each.error for each in run.records if each.error is not None), None):
        raise BackendFailed(f"{label}: a request failed: {error}")
    return run


def _point(run: Run, streams: int, has_adapters: bool, thread_us: tuple[float, ...]) -> FleetPoint:
    summary = summarize(run)
    ttft, tpot = (
        {} if latency is None else dict(latency.percentiles_ms)
        for latency in (summary.latency.ttft, summary.latency.tpot)
    )
    return FleetPoint(has_adapters, streams, summary.output_tokens_per_s, ttft, tpot, thread_us)


def _threads_s(pid: int) -> dict[int, float]:
    """Returns the CPU time of each thread of a process so far in s, by its number; the main thread's is `pid`."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            found[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _spent_us(pid: int, before_s: dict[int, float], run: Run) -> tuple[float, ...]:
    """Returns the CPU time of the main thread and of the busiest others since `before_s`, in µs per output token."""
    tokens = max(1, sum(each.output_tokens for each in run.records))
    spent = {number: 1e6 * (at_s - before_s.get(number, 0.0)) / tokens for number, at_s in _threads_s(pid).items()}
    main_us = spent.pop(pid)
    return main_us, *sorted(spent.values(), reverse=True)[: _THREADS - 1]


def _text(point: FleetPoint) -> str:
    ttft, tpot = point.ttft_ms.get("p50", 0.0), point.tpot_ms.get("p50", 0.0)
    threads = ", ".join(f"{us:.0f}" for us in point.thread_us)
    return f"{point.tokens_per_s:.0f} tokens/s, TTFT {ttft:.1f} ms, a token {tpot:.2f} ms; µs by thread {threads}"
