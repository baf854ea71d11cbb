"""Measures the time to the first token of several loading modes, relative to everything resident.

    .venv/bin/python scripts/bench/mode_ratios.py --link-mb-per-s 20 60 200 --save report

For each link, a server of every mode runs all the time, and in each round the same requests go to one after another, in
an order that changes. So a machine whose speed changes from one minute to the next does not change the ratios. 16
random adapters of ranks 8 to 64 on q, k and v share a device pool for 0.6 of their bytes; requests choose among them
uniformly and arrive by a Poisson process. The last line of stdout is one JSON document.
"""

import argparse
import json
import re
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from operator import truediv
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp
import uvloop

from caraserve.bench.client.endpoint import Endpoint, find_endpoint
from caraserve.bench.client.player import LoadSettings
from caraserve.bench.options import TARGETS
from caraserve.bench.records import Run, machine, versions
from caraserve.bench.report.files import as_json, make_folder, write_files
from caraserve.bench.runner import BenchmarkRunner, interruptible
from caraserve.bench.servers import Synthetic, make_synthetic, own_server, working_folder
from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.bench.workload.lengths import parse_lengths
from caraserve.bench.workload.popularity import parse_popularity

_BASELINE = "cached"
_RANKS = (8, 16, 32, 64)
_ADAPTERS, _RESIDENT = 16, 5  # the five largest take 0.6 of all bytes
_CHOICES = "caraserve:loading_choice_"


def main() -> None:
    """Measures every link and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="cached,assisted,pipelined,auto", help="`cached` must be one")
    parser.add_argument("--link-mb-per-s", type=float, nargs="+", default=[60.0])
    parser.add_argument("--model", default="100M", help="shape of the random model")
    parser.add_argument("--lengths", default="uniform:16-128/4-8", help="of prompts and answers")
    parser.add_argument("--request-rate", type=float, default=3.0)
    parser.add_argument("--num-prompts", type=int, default=10, help="of each mode and round")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each link; the round under way is finished")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="DIR")
    args = parser.parse_args()
    found = uvloop.run(_measure(args))
    if args.save is not None:
        make_folder(args.save)
        write_files(args.save, {"mode_ratios.json": as_json(found)})
    print(json.dumps(found))


async def _measure(args: argparse.Namespace) -> dict[str, Any]:
    load = WorkloadSpec(
        parse_lengths(args.lengths),
        parse_arrivals("poisson"),
        args.request_rate,
        parse_popularity("uniform"),
        _ADAPTERS,
        _RANKS,
        num_requests=args.num_prompts,
    )
    runner = BenchmarkRunner(LoadSettings(args.seed, True, None))
    ranks = [_RANKS[index % len(_RANKS)] for index in range(_ADAPTERS)]
    with interruptible(runner), working_folder() as folder:
        made = make_synthetic(folder, args.model, "float32", 256, ranks, TARGETS["qkv"])
        links = [await _measure_link(args, load, runner, made, link) for link in args.link_mb_per_s]
    return {
        "bench": "mode ratios",
        "machine": machine(),
        "versions": versions(),
        "arguments": {name: value for name, value in vars(args).items() if name != "save"},
        "links": links,
    }


async def _measure_link(
    args: argparse.Namespace, load: WorkloadSpec, runner: BenchmarkRunner, made: Synthetic, mb_per_s: float
) -> dict[str, Any]:
    modes = args.modes.split(",")
    ttft_ms: dict[str, list[float]] = {mode: [] for mode in modes}
    async with AsyncExitStack() as stack:
        endpoints = {}
        for mode in modes:
            arguments = _arguments(made, mode, mb_per_s)
            server = await stack.enter_async_context(own_server(arguments, runner.stopped))
            endpoints[mode] = await find_endpoint(server.url, "openai", None, made.names)
            await runner.warm_up(endpoints[mode], made.names)
        ends_s = time.monotonic() + args.seconds
        for turn in count():
            if time.monotonic() > ends_s:
                break
            workload = build(replace(load, seed=args.seed + turn))
            for place in range(len(modes)):
                mode = modes[(turn + place) % len(modes)]
                run = await runner.play(endpoints[mode], workload, made.names, mode)
                ttft_ms[mode].append(_mean_ttft_ms(run))
        choices = await _choices(endpoints["auto"]) if "auto" in endpoints else {}
    base_ms = ttft_ms[_BASELINE]
    return {
        "mb_per_s": mb_per_s,
        "load_ms": 1000 * fmean(made.sizes) / (mb_per_s * 1e6),  # of an adapter, on average
        "median_ttft_over_cached": {mode: median(map(truediv, each, base_ms)) for mode, each in ttft_ms.items()},
        "mean_ttft_over_cached": {mode: fmean(each) / fmean(base_ms) for mode, each in ttft_ms.items()},
        "choices": choices,
        "mean_ttft_ms": ttft_ms,  # of each round
    }


def _arguments(made: Synthetic, mode: str, mb_per_s: float) -> tuple[str, ...]:
    room = made.room_bytes(None if mode == _BASELINE else _RESIDENT)
    return (
        *made.arguments,
        *("--loading-mode", mode, "--lora-pool-bytes", str(room), *made.host_room()),
        *("--emulate-link-mb-per-s", f"{mb_per_s:g}"),
    )


def _mean_ttft_ms(run: Run) -> float:
    times_s = [record.ttft_s for record in run.records]
    if None in times_s:
        raise SystemExit(f"{run.label}: a request failed")
    return 1000 * fmean(time_s for time_s in times_s if time_s is not None)


async def _choices(endpoint: Endpoint) -> dict[str, float]:
    """Returns what mode `auto` chose how often, with the predicted and the observed seconds."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{endpoint.host_header}/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if line.startswith(_CHOICES)]
    found = (re.fullmatch(r'([a-z_]+)\{choice="([a-z]+)".*\} (\S+)', line.removeprefix(_CHOICES)) for line in lines)
    return {f"{match[2]}_{match[1]}": float(match[3]) for match in found if match is not None}


if __name__ == "__main__":
    main()
