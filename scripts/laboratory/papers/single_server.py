"""Figures of one server: loading modes under the papers' loads, by `bench modes` on real servers.

The paper's systems and the modes that stand for them: CACHED is `cached`; S-LoRA and OnDmd are `ondemand`; dLoRA is
`merged`; Toppings and CaraServe are `auto`, which may also wait for layers, and `assisted`, which never does.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from caraserve.bench.modes import BASELINE
from caraserve.bench.records import Run
from caraserve.bench.report.ratios import RATIO_METRICS, LabelRatios, by_label, ratios_to_first
from caraserve.bench.report.summary import Columns, Summary, summarize
from caraserve.bench.serve import Measurements
from caraserve.errors import ConfigError
from scripts.laboratory.papers.command import PaperOptions
from scripts.laboratory.papers.result import FigureData, Panel, Series, Value, cdf_series, mean_value
from scripts.laboratory.papers.servers import run_preset, split_cores, worker_cores

_LEAST_CORES = 16  # eight for the device, and eight for workers


def loading_modes(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Sends each setting's load to a server in each mode, and compares means with those of `cached`."""
    notes: dict[str, None] = {}
    values: list[Value] = []
    panels: list[Panel] = []
    for preset in figure["presets"].split(","):
        measured = run_preset(preset, figure, options)
        notes |= dict.fromkeys(f"{preset}: {note}" for note in (*measured.notes, parts_note(measured.runs)))
        summaries = [summarize(run, measured.slo) for run in measured.runs]
        values += _mode_values(preset, summaries)
        panels.append(_ratio_panel(preset, ratios_to_first(summaries)))
        panels += _cdf_panels(preset, measured)
    return FigureData("measured", tuple(notes), tuple(values), tuple(panels))


def quarter_of_workers(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Does the same with a quarter of the CPU LoRA workers, so that each computes four times the tokens. Raises
    ConfigError on a machine with too few cores for that."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < _LEAST_CORES:
        raise ConfigError(
            f"this figure needs {_LEAST_CORES} cores, so that a quarter of the CPU LoRA workers are still several; "
            f"this machine has {len(cores)}"
        )
    _, host = split_cores(cores)
    return loading_modes({**figure, "serve": worker_cores(host[: len(host) // 4])}, options)


def use_of_cores(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Sends a load to a server in each mode, and reports what its process and its CPU LoRA workers computed."""
    measured = run_preset(figure["preset"], figure, options)
    values: list[Value] = []
    for label, repeats in by_label([summarize(run) for run in measured.runs]).items():
        uses = [one.use for one in repeats if one.use is not None]
        workers = [use.worker_cores or 0.0 for use in uses]
        server = [use.cpu_cores - use.worker_cores for use in uses if use.worker_cores is not None]
        values.append(mean_value(f"{label}: server's process, of a core", [100 * cores for cores in server], "%"))
        values.append(mean_value(f"{label}: CPU LoRA workers, of a core", [100 * cores for cores in workers], "%"))
        times_ms = [one.cpu_lora_ms for one in repeats if one.cpu_lora_ms is not None]
        if times_ms:
            values.append(mean_value(f"{label}: CPU LoRA for a request", times_ms, "ms"))
    return FigureData("measured", (*measured.notes, parts_note(measured.runs)), tuple(values), ())


def parts_note(runs: Sequence[Run]) -> str:
    """Says how often each mode ran, and how many requests it had."""
    parts = len(next(iter(by_label(runs).values())))
    counts = sorted({len(run.records) for run in runs})
    requests = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{parts} runs of {requests} requests in each mode, the modes in turn; ± is their standard deviation."


def _mode_values(preset: str, summaries: Sequence[Summary]) -> Iterator[Value]:
    """Yields each mode's mean latencies over those of `cached`, and what it lost and used."""
    for line in ratios_to_first(summaries):
        if line.label != BASELINE:
            for metric, ratio in line.ratios.items():
                yield Value(f"{preset} {line.label} {metric.upper()}", ratio.median, spread=ratio.spread)
    for label, repeats in by_label(summaries).items():
        lost = {"lost to loads": "cold_start_share", "lost to others' loads": "interrupted_share"}
        for what, name in lost.items():
            yield from _shares(f"{preset} {label} {what}", (getattr(one, name) for one in repeats))
        yield from _shares(
            f"{preset} {label} link busy", (None if one.use is None else one.use.link_share for one in repeats)
        )
        cores = [one.use.cpu_cores for one in repeats if one.use is not None]
        if cores:
            yield mean_value(f"{preset} {label} CPU cores busy", cores, "")
        times_ms = [one.cpu_lora_ms for one in repeats if one.cpu_lora_ms is not None]
        if times_ms:
            yield mean_value(f"{preset} {label} CPU LoRA for a request", times_ms, "ms")


def _shares(what: str, shares: Iterable[float | None]) -> Iterator[Value]:
    known = [100 * share for share in shares if share is not None]
    if known:
        yield mean_value(what, known, "%")


def _ratio_panel(preset: str, lines: Sequence[LabelRatios]) -> Panel:
    categories = tuple(line.label for line in lines)
    series = (
        Series(metric.upper(), tuple(line.ratios[metric].median if metric in line.ratios else None for line in lines))
        for metric in RATIO_METRICS
    )
    return Panel(preset, f"mean ÷ {BASELINE}", tuple(series), categories=categories)


def _cdf_panels(preset: str, measured: Measurements) -> Iterator[Panel]:
    """Yields one panel for TTFT and one for TPT, with a line for each mode; repeats are pooled."""
    pooled = {label: [Columns.of(run.records) for run in runs] for label, runs in by_label(measured.runs).items()}
    for metric in ("ttft", "tpt"):
        lines = []
        for label, runs in pooled.items():
            found = np.concatenate([getattr(columns, f"{metric}_ms")[columns.ok] for columns in runs])
            lines.append(cdf_series(label, found))
        yield Panel(preset, "requests, %", tuple(lines), f"{metric.upper()}, ms")
