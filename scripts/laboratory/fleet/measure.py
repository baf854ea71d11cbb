"""Measures fleets of real instances under shares of their capacity.

`measure_profiles` and `calibrate` measure what an instance can do: its performance profile, and what it takes to serve
requests beside that. `measure_fleet` then sends loads to a fleet under one routing. Each takes two to four minutes.
"""

import asyncio
import math
import re
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.endpoint import Endpoint
from caraserve.bench.client.player import Player
from caraserve.bench.options import TARGETS
from caraserve.bench.records import PlannedRequest, RequestRecord, Run, Workload
from caraserve.bench.servers import OwnServer, Synthetic, make_synthetic, working_folder
from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.bench.workload.lengths import parse_lengths
from caraserve.bench.workload.popularity import parse_popularity
from caraserve.core import machine_profile as profiles
from caraserve.core.machine_profile import Profile
from caraserve.errors import BackendFailed
from scripts.laboratory.fleet.cpu_share import cpu_shares
from scripts.laboratory.fleet.instances import SHARE_CORES, endpoints_of, profile_instances, start_fleet

RANKS = (8, 16, 32, 64)
ADAPTERS = 32
FIXED = "fixed"  # the client deals requests to the instances in turn, and each answers what it gets
_LENGTHS = "uniform:8-64/4-24"
_CONCURRENCY = 16  # requests in flight for each instance while the capacity is measured
_GENERATIONS = 3  # of requests, while the capacity is measured
_PROBES = ((1, 8), (1, 32), (1, 64), (2, 16), (4, 16), (8, 16), (16, 16))  # requests, tokens of each prompt
_PROBE_OUTPUT = 12  # tokens
_PROBE_ROUNDS = 2
_COUNTED = ("forwarded_requests", "refused_requests", "missed_quotes", "routing_quotes_seconds", "model_refits")
_COUNTER = re.compile(rf"^caraserve:((?:{'|'.join(_COUNTED)})_(?:total|sum|count))(?:{{.*}})? (\S+)$", re.MULTILINE)
_IDLE_S = 5.0  # of measuring what instances do without requests
_SETTLE_S = 1.0  # between two loads


@dataclass(frozen=True, slots=True)
class FleetModel:
    """The random model that instances serve."""

    shape: str = "100M"
    dtype: str = "float32"

    def write(self, folder: Path) -> Synthetic:
        """Writes the model and its adapters to a folder."""
        ranks = [RANKS[number % len(RANKS)] for number in range(ADAPTERS)]
        return make_synthetic(folder, self.shape, self.dtype, 512, ranks, TARGETS["qkv"])


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one instance with its share of a core can do."""

    profiles: tuple[Profile, ...]  # of the instances, measured at the same time
    capacity_per_s: float  # requests of one instance in a busy fleet
    probes: tuple["Probe", ...]


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request of a measured load. Times are in s since the load began."""

    instance: int  # to which the client sent it
    adapter: int
    prompt_tokens: int
    output_tokens: int
    sent_s: float
    first_s: float  # arrival of its first token
    done_s: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Requests of one shape that every instance of an idle fleet received at once and answered itself."""

    instances: int
    requests: tuple[ServedRequest, ...]  # of all instances


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A load that a fleet has served."""

    instances: int
    routing: str  # of `caraserve serve`, or FIXED
    load: float  # share of the fleet's capacity
    rate: float  # requests/s
    requests: tuple[ServedRequest, ...]  # in order of `sent_s`
    idle_cores: float  # that all instances together use without requests, for gossip above all
    cores_used: float  # by all instances together during the load, on average
    counters: Mapping[str, float]  # of /metrics by name, summed over instances and labels: what the load added
    probes: tuple[Probe, ...]  # of these instances just before and after the load; of the calibration if they forward


def load_spec(rate: float | None, *, seconds: float | None = None, requests: int | None = None) -> WorkloadSpec:
    """Returns the load of all measurements: short prompts and answers, adapters of four ranks asked for alike."""
    arrivals = parse_arrivals("burst" if rate is None else "poisson")
    popularity = parse_popularity("uniform")
    lengths = parse_lengths(_LENGTHS)
    return WorkloadSpec(lengths, arrivals, rate, popularity, ADAPTERS, RANKS, requests, seconds)


async def measure_profiles(model: FleetModel, instances: int) -> tuple[Profile, ...]:
    """Measures the profiles of so many instances at once.

    Raises ConfigError if instances cannot be confined, BackendFailed if a measurement fails.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder())
        shares = stack.enter_context(cpu_shares(instances, SHARE_CORES))
        files = [folder / f"profile-{number}.json" for number in range(instances)]
        await profile_instances(model.write(folder), shares, files)
        return tuple(profiles.load(file) for file in files)


async def calibrate(model: FleetModel, measured: Sequence[Profile]) -> Calibration:
    """Measures the capacity of a fleet of instances with these profiles in a closed loop, and probes each of them.

    Raises ConfigError if instances cannot be confined, BackendFailed if one fails.
    """
    instances = len(measured)
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder())
        shares = stack.enter_context(cpu_shares(instances, SHARE_CORES))
        made = model.write(folder)
        files = _save(measured, folder)
        async with start_fleet(made, shares, files, folder, "--routing", "local") as servers:
            endpoints = await endpoints_of(servers)
            await _warm_up(endpoints, made)
            load = build(load_spec(None, requests=_GENERATIONS * _CONCURRENCY * instances))
            run = await _play(endpoints, load, made, "capacity", _CONCURRENCY * instances)
            probes = await _probes(endpoints, made)
    return Calibration(tuple(measured), _capacity_per_s(run, _CONCURRENCY * instances) / instances, probes)


async def _probes(endpoints: Sequence[Endpoint], made: Synthetic) -> tuple[Probe, ...]:
    """Sends every instance the same requests at once, one shape after the other. Takes half a minute."""
    probes = []
    for count, prompt_tokens in _PROBES * _PROBE_ROUNDS:
        requests = tuple(
            PlannedRequest(index, 0.0, index // len(endpoints), prompt_tokens, _PROBE_OUTPUT)
            for index in range(count * len(endpoints))
        )
        run = await _play(endpoints, Workload(requests, ()), made, "probe")
        probes.append(Probe(len(endpoints), tuple(_served(run.records, made.names, len(endpoints)))))
    return tuple(probes)


def _save(measured: Sequence[Profile], folder: Path) -> list[Path]:
    files = [folder / f"profile-{number}.json" for number in range(len(measured))]
    for profile, file in zip(measured, files, strict=True):
        profile.save(file)
    return files


def _capacity_per_s(run: Run, concurrency: int) -> float:
    """Returns the requests per second between the first generation's end and the last one's beginning."""
    done_s = sorted(record.done_s for record in run.records)
    first, last = concurrency // 2, len(done_s) - concurrency
    return (last - first) / (done_s[last] - done_s[first])


async def measure_fleet(
    model: FleetModel,
    calibration: Calibration,
    instances: int,
    routing: str,
    loads: Sequence[float],
    seconds: float,
    slo_ms: float = math.inf,
    first: int = 0,
) -> AsyncIterator[FleetRun]:
    """Starts a fleet, sends it one load after the other, each for so many seconds, and yields each.

    `slo_ms`: time per token that routing policies may promise. `first`: core of the first instance. Raises
    ConfigError if instances cannot be confined, BackendFailed if one or a request fails.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(working_folder())
        shares = stack.enter_context(cpu_shares(instances, SHARE_CORES, first))
        made = model.write(folder)
        files = _save(calibration.profiles[:instances], folder)
        options = ["--routing", "local" if routing == FIXED else routing]
        if slo_ms < math.inf:
            options += ["--slo-tpot-ms", f"{slo_ms:g}"]
        async with start_fleet(made, shares, files, folder, *options) as servers:
            endpoints = await endpoints_of(servers)
            await _warm_up(endpoints, made)
            idle_cores = await _idle_cores(servers)
            probed = await _probes(endpoints, made) if routing == FIXED else calibration.probes
            for load in loads:
                await asyncio.sleep(_SETTLE_S)
                rate = load * calibration.capacity_per_s * instances
                workload = build(replace(load_spec(rate, seconds=seconds), seed=round(100 * load)))
                before, before_s = await _counters(servers), sum(server.cpu_s() for server in servers)
                run = await _play(endpoints, workload, made, f"{instances} instances, {routing}, load {load:g}")
                used_s = sum(server.cpu_s() for server in servers) - before_s
                served = tuple(_served(run.records, made.names, instances))
                added = {name: value - before.get(name, 0.0) for name, value in (await _counters(servers)).items()}
                cores_used = used_s / run.wall_s
                probes = probed
                if routing == FIXED:  # the machine's speed changes by a tenth within minutes
                    probed = await _probes(endpoints, made)
                    probes += probed
                yield FleetRun(instances, routing, load, rate, served, idle_cores, cores_used, added, probes)


async def _idle_cores(servers: Sequence[OwnServer]) -> float:
    """Returns the CPU time a second that instances use while no request is under way."""
    await asyncio.sleep(_SETTLE_S)
    before_s, started_s = sum(server.cpu_s() for server in servers), time.perf_counter()
    await asyncio.sleep(_IDLE_S)
    return (sum(server.cpu_s() for server in servers) - before_s) / (time.perf_counter() - started_s)


async def _counters(servers: Sequence[OwnServer]) -> dict[str, float]:
    """Returns counters of what instances said to one another."""
    found: dict[str, float] = defaultdict(float)
    async with aiohttp.ClientSession() as session:
        for server in servers:
            async with session.get(f"{server.url}/metrics") as answer:
                for name, value in _COUNTER.findall(await answer.text()):
                    found[name] += float(value)
    return found


async def _warm_up(endpoints: Sequence[Endpoint], made: Synthetic) -> None:
    """Sends a short request for every adapter to every instance."""
    count = len(made.names) * len(endpoints)
    requests = tuple(PlannedRequest(at, 0.0, at // len(endpoints), 8, 2) for at in range(count))
    await _play(endpoints, Workload(requests, ()), made, "warm-up", 2 * len(endpoints))


async def _play(
    endpoints: Sequence[Endpoint], workload: Workload, made: Synthetic, label: str, concurrency: int | None = None
) -> Run:
    """Sends a load, with prompts that no prefix cache has. Raises BackendFailed if a request failed."""
    settings = LoadSettings(secrets.randbits(63), max_concurrency=concurrency)
    run = await Player(endpoints[0], workload, made.names, settings, label, endpoints[1:]).play()
    failed = [record.error for record in run.records if record.error is not None]
    if failed:
        raise BackendFailed(
            f"{label}: {len(failed)} of {len(run.records)} requests failed, the first with: {failed[0]}"
        )
    return run


def _served(records: Iterable[RequestRecord], names: Sequence[str], instances: int) -> list[ServedRequest]:
    numbers = {name: number for number, name in enumerate(names)}
    return sorted(
        (
            ServedRequest(
                record.index % instances,
                numbers[record.model],
                record.prompt_tokens,
                record.output_tokens,
                record.sent_s,
                record.token_s[0],
                record.done_s,
            )
            for record in records
        ),
        key=lambda one: one.sent_s,
    )
