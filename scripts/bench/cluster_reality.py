"""Compares the simulated cluster with a real one: predicted and observed time per token of each request.

    .venv/bin/python scripts/bench/cluster_reality.py --save reality

Profiles each instance alone, starts them all as `caraserve serve`, distributes one workload over them round-robin, and
then simulates the same requests, at the times at which they were sent, on machines with these profiles. The last line
of stdout is one JSON document. The instances share this machine's cores: keep their load low, or they slow one another
down, which no profile shows.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import uvloop
from rich.console import Console

from caraserve.bench.client.endpoint import find_endpoint
from caraserve.bench.client.player import LoadSettings, Player
from caraserve.bench.options import TARGETS
from caraserve.bench.records import PlannedRequest, RequestRecord, Workload, machine, versions
from caraserve.bench.report.files import as_json, make_folder, write_files
from caraserve.bench.report.tables import TextTable, to_rich
from caraserve.bench.servers import OwnServer, make_synthetic, own_server, working_folder
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.machines import Machine, paper_machine, profiled_machine
from caraserve.bench.simulator.simulation import Setting, Simulation
from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.bench.workload.lengths import parse_lengths
from caraserve.bench.workload.popularity import parse_popularity
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.core import machine_profile as profiles

_RANKS = (8, 16, 32, 64)
_WARM_UP = 0.1  # share of requests, by arrival


def main() -> None:
    """Measures and simulates the workload, then prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--model", default="100M", help="shape of the random model")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second, of all instances")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--lengths", default="uniform:16-128/8-40")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for reality.json, which has every request")
    args = parser.parse_args()
    found = uvloop.run(_compare(args))
    Console(soft_wrap=True).print(to_rich(_table(found)))
    if args.save is not None:
        make_folder(args.save)
        write_files(args.save, {"reality.json": as_json(found)})
    print(json.dumps({name: value for name, value in found.items() if name != "requests"}))


async def _compare(args: argparse.Namespace) -> dict[str, Any]:
    with working_folder() as folder:
        made = make_synthetic(folder, args.model, "float32", 512, _RANKS * 2, TARGETS["qkv"])
        shared = (*made.arguments, "--cpu-threads", "1", "--loading-mode", "cached", "--max-num-seqs", "32")
        files = [folder / f"profile-{number}.json" for number in range(args.instances)]
        for file in files:
            command = [sys.executable, "-m", "caraserve", "profile", *shared, "--quick", "--output", str(file)]
            await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
        async with AsyncExitStack() as stack:
            servers = []
            for file in files:
                own = "--profile", str(file), "--registry", str(file.with_suffix(".sqlite"))
                servers.append(await stack.enter_async_context(own_server((*shared, *own), asyncio.Event())))
            workload = _workload(args)
            shares = [replace(workload, requests=workload.requests[at :: len(servers)]) for at in range(len(servers))]
            playing = (_play(server, share, made.names) for server, share in zip(servers, shares, strict=True))
            records = await asyncio.gather(*playing)
        machines = [_machine(profiles.load(file)) for file in files]
    return _compared(machines, records, made.names, workload.ranks, args)


def _workload(args: argparse.Namespace) -> Workload:
    lengths, arrivals, popularity = parse_lengths(args.lengths), parse_arrivals("poisson"), parse_popularity("uniform")
    return build(WorkloadSpec(lengths, arrivals, args.rate, popularity, 2 * len(_RANKS), _RANKS, args.requests))


async def _play(server: OwnServer, workload: Workload, names: tuple[str, ...]) -> tuple[RequestRecord, ...]:
    endpoint = await find_endpoint(server.url, "openai", None, None)
    warm_up = replace(workload, requests=tuple(replace(one, at_s=0.0) for one in workload.requests[:4]))
    await Player(endpoint, warm_up, names, LoadSettings(1), "warm").play()
    return (await Player(endpoint, workload, names, LoadSettings(0), "observed").play()).records


def _machine(profile: profiles.Profile) -> Machine:
    like = replace(paper_machine("padded"), max_running=32, max_step_tokens=256)
    return replace(profiled_machine(profile, "measured", like), links=LinkSpeeds())


def _compared(
    machines: list[Machine],
    records: list[tuple[RequestRecord, ...]],
    names: tuple[str, ...],
    ranks: tuple[int, ...],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Simulates each instance with the requests that it answered; returns the times of both, in ms."""
    pairs: list[dict[str, float]] = []
    for number, (each, mine) in enumerate(zip(machines, records, strict=True)):
        failed = [record.error for record in mine if record.error is not None]
        if failed:
            raise SystemExit(f"instance {number} failed: {failed[0]}")
        ordered = sorted(mine, key=lambda record: record.sent_s)
        planned = [
            PlannedRequest(index, one.sent_s, names.index(one.model), one.prompt_tokens, one.output_tokens)
            for index, one in enumerate(ordered)
        ]
        setting = Setting((each,), "round-robin", float("inf"), hop_ms=0.0)
        simulation = Simulation(setting, Workload(tuple(planned), ranks))
        simulation.run()
        for record, request in list(zip(ordered, simulation.requests, strict=True))[int(_WARM_UP * len(mine)) :]:
            assert record.ttft_s is not None
            times_ms = {
                "observed_tpt_ms": 1e3 * record.e2e_s / int(request["output"]),
                "predicted_tpt_ms": float(request["done"] - request["arrived"]) / MS / int(request["output"]),
                "observed_ttft_ms": 1e3 * record.ttft_s,
                "predicted_ttft_ms": float(request["first"] - request["arrived"]) / MS,
            }
            pairs.append({"instance": number, "output_tokens": int(request["output"]), **times_ms})
    means = _means(pairs)
    return {
        "bench": "cluster reality",
        "machine": machine(),
        "versions": versions(),
        "arguments": {name: value for name, value in vars(args).items() if name != "save"},
        **means,
        "error": means["predicted_tpt_ms"] / means["observed_tpt_ms"] - 1,
        "by_instance": [_means([one for one in pairs if one["instance"] == each]) for each in range(len(machines))],
        "requests": pairs,
    }


def _means(pairs: list[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in pairs) for name in pairs[0] if name.endswith("_ms")}


def _table(found: dict[str, Any]) -> TextTable:
    rows = []
    for name, one in [*enumerate(found["by_instance"]), ("all", found)]:
        observed, predicted = one["observed_tpt_ms"], one["predicted_tpt_ms"]
        rows.append((str(name), f"{observed:.2f}", f"{predicted:.2f}", f"{predicted / observed - 1:+.1%}"))
    return TextTable("mean time per token, ms", ("instance", "observed", "predicted", "off by"), tuple(rows))


if __name__ == "__main__":
    main()
