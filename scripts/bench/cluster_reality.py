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
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from caraserve.bench.client.endpoint import find_endpoint
from caraserve.bench.client.player import LoadSettings, Player
from caraserve.bench.options import TARGETS
from caraserve.bench.records import PlannedRequest, RequestRecord, Workload, machine, versions
from caraserve.bench.report.plots import can_draw, legend, line_style, new_figure, render, style
from caraserve.bench.servers import OwnServer, make_synthetic, own_server, working_folder
from caraserve.bench.simulator.instance import MS
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


@dataclass(frozen=True, slots=True)
class Pair:
    """One request, as observed and as predicted. Times are in ms."""

    instance: int
    output_tokens: int
    observed_tpt_ms: float
    predicted_tpt_ms: float
    observed_ttft_ms: float
    predicted_ttft_ms: float


def main() -> None:
    """Measures and simulates the workload, then prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--model", default="100M", help="shape of the random model")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second, of all instances")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--lengths", default="uniform:16-128/8-40")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for JSON and a figure")
    args = parser.parse_args()
    told = uvloop.run(_compare(args))
    pairs = [Pair(**pair) for pair in told["requests"]]
    _print(told)
    if args.save is not None:
        args.save.mkdir(parents=True, exist_ok=True)
        (args.save / "reality.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        if can_draw():
            (args.save / "reality.png").write_bytes(_draw(pairs))
    print(json.dumps({name: value for name, value in told.items() if name != "requests"}))


async def _compare(args: argparse.Namespace) -> dict[str, Any]:
    with working_folder() as folder:
        made = make_synthetic(folder, args.model, "float32", 512, _RANKS * 2, TARGETS["qkv"])
        shared = (*made.arguments, "--cpu-threads", "1", "--loading-mode", "cached", "--max-num-seqs", "32")
        files = [folder / f"profile-{number}.json" for number in range(args.instances)]
        for file in files:
            command = [sys.executable, "-m", "caraserve", "profile", *shared, "--quick", "--output", str(file)]
            await asyncio.to_thread(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(
                    own_server(
                        (*shared, "--profile", str(file), "--registry", str(file.with_suffix(".sqlite"))),
                        asyncio.Event(),
                    )
                )
                for file in files
            ]
            workload = _workload(args)
            records = await asyncio.gather(
                *(
                    _play(server, _turn(workload, number, len(servers)), made.names)
                    for number, server in enumerate(servers)
                )
            )
        machines = [_machine(profiles.load(file)) for file in files]
    return _beside(machines, records, made.names, workload.ranks, args)


def _workload(args: argparse.Namespace) -> Workload:
    return build(
        WorkloadSpec(
            parse_lengths(args.lengths),
            parse_arrivals("poisson"),
            args.rate,
            parse_popularity("uniform"),
            2 * len(_RANKS),
            _RANKS,
            num_requests=args.requests,
        )
    )


def _turn(workload: Workload, number: int, of: int) -> Workload:
    """Returns every `of`-th request in order of time, from request `number` on."""
    return replace(workload, requests=workload.requests[number::of])


async def _play(server: OwnServer, workload: Workload, names: tuple[str, ...]) -> tuple[RequestRecord, ...]:
    endpoint = await find_endpoint(server.url, "openai", None, None)
    warm_up = replace(workload, requests=tuple(replace(one, at_s=0.0) for one in workload.requests[:4]))
    await Player(endpoint, warm_up, names, LoadSettings(1), "warm").play()
    return (await Player(endpoint, workload, names, LoadSettings(0), "observed").play()).records


def _machine(profile: profiles.Profile) -> Machine:
    like = replace(paper_machine("padded"), max_running=32, max_step_tokens=256)
    return replace(profiled_machine(profile, "measured", like), links=LinkSpeeds())


def _beside(
    machines: list[Machine],
    records: list[tuple[RequestRecord, ...]],
    names: tuple[str, ...],
    ranks: tuple[int, ...],
    args: argparse.Namespace,
) -> dict[str, Any]:
    pairs = []
    for number, (each, mine) in enumerate(zip(machines, records, strict=True)):
        failed = [record.error for record in mine if record.error is not None]
        if failed:
            raise SystemExit(f"instance {number} failed: {failed[0]}")
        ordered = sorted(mine, key=lambda record: record.sent_s)
        planned = [
            PlannedRequest(index, one.sent_s, names.index(one.model), one.prompt_tokens, one.output_tokens)
            for index, one in enumerate(ordered)
        ]
        simulation = Simulation(
            Setting((each,), "round-robin", float("inf"), hop_ms=0.0), Workload(tuple(planned), ranks)
        )
        simulation.run()
        for record, request in list(zip(ordered, simulation.requests, strict=True))[int(_WARM_UP * len(mine)) :]:
            assert record.ttft_s is not None
            pairs.append(
                Pair(
                    number,
                    request.output,
                    1e3 * record.e2e_s / request.output,
                    (request.done - request.arrived) / MS / request.output,
                    1e3 * record.ttft_s,
                    (request.first - request.arrived) / MS,
                )
            )
    observed, predicted = fmean(one.observed_tpt_ms for one in pairs), fmean(one.predicted_tpt_ms for one in pairs)
    return {
        "bench": "cluster reality",
        "machine": machine(),
        "versions": versions(),
        "arguments": {name: value for name, value in vars(args).items() if name != "save"},
        "observed_tpt_ms": observed,
        "predicted_tpt_ms": predicted,
        "error": predicted / observed - 1,
        "observed_ttft_ms": fmean(one.observed_ttft_ms for one in pairs),
        "predicted_ttft_ms": fmean(one.predicted_ttft_ms for one in pairs),
        "by_instance": [_by_instance(pairs, number) for number in range(len(machines))],
        "requests": [{name: getattr(one, name) for name in Pair.__slots__} for one in pairs],
    }


def _by_instance(pairs: list[Pair], number: int) -> dict[str, float]:
    mine = [one for one in pairs if one.instance == number]
    return {
        "observed_tpt_ms": fmean(one.observed_tpt_ms for one in mine),
        "predicted_tpt_ms": fmean(one.predicted_tpt_ms for one in mine),
    }


def _print(told: dict[str, Any]) -> None:
    shown = Table(title="mean time per token, ms", title_justify="left")
    for head in ("instance", "observed", "predicted", "off by"):
        shown.add_column(head, justify="right")
    for number, one in enumerate(told["by_instance"]):
        observed, predicted = one["observed_tpt_ms"], one["predicted_tpt_ms"]
        shown.add_row(str(number), f"{observed:.2f}", f"{predicted:.2f}", f"{predicted / observed - 1:+.1%}")
    shown.add_row("all", f"{told['observed_tpt_ms']:.2f}", f"{told['predicted_tpt_ms']:.2f}", f"{told['error']:+.1%}")
    Console(soft_wrap=True).print(shown)


def _draw(pairs: list[Pair]) -> bytes:
    figure = new_figure(9.0, 4.2)
    panels = figure.subplots(1, 2)
    for axes, what, name in zip(panels, ("tpt", "ttft"), ("time per token", "TTFT"), strict=True):
        most = 0.0
        for number in sorted({one.instance for one in pairs}):
            mine = [one for one in pairs if one.instance == number]
            observed = [getattr(one, f"observed_{what}_ms") for one in mine]
            predicted = [getattr(one, f"predicted_{what}_ms") for one in mine]
            colour = line_style(number)["color"]
            axes.plot(observed, predicted, ls="", marker="o", ms=3, color=colour, label=f"instance {number}")
            most = max(most, *observed, *predicted)
        axes.plot([0, most], [0, most], lw=0.9, color="#8C8C8C")
        style(axes, xlabel=f"{name} observed, ms", ylabel="predicted, ms", xlim=(0, None), ylim=(0, None))
    legend(figure, panels[0])
    return render(figure)


if __name__ == "__main__":
    main()
