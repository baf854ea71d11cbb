"""Compares simulated fleets with real ones on this machine, instance by instance confined to a fifth of a core.

    .venv/bin/python -m scripts.bench.fleet_reality profile --folder DIR
    .venv/bin/python -m scripts.bench.fleet_reality calibrate --folder DIR
    .venv/bin/python -m scripts.bench.fleet_reality run --folder DIR --instances 3 --routing fixed
    .venv/bin/python -m scripts.bench.fleet_reality report --folder DIR

`profile` measures instances' profiles, `calibrate` their capacity and what serving costs beside the model. `run` sends
a fleet 0.3, 0.6 and 0.9 of its capacity, one after the other. `report` simulates all runs of the folder, request for
request, and writes `scripts/bench/results/fleet_reality.json`. Each of the first three takes up to five minutes and
needs the machine to itself, and root, for control groups.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from caraserve.bench.records import machine, versions
from caraserve.bench.report.tables import TextTable, open_console, to_rich
from caraserve.core.machine_profile import Profile
from caraserve.errors import CaraServeError
from scripts.laboratory.fleet.compare import Comparison, compare, slo_ms
from scripts.laboratory.fleet.measure import (
    FIXED,
    Calibration,
    FleetModel,
    FleetRun,
    calibrate,
    measure_fleet,
    measure_profiles,
)

_RESULT = Path(__file__).parent / "results/fleet_reality.json"
_PROFILES, _CALIBRATION = "profiles.json", "calibration.json"
_MOST_INSTANCES = 8
_SEEDS = range(8)  # of routings that draw at random


def main() -> None:
    """Performs one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("profile", "calibrate", "run", "report"))
    parser.add_argument("--folder", type=Path, required=True, help="of the measurements")
    parser.add_argument("--instances", type=int, default=_MOST_INSTANCES)
    parser.add_argument(
        "--routing", default=FIXED, help=f"of `caraserve serve`, several by commas; {FIXED}: dealt by the client"
    )
    parser.add_argument("--loads", default="0.3,0.6,0.9", help="shares of the fleet's capacity")
    parser.add_argument("--seconds", type=float, default=55.0, help="of each load")
    parser.add_argument("--first", type=int, default=0, help="core of the first instance, for two fleets at a time")
    parser.add_argument("--model", default=FleetModel().shape, help="shape of the random model")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    try:
        if args.step == "profile":
            measured = uvloop.run(_until_stopped(measure_profiles(FleetModel(args.model), args.instances)))
            (args.folder / _PROFILES).write_bytes(msgspec.json.encode(measured))
        elif args.step == "calibrate":
            measured = _read(args.folder / _PROFILES, tuple[Profile, ...])
            found = uvloop.run(_until_stopped(calibrate(FleetModel(args.model), measured)))
            (args.folder / _CALIBRATION).write_bytes(msgspec.json.encode(found))
            print(f"{found.capacity_per_s:.3g} requests/s of one instance; SLO {slo_ms(found):.3g} ms a token")
        elif args.step == "run":
            _run(args)
        else:
            _report(args.folder)
    except CaraServeError as error:
        sys.exit(f"error: {error}")


async def _until_stopped(measuring: Coroutine[Any, Any, Any]) -> Any:
    """Awaits a measurement. SIGTERM and SIGINT cancel it, so that it ends its servers and removes its groups."""
    task = asyncio.ensure_future(measuring)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        sys.exit("stopped")


def _run(args: argparse.Namespace) -> None:
    known = _read(args.folder / _CALIBRATION, Calibration)
    loads = [float(load) for load in args.loads.split(",")]
    limit_ms = slo_ms(known)
    for routing in args.routing.split(","):
        measuring = measure_fleet(
            *(FleetModel(args.model), known, args.instances, routing, loads, args.seconds, limit_ms, args.first)
        )
        uvloop.run(_until_stopped(_save_each(measuring, args.folder)))


async def _save_each(measuring: AsyncIterator[FleetRun], folder: Path) -> None:
    async for run in measuring:
        path = folder / f"run-{run.instances}-{run.routing}-{run.load:g}.json"
        path.write_bytes(msgspec.json.encode(run))
        print(f"written: {path}", flush=True)


def _read(path: Path, kind: Any) -> Any:
    if not path.exists():
        sys.exit(f"error: there is no {path}; run the steps profile and calibrate first")
    return msgspec.json.decode(path.read_bytes(), type=kind)


def _report(folder: Path) -> None:
    known = _read(folder / _CALIBRATION, Calibration)
    runs = [msgspec.json.decode(path.read_bytes(), type=FleetRun) for path in sorted(folder.glob("run-*.json"))]
    found = [compare(run, known, _SEEDS) for run in sorted(runs, key=_order)]
    open_console().print(to_rich(_table(found)))
    document = {
        "bench": "fleet reality",
        "machine": machine(),
        "versions": versions(),
        "capacity_per_s": known.capacity_per_s,
        "profiles": [_coefficients(profile) for profile in known.profiles],
        "loads": [asdict(one) for one in found],
    }
    _RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written: {_RESULT}")


def _order(run: FleetRun) -> tuple[bool, str, int, float]:
    return run.routing != FIXED, run.routing, run.instances, run.load


def _coefficients(profile: Any) -> dict[str, float]:
    prefill, decode = profile.prefill, profile.decode
    return {
        **{f"decode_{name}": getattr(decode, name) for name in ("alpha_ms", "gamma_ms", "beta_ms", "r2")},
        **{
            f"prefill_{name}": getattr(prefill, name) for name in ("base_ms", "per_token_ms", "per_token_rank_ms", "r2")
        },
    }


def _table(found: list[Comparison]) -> TextTable:
    rows = [
        (
            *(str(one.instances), one.routing, f"{one.load:g}", str(one.requests)),
            *_pair(one, "tpt_mean_ms"),
            *_pair(one, "ttft_p95_ms"),
            f"{one.measured.attainment:.1%}, {one.simulated.attainment:.1%}",
        )
        for one in found
    ]
    heads = ("instances", "routing", "load", "requests", "mean TPT, ms", "off by", "TTFT p95, ms", "off by", "SLO")
    return TextTable("fleets, measured and simulated", heads, tuple(rows))


def _pair(one: Comparison, name: str) -> tuple[str, str]:
    measured, simulated = getattr(one.measured, name), getattr(one.simulated, name)
    return f"{measured:.1f}, {simulated:.1f}", f"{simulated / measured - 1:+.1%}"


if __name__ == "__main__":
    main()
