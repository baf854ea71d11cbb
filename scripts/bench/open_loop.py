"""Plays arrivals to an engine in this process and notes when tokens came.

Times count from when a request was due, not from when it could be sent: a stalled event loop hides nothing.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from arrivals import Arrival

from caraserve.loop import Engine
from caraserve.request import GenerateRequest, Phases, SamplingParams


@dataclass(frozen=True, slots=True)
class Timed:
    """One request. `cold`: its adapter was not on the device when it came."""

    adapter: str
    cold: bool
    ttft_ms: float
    e2e_ms: float
    output_tokens: int
    gaps_ms: tuple[float, ...]  # between tokens
    phases: Phases

    @property
    def tpt_ms(self) -> float:
        """Time per token over the whole request, prefill and waiting included."""
        return self.e2e_ms / self.output_tokens


@dataclass(frozen=True, slots=True)
class Played:
    """All requests in the order of arrival."""

    timed: tuple[Timed, ...]
    wall_s: float
    cpu_s: float  # of this process
    elsewhere_s: float  # CPU of everything else on the machine: CPU LoRA workers, other programs, other machines
    loads: int  # adapters brought to the device

    @property
    def cores_used(self) -> float:
        """By this process, on average."""
        return self.cpu_s / self.wall_s

    @property
    def cores_elsewhere(self) -> float:
        """By everything else, on average."""
        return self.elsewhere_s / self.wall_s


async def play(engine: Engine, arrivals: Sequence[Arrival]) -> Played:
    """Sends every request when it is due and returns when all are done. Raises RuntimeError for one that failed."""
    counters = engine.catalog.residency.counters
    loads, started_s = counters.host_hits + counters.disk_reads, time.monotonic()
    cpu_s, busy_s = time.process_time(), _busy_s()
    timed = await asyncio.gather(*(_ask(engine, arrival, started_s) for arrival in arrivals))
    cpu_s = time.process_time() - cpu_s
    return Played(
        timed=tuple(timed),
        wall_s=time.monotonic() - started_s,
        cpu_s=cpu_s,
        elsewhere_s=max(0.0, _busy_s() - busy_s - cpu_s),
        loads=counters.host_hits + counters.disk_reads - loads,
    )


async def calm(cores: float, patience_s: float) -> None:
    """Returns when the whole machine has used less than `cores` for a second, or after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        started_s, busy_s = time.monotonic(), _busy_s()
        await asyncio.sleep(1.0)
        if _busy_s() - busy_s < cores * (time.monotonic() - started_s):
            return


async def _ask(engine: Engine, arrival: Arrival, started_s: float) -> Timed:
    due_s = started_s + arrival.at_s
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    cold = arrival.adapter not in engine.snapshot().device_adapters
    params = SamplingParams(max_tokens=arrival.output_tokens, temperature=0.0, ignore_eos=True)
    asked = GenerateRequest(f"bench-{arrival.at_s}", arrival.prompt_ids, arrival.adapter, params, due_s)
    times_ms: list[float] = []
    async for delta in engine.submit(asked):
        if delta.token_ids:
            times_ms.append(1000 * (time.monotonic() - due_s))
        if (finish := delta.finish) is not None and finish.reason != "length":
            raise RuntimeError(f"a request ended with {finish.reason}: {finish.error}")
    assert finish is not None
    return Timed(
        adapter=arrival.adapter,
        cold=cold,
        ttft_ms=times_ms[0],
        e2e_ms=times_ms[-1],
        output_tokens=finish.completion_tokens,
        gaps_ms=tuple(later - earlier for earlier, later in pairwise(times_ms)),
        phases=finish.phases,
    )


def _busy_s() -> float:
    """CPU seconds of the whole machine so far, those taken by its host included."""
    user, nice, system, _idle, _iowait, *others = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(map(int, (user, nice, system, *others))) / os.sysconf("SC_CLK_TCK")
