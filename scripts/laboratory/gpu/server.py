"""Stages `server` and `modes`: the whole server under a paper's load, in two loading modes and in all.

The gaps between running requests' tokens are compared with those in mode `cached` under the same requests: the
difference is the effect of cold starts on running requests.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caraserve.errors import BackendFailed
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup

_BASELINE = "cached"
_TTFT_TARGET, _GAP_TARGET = 1.02, 1.05
_KEPT_S = 5.0  # of the stage's time, kept for reading the report
# An adapter of all modules of a 7B shape and rank 64 takes a link of PCIe 5 as long as a decode iteration takes.
_LOAD = ("--preset", "toppings-s3", "--targets", "all", "--request-rate", "9", "--repeats", "1", "--calm-cores", "64")
_ON_THE_GPU = ("--device", "cuda")  # without it, a server that finds no GPU would use the CPU


@dataclass(frozen=True, slots=True)
class BesideCached:
    """A mode's latencies relative to those of mode `cached`."""

    ttft: float  # mean
    itl_p99: float


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """The report of `caraserve bench modes`, and the modes beside `cached`."""

    runs: tuple[dict[str, Any], ...]  # JSON, as the report has them
    notes: tuple[str, ...]
    arguments: dict[str, Any]
    beside_cached: dict[str, BesideCached]


def server(setup: CheckSetup) -> StageResult[ServerFigures]:
    """Compares `auto` with `cached`. Raises BackendFailed when the benchmark fails."""
    return measure(setup, setup.effort.server)


def measure(setup: CheckSetup, load: Sequence[str]) -> StageResult[ServerFigures]:
    """Runs `caraserve bench modes` and reads its report. Raises BackendFailed when the benchmark fails."""
    folder, lines = setup.saved / "report", Lines()
    argv = arguments(load, setup.effort.serve, setup.server_arguments, folder)
    setup.bench_modes(argv, setup.left_s - _KEPT_S)
    try:
        report = json.loads((folder / "modes.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendFailed(f"bench modes left no report: {error}") from error
    beside = _judge(report["runs"], lines)
    figures = ServerFigures(tuple(report["runs"]), tuple(report["notes"]), report["arguments"], beside)
    return StageResult(figures, lines.all)


def arguments(load: Sequence[str], serve: Sequence[str], more: Sequence[str], folder: Path) -> list[str]:
    """Returns the arguments of `caraserve bench modes`. Those in `more`, also those after `--` there, come last and so
    replace the others."""
    at = list(more).index("--") if "--" in more else len(more)
    return [*_LOAD, *load, *more[:at], "--save", str(folder), "--", *_ON_THE_GPU, *serve, *more[at + 1 :]]


def _judge(runs: Sequence[dict[str, Any]], lines: Lines) -> dict[str, BesideCached]:
    whole = [run for run in runs if not run["interrupted"]]
    if len(whole) < len(runs):
        lines.add("server", f"time was up: {len(whole)} of {len(runs)} runs are whole", "all", met=False)
    base = next((run for run in whole if run["label"] == _BASELINE), None)
    if base is None:
        raise BackendFailed(f"bench modes did not come to the end of {_BASELINE} in time")
    found: dict[str, BesideCached] = {}
    for run in whole:
        latency, value = run["latency"], f"{run['completed']} of {run['sent']} requests"
        mean_ms = latency["ttft"]["mean_ms"] if latency["ttft"] else float("nan")
        lines.add(f"server, {run['label']}", f"{value}, mean TTFT {mean_ms:.1f} ms")
        if run is base or not latency["itl"]:
            continue
        ratio = mean_ms / base["latency"]["ttft"]["mean_ms"]
        gap = latency["itl"]["percentiles_ms"]["p99"] / base["latency"]["itl"]["percentiles_ms"]["p99"]
        found[run["label"]] = BesideCached(ratio, gap)
        if run["label"] == "auto":
            lines.at_most("server, auto ÷ cached, mean TTFT", ratio, _TTFT_TARGET)
            lines.at_most("server, running requests' p99 gap, cold arrivals ÷ warm", gap, _GAP_TARGET)
        else:
            lines.add(f"server, {run['label']} ÷ cached", f"mean TTFT {ratio:.2f}, p99 gap {gap:.2f}")
    return found


def modes(setup: CheckSetup) -> StageResult[ServerFigures]:
    """Compares every loading mode with `cached`. Raises BackendFailed when the benchmark fails."""
    return measure(setup, setup.effort.modes)
