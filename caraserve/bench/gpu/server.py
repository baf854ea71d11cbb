"""Stage `server`: runs the whole server under a paper's load, in several loading modes.

The gaps between running requests' tokens are compared with those in mode `cached` under the same requests: the
difference is the effect of cold starts on running requests.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caraserve.bench.gpu.results import StageResult
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.errors import BackendFailed

_BASELINE = "cached"
_TTFT_TARGET, _GAP_TARGET = 1.02, 1.05
_KEPT_S = 5.0  # of the stage's time, kept for reading the report
_ON_THE_GPU = ("--", "--device", "cuda")  # without it, a server that finds no GPU would use the CPU


def server(setup: CheckSetup) -> StageResult:
    """Runs `caraserve bench modes` and reads its report. Raises BackendFailed when the benchmark fails."""
    folder = setup.folder / "report"
    setup.bench_modes(arguments(setup.server_arguments, folder), setup.left_s - _KEPT_S)
    try:
        report = json.loads((folder / "modes.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendFailed(f"bench modes left no report: {error}") from error
    result = StageResult({"runs": report["runs"], "notes": report["notes"], "arguments": report["arguments"]})
    _judge(report["runs"], result)
    return result


def arguments(more: Sequence[str], folder: Path) -> list[str]:
    """Returns the arguments of `caraserve bench modes`. Those in `more` come last and so replace the defaults here."""
    ours = ["--preset", "toppings-s3", "--random-model", "llama2-7b", "--repeats", "1", "--calm-cores", "64"]
    own = list(more)
    at = own.index("--") if "--" in own else len(own)
    return [*ours, *own[:at], "--save", str(folder), *(own[at:] or _ON_THE_GPU)]


def _judge(runs: Sequence[dict[str, Any]], result: StageResult) -> None:
    whole = [run for run in runs if not run["interrupted"]]
    if len(whole) < len(runs):
        result.add_line("server", f"time was up: {len(whole)} of {len(runs)} runs are whole", "all", met=False)
    base = next((run for run in whole if run["label"] == _BASELINE), None)
    if base is None:
        raise BackendFailed(f"bench modes did not come to the end of {_BASELINE} in time")
    for run in whole:
        latency, value = run["latency"], f"{run['completed']} of {run['sent']} requests"
        mean_ms = latency["ttft"]["mean_ms"] if latency["ttft"] else float("nan")
        result.add_line(f"server, {run['label']}", f"{value}, mean TTFT {mean_ms:.1f} ms")
        if run is base or not latency["itl"]:
            continue
        ratio = mean_ms / base["latency"]["ttft"]["mean_ms"]
        gap = latency["itl"]["percentiles_ms"]["p99"] / base["latency"]["itl"]["percentiles_ms"]["p99"]
        result.figures.setdefault("beside_cached", {})[run["label"]] = {"ttft": ratio, "itl_p99": gap}
        if run["label"] == "auto":
            result.at_most("server, auto ÷ cached, mean TTFT", ratio, _TTFT_TARGET)
            result.at_most("server, running requests' p99 gap, cold arrivals ÷ warm", gap, _GAP_TARGET)
        else:
            result.add_line(f"server, {run['label']} ÷ cached", f"mean TTFT {ratio:.2f}, p99 gap {gap:.2f}")
