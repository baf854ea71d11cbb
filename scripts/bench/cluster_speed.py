"""How fast the simulated fleet is: Toppings' simulation, one policy after another, on one core.

    .venv/bin/python scripts/bench/cluster_speed.py --duration-s 300

Times are CPU time, so that neighbours count little. An event is what a simulator that goes token by token
would process; a step is what this one processes, which takes a run of equal iterations in one. The time of plans
is in it. The last line of stdout is one JSON document.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from caraserve.bench.machine import machine, versions
from caraserve.bench.simulator.machines import of_papers
from caraserve.bench.simulator.outcome import outcome
from caraserve.bench.simulator.simulation import Setting, Simulation
from caraserve.bench.workload.build import build, spec_from_preset
from caraserve.bench.workload.presets import find_preset
from caraserve.cluster.placement.plan_factory import ROUTINGS

_SLO_MS = 56.0  # about what the report's settings have


def main() -> None:
    """Simulates, prints a line for each policy and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration-s", type=float, default=300.0, help="simulated")
    parser.add_argument("--instances", type=int, default=60)
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON document here")
    args = parser.parse_args()
    spec = replace(spec_from_preset(find_preset("toppings-sim")), duration_s=args.duration_s, num_requests=None)
    workload = build(spec)
    shown = Table()
    for head in ("routing", "CPU s", "an hour, s", "events/s", "steps/s", "requests/s"):
        shown.add_column(head, justify="right")
    found = {}
    for routing in args.routing:
        simulation = Simulation(Setting((of_papers("padded"),) * args.instances, routing, _SLO_MS), workload)
        began_s = time.process_time()
        simulation.run()
        cpu_s = time.process_time() - began_s
        counted = outcome(simulation, routing, _SLO_MS)
        hour_s = 3600 / args.duration_s * cpu_s
        speeds = [total / cpu_s for total in (counted.events, counted.steps, len(workload.requests))]
        found[routing] = {"cpu_s": cpu_s, "hour_s": hour_s, "events_per_s": speeds[0], "steps_per_s": speeds[1]}
        shown.add_row(routing, f"{cpu_s:.1f}", f"{hour_s:.0f}", *(f"{speed:,.0f}" for speed in speeds))
    Console(soft_wrap=True).print(shown)
    told = {"benchmark": "cluster speed", "machine": machine(), "versions": versions(), "runs": found}
    told |= {"duration_s": args.duration_s, "instances": args.instances}
    if args.json is not None:
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
