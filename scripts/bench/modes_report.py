"""Medians, ratios over `cached`, the tables, the figure and the JSON document of `modes.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from arrivals import Load
from open_loop import Played, Timed
from rich.console import Console
from rich.table import Table

from caraserve.units import human_bytes

_WIDTH = 140  # columns of the table where stdout is no terminal
_COMPARED = ("ttft_ms", "tpt_ms", "e2e_ms")
_TARGETS = {"all": "all seven modules", "qkv": "q, k and v"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What was compared on what. `resident`: adapters that the device holds, except in `cached`."""

    dtype: str
    num_parameters: int
    adapters: int
    resident: int
    rank: int
    targets: str
    image_bytes: int
    link_mb_per_s: float  # emulated
    threads: int
    load: Load
    cpu_s_per_request: float | None  # found by the calibration

    @property
    def load_ms(self) -> float:
        """Of one adapter over the link."""
        return self.image_bytes / self.link_mb_per_s / 1000


@dataclass(frozen=True, slots=True)
class Run:
    """One mode in one repeat."""

    mode: str
    repeat: int
    played: Played


@dataclass(frozen=True, slots=True)
class Report:
    """All runs, of all modes in all repeats."""

    setting: Setting
    modes: Sequence[str]
    runs: Sequence[Run]

    def of(self, mode: str) -> list[Played]:
        """A mode's runs by repeat: the same place of two modes' lists had the same arrivals."""
        return [run.played for run in sorted(self.runs, key=lambda run: run.repeat) if run.mode == mode]


def _mean(value: Callable[[Timed], float]) -> Callable[[Played], float]:
    return lambda played: fmean(value(timed) for timed in played.timed)


def _percentile(values: Callable[[Timed], Sequence[float]], percent: float) -> Callable[[Played], float]:
    return lambda played: float(np.percentile([value for timed in played.timed for value in values(timed)], percent))


METRICS: Mapping[str, Callable[[Played], float]] = {
    "ttft_ms": _mean(lambda timed: timed.ttft_ms),
    "ttft_p50_ms": _percentile(lambda timed: [timed.ttft_ms], 50),
    "ttft_p99_ms": _percentile(lambda timed: [timed.ttft_ms], 99),
    "tpt_ms": _mean(lambda timed: timed.tpt_ms),
    "e2e_ms": _mean(lambda timed: timed.e2e_ms),
    "gap_p99_ms": _percentile(lambda timed: timed.gaps_ms, 99),
    "cold_share": _mean(lambda timed: float(timed.cold)),
    "queued_ms": _mean(lambda timed: timed.phases.queued_ms),
    "load_ms": _mean(lambda timed: timed.phases.load_ms),
    "prefill_ms": _mean(lambda timed: timed.phases.prefill_ms),
    "decode_ms": _mean(lambda timed: timed.phases.decode_ms),
    "stalled_ms": _mean(lambda timed: timed.phases.stalled_ms),
    "cpu_layers": _mean(lambda timed: float(timed.phases.cpu_layers)),
    "loads": lambda played: float(played.loads),
    "cores_used": lambda played: played.cores_used,
    "cores_elsewhere": lambda played: played.cores_elsewhere,
}
_COLUMNS = {
    "TTFT ms": "ttft_ms",
    "p50": "ttft_p50_ms",
    "p99": "ttft_p99_ms",
    "TPT ms": "tpt_ms",
    "E2E ms": "e2e_ms",
    "gap p99 ms": "gap_p99_ms",
}
_RATIO_COLUMNS = {
    "TTFT ÷": "ttft_ms",
    "TPT ÷": "tpt_ms",
    "E2E ÷": "e2e_ms",
    "gap p99 ÷": "gap_p99_ms",
    "cold TTFT ÷": "cold_ttft_ms",
    "warm TTFT ÷": "warm_ttft_ms",
}
_PHASES = {
    "cold": "cold_share",
    "loads": "loads",
    "queued ms": "queued_ms",
    "load ms": "load_ms",
    "prefill ms": "prefill_ms",
    "decode ms": "decode_ms",
    "stalled ms": "stalled_ms",
    "CPU layers": "cpu_layers",
    "cores": "cores_used",
    "elsewhere": "cores_elsewhere",
}


def ratios(report: Report, mode: str) -> dict[str, list[float]]:
    """A mode's means over those of `cached`, by repeat. Those of cold and of warm requests compare the same requests;
    repeats without any are left out."""
    pairs = list(zip(report.of(mode), report.of("cached"), strict=True))
    result = {name: [METRICS[name](ours) / METRICS[name](base) for ours, base in pairs] for name in _COMPARED}
    result["gap_p99_ms"] = [METRICS["gap_p99_ms"](ours) / METRICS["gap_p99_ms"](base) for ours, base in pairs]
    for name, cold in (("cold_ttft_ms", True), ("warm_ttft_ms", False)):
        both = [_same(ours, base, cold) for ours, base in pairs]
        result[name] = [sum(a.ttft_ms for a, _ in some) / sum(b.ttft_ms for _, b in some) for some in both if some]
    return result


def _same(ours: Played, base: Played, cold: bool) -> list[tuple[Timed, Timed]]:
    return [(a, b) for a, b in zip(ours.timed, base.timed, strict=True) if a.cold == cold]


def print_tables(report: Report) -> None:
    """Latencies with their ratios, then where the time went."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    latencies = Table(title=_title(report.setting), caption=_caption(report.setting))
    phases = Table(
        title=f"Means of a request's phases; link emulated at {report.setting.link_mb_per_s:g} MB/s",
        caption="cores: of this process; elsewhere: CPU LoRA workers, other programs, other machines on the same host.",
    )
    for table, heads in ((latencies, [*_COLUMNS, *_RATIO_COLUMNS]), (phases, [*_PHASES])):
        table.add_column("mode", no_wrap=True)
        for head in heads:
            table.add_column(head, justify="right")
    for mode in report.modes:
        values = {name: median(map(metric, report.of(mode))) for name, metric in METRICS.items()}
        over = {name: each for name, each in ratios(report, mode).items() if each}
        cells = [f"{values[name]:.1f}" for name in _COLUMNS.values()]
        cells += [f"{median(over[name]):.2f}" if name in over else "–" for name in _RATIO_COLUMNS.values()]
        latencies.add_row(mode, *cells)
        phases.add_row(mode, *(_phase(name, values[name]) for name in _PHASES.values()))
    console.print(latencies)
    console.print(phases)


def _phase(name: str, value: float) -> str:
    if name == "cold_share":
        return f"{value:.0%}"
    digits = {"loads": 0, "cores_used": 2, "cores_elsewhere": 2}.get(name, 1)
    return f"{value:.{digits}f}"


def _title(setting: Setting) -> str:
    return (
        f"{setting.num_parameters:,} parameters, {setting.dtype}, {setting.threads} threads; "
        f"{setting.adapters} adapters of rank {setting.rank} on {_TARGETS[setting.targets]}, "
        f"{setting.resident} on the device; "
        f"link emulated at {setting.link_mb_per_s:g} MB/s"
    )


def _caption(setting: Setting) -> str:
    load = setting.load
    return (
        f"Poisson, {load.rps:.2f} requests/s, {load.popularity} adapters; means of {load.prompt_tokens} tokens in and "
        f"{load.output_tokens} out; an adapter of {human_bytes(setting.image_bytes)} takes {setting.load_ms:.1f} ms.\n"
        "TPT: a request's time ÷ its output tokens, waiting and prefill included. ÷: over cached in the same repeat, "
        "median of repeats.\ncold: the adapter was not on the device when the request came; compared with the same "
        "requests in cached, as warm ones are."
    )


def document(
    report: Report, args: Mapping[str, Any], machine: Mapping[str, Any], versions: Mapping[str, str]
) -> dict[str, Any]:
    """Everything, repeats and requests included, as JSON values."""
    return {
        "benchmark": "modes",
        "machine": dict(machine),
        "versions": dict(versions),
        "args": {name: str(value) if isinstance(value, Path) else value for name, value in args.items()},
        "setting": asdict(report.setting),
        "modes": {mode: _mode(report, mode) for mode in report.modes},
        "order": [{"repeat": run.repeat, "mode": run.mode} for run in report.runs],
    }


def _mode(report: Report, mode: str) -> dict[str, Any]:
    played = report.of(mode)
    metrics = {name: [metric(each) for each in played] for name, metric in METRICS.items()}
    return {
        "metrics": {name: {"median": median(each), "repeats": each} for name, each in metrics.items()},
        "over_cached": {
            name: {"median": median(each), "repeats": each} for name, each in ratios(report, mode).items() if each
        },
        "requests": [[_request(timed) for timed in each.timed] for each in played],
    }


def _request(timed: Timed) -> dict[str, Any]:
    phases = {name: round(value, 3) for name, value in asdict(timed.phases).items()}
    times = {"ttft_ms": round(timed.ttft_ms, 3), "e2e_ms": round(timed.e2e_ms, 3)}
    return {"adapter": timed.adapter, "cold": timed.cold, "output_tokens": timed.output_tokens} | times | phases


def plot(report: Report, file: Path) -> None:
    """Means over `cached` as bars, each labelled with its ratio, the smallest and largest repeat as a line on it."""
    # An extra, and only this option needs it.
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(11, 5), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(report.modes)
    for index, mode in enumerate(report.modes):
        over = ratios(report, mode)
        heights = [median(over[name]) for name in _COMPARED]
        spread = [[h - min(over[n]), max(over[n]) - h] for h, n in zip(heights, _COMPARED, strict=True)]
        places = [place + width * index for place in range(len(_COMPARED))]
        bars = axis.bar(places, heights, width, yerr=np.transpose(spread), error_kw={"alpha": 0.4}, label=mode)
        axis.bar_label(bars, [f"{height:.2f}×" for height in heights], fontsize=8, label_type="center")
    axis.axhline(1.0, color="black", linewidth=0.8)
    middle = width * (len(report.modes) - 1) / 2
    axis.set_xticks([place + middle for place in range(len(_COMPARED))], ["mean TTFT", "mean TPT", "mean E2E"])
    axis.set_ylabel("÷ cached")
    axis.set_title(_title(report.setting).replace("; ", "\n", 1), fontsize=10)
    axis.legend(ncols=len(report.modes), loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.savefig(file, dpi=150)
