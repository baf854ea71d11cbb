"""Figures of one server: loading modes under the papers' loads, by `bench modes` on real servers.

The paper's systems and the modes that stand for them: CACHED is `cached`; S-LoRA and OnDmd are `ondemand`; dLoRA is
`merged`; Toppings and CaraServe are `auto`, which may also wait for layers, and `assisted`, which never does.
"""

import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import uvloop

from caraserve.bench.cli import bench_parser
from caraserve.bench.modes import BASELINE, bench_modes, modes_options
from caraserve.bench.records import RequestRecord, Run
from caraserve.bench.report.plots import Panel, Series
from caraserve.bench.report.ratios import RATIO_METRICS, LabelRatios, by_label, ratios_to_first
from caraserve.bench.report.summary import Columns, Summary, summarize
from caraserve.bench.serve import Measurements
from caraserve.bench.workload.presets import find_preset
from caraserve.errors import BackendFailed, ConfigError
from scripts.laboratory.papers.figures import FigureData, PaperOptions, Value, cdf_series, mean_value, spread

# A load of rank 64 on q, k and v of a 7B model, 100 MB. The papers only draw load times; at 9 requests/s they lost 29 %
# of the serving time to loads (Toppings, figure 4), which is 30 ms a load.
LOAD_S_OF_RANK_64 = 0.030
_PART_S = 30.0  # some six times as long as a request takes
_MODEL = ("--random-model", "100M", "--dtype", "float32")


def load_share(preset: str) -> float:
    """Returns the share of time for which the paper's link was busy if each request loaded an adapter."""
    setting = find_preset(preset)
    assert setting.rates is not None
    rank = statistics.fmean(setting.ranks.default)
    return setting.rates.default * LOAD_S_OF_RANK_64 * rank / 64


def run_preset(
    preset: str, figure: Mapping[str, str], options: PaperOptions, words: Sequence[str] = ()
) -> Measurements:
    """Runs a setting in the figure's modes, with these arguments too; returns the runs of the modes that it shows.

    Half of the cores stand for the GPU, the others for its host's CPUs: workers take next to no time from the model, as
    on the papers' machines. Figures of one setting have the same modes, so that they share runs. Raises BackendFailed.
    """
    device, host = split_cores(sorted(os.sched_getaffinity(0)))
    serve = f"--cpu-threads {len(device)} {figure.get('serve') or worker_cores(host)}"
    measured = _shared_runs((*_preset_words(preset, figure, options), *words), options, serve)
    shown = figure.get("shown", figure["modes"]).split(",")
    cores = len({*device, *host})
    note = f"The model has {len(device)} of {cores} cores, CPU LoRA workers have the others."
    runs = [run for run in measured.runs if run.label in shown]
    return replace(measured, runs=runs, notes=[note, *measured.notes])


def split_cores(cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the cores that stand for the GPU, and those of its host's CPUs; a single core is both."""
    half = max(1, len(cores) // 2)
    return cores[:half], cores[half:] or cores


def worker_cores(cores: Sequence[int]) -> str:
    """Returns the server's argument that gives CPU LoRA workers these cores."""
    return f"--lora-cpus {','.join(map(str, cores))}"


def _preset_words(preset: str, figure: Mapping[str, str], options: PaperOptions) -> list[str]:
    """Returns the arguments of `bench modes` for a setting: the duration in parts in which the modes alternate."""
    parts = max(1, round(options.duration_s / _PART_S))
    words = ["--preset", preset, "--modes", figure["modes"], "--scale", "0.02"]
    words += ["--load-share", f"{load_share(preset):g}", "--duration-s", f"{options.duration_s / parts:g}"]
    return [*words, "--repeats", str(options.repeats * parts), *figure.get("arguments", "").split()]


def run_modes(words: Sequence[str], options: PaperOptions, serve: str = "") -> Measurements:
    """Runs `bench modes` with these arguments. Raises BackendFailed if it was cut off."""
    args = bench_parser().parse_args(["modes", *_MODEL, "--seed", str(options.seed), *words])
    args.serve_arguments = tuple(serve.split())
    measured = uvloop.run(bench_modes(*modes_options(args)))
    if measured.failure is not None or len(measured.runs) < args.repeats * len(args.modes):
        raise BackendFailed(f"the measurement was cut off: {measured.failure or 'interrupted'}")
    return measured


@cache
def _shared_runs(words: tuple[str, ...], options: PaperOptions, serve: str) -> Measurements:
    """Runs `bench modes` for the first of several figures with the same arguments."""
    return run_modes(words, options, serve)


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


_ADAPTERS = 128  # of the skewed loads: 512 would only be more files
# Five requests of rank 128 with 128 and 32 tokens, 200 ms apart (Toppings, figure 3). A 7B model takes about 700 ms for
# one on an A100, so that a request lasts 3.5 gaps, and a load of rank 128 takes 60 ms, 0.3 gaps.
_STAGGERED, _GAPS_A_REQUEST, _LOAD_SHARE_OF_GAP = 5, 3.5, 0.3
_RANKS = (8, 16, 32, 64, 128)
_GROUPS = {"one group": "--pipeline-groups 1", "several groups": ""}
_LOAD_SHARE_OF_PREFILL = 0.8  # rank 64: 30 ms beside a prefill of 128 tokens, on the paper's A100
_BYTES_OF_RANK_64 = 5_898_240  # q, k and v of 12 layers of width 640 in fp16


def staggered(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Sends five equal requests for five adapters one after another, and divides their latencies by the last one's."""
    same = ["--lora-assignment", "distinct", "--adapters", "12", "--resident", "5", "--ranks", "128"]
    same += ["--lengths", "fixed:128/32", "--num-prompts", str(_STAGGERED)]
    alone = run_modes([*same, "--modes", BASELINE, "--max-concurrency", "1", "--repeats", "1"], options)
    gap_s = statistics.median(record.e2e_s for record in alone.runs[0].records) / _GAPS_A_REQUEST
    words = [*same, "--arrivals", "uniform", "--request-rate", f"{1 / gap_s:g}", "--modes", figure["modes"]]
    words += ["--load-share", str(_LOAD_SHARE_OF_GAP), "--repeats", str(max(options.repeats, 3))]
    measured = run_modes(words, options)
    values, series = [], []
    base_s = [_mean_e2e_s(run) for run in by_label(measured.runs)[BASELINE]]
    for label, runs in by_label(measured.runs).items():
        relative = [[record.e2e_s / run.records[-1].e2e_s for record in run.records[:-1]] for run in runs]
        means = tuple(statistics.fmean(each) for each in zip(*relative, strict=True))
        series.append(Series(label, means))
        values.append(Value(f"{label}: first request ÷ last", means[0], spread=spread([each[0] for each in relative])))
        ratios = [_mean_e2e_s(run) / base for run, base in zip(runs, base_s, strict=True)]
        values.append(mean_value(f"{label}: mean of all ÷ {BASELINE}", ratios))
    names = tuple(f"request {index + 1}" for index in range(_STAGGERED - 1))
    panel = Panel("Latency by request", "E2E ÷ the last request's", tuple(series), categories=names)
    setting = (f"Requests {1000 * gap_s:.0f} ms apart, {_GAPS_A_REQUEST:g} of which a request alone lasts.",)
    return FigureData("measured", (*setting, *measured.notes), tuple(values), (panel,))


def interruptions(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Sends skewed loads at three rates, and reports the share of each request's time that went to loads."""
    notes: dict[str, None] = {}
    values, panels = [], []
    for preset in figure["presets"].split(","):
        measured = run_preset(preset, figure, options, ("--adapters", str(_ADAPTERS)))
        notes |= dict.fromkeys(f"{preset}: {note}" for note in (*measured.notes, parts_note(measured.runs)))
        rate = preset.rpartition("-")[2]
        series = []
        for label, repeats in by_label([summarize(run) for run in measured.runs]).items():
            lost = [100 * one.cold_start_share for one in repeats if one.cold_start_share is not None]
            often = [one.interruptions.median_per_request for one in repeats if one.interruptions is not None]
            values.append(mean_value(f"{rate}/s lost, {label}", lost, "%"))
            name = f"{rate}/s interruptions a request, median"
            values.append(mean_value(f"{name}, {label}", often, ""))
        for label, runs in by_label(measured.runs).items():
            series.append(cdf_series(label, [100 * _lost(record) for run in runs for record in run.records]))
        panels.append(Panel(f"{rate} requests/s of the paper", "requests, %", tuple(series), "share of E2E, %"))
    return FigureData("measured", tuple(notes), tuple(values), tuple(panels))


def load_times(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Requests adapters of each rank one after another, and reports the server's own time for their loads."""
    link = _BYTES_OF_RANK_64 / 1e6 / LOAD_S_OF_RANK_64
    ranks = ",".join(map(str, _RANKS))
    words = ["--modes", f"{BASELINE},ondemand", "--lora-assignment", "round-robin", "--ranks", ranks]
    words += ["--adapters", "20", "--resident", "5", "--num-prompts", "20", "--lengths", "fixed:64/2"]
    words += ["--max-concurrency", "1", "--emulate-link-mb-per-s", f"{link:g}", "--repeats", "1"]
    measured = run_modes(words, options)
    found: dict[int, list[float]] = {rank: [] for rank in _RANKS}
    for run in measured.runs:
        for record in run.records if run.label == "ondemand" else ():
            if (load_ms := _phase(record, "load")) > 0:  # else the warm-up had left the adapter on the device
                found[record.rank or 0].append(load_ms)
    means = {rank: statistics.fmean(loads_ms) for rank, loads_ms in found.items()}
    values = [Value(f"rank {rank}", ms, "ms", spread(found[rank])) for rank, ms in means.items()]
    values.append(Value("rank 64 ÷ rank 8", means[64] / means[8]))
    panel = Panel("Time to load an adapter", "ms", (Series("here", tuple(means.values()), _RANKS),), "rank")
    theirs_ms = 1000 * LOAD_S_OF_RANK_64
    note = f"The link is emulated at {link:.0f} MB/s, at which rank 64 takes {theirs_ms:g} ms, as on the A100."
    return FigureData("measured", (note, *measured.notes), tuple(values), (panel,))


def iterations(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Sends a load to servers in several modes, and reports durations of prefills, with loads, and of decode steps: the
    mean of each repeat, and every one of the first repeat over time."""
    measured = run_preset(figure["preset"], figure, options)
    values: list[Value] = []
    panels: list[Panel] = []
    for title, name, time_ms in (
        ("Prefill, with loading", "prefill with load", _prefill_ms),
        ("Decode step", "decode step", _decode_step_ms),
    ):
        lines = []
        for label, runs in by_label(measured.runs).items():
            means = [statistics.fmean(map(time_ms, _done(run))) for run in runs]
            values.append(mean_value(f"{label}: {name}, mean", means, "ms"))
            first = _done(runs[0])
            at_s = tuple(round(record.due_s, 2) for record in first)
            lines.append(Series(label, tuple(round(time_ms(record), 2) for record in first), at_s))
        panels.append(Panel(title, "ms", tuple(lines), "time, s", points=True))
    return FigureData("measured", (*measured.notes, parts_note(measured.runs)), tuple(values), tuple(panels))


def pipelining(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Sends requests for absent adapters one after another, copied in one group of layers and in several."""
    values: list[Value] = []
    series: dict[str, list[float]] = {name: [] for name in _GROUPS}
    notes: list[str] = []
    for rank in (64, 128):
        same = ["--lora-assignment", "round-robin", "--adapters", "12", "--resident", "3", "--ranks", str(rank)]
        same += ["--lengths", "fixed:128/2", "--num-prompts", "36", "--max-concurrency", "1", "--request-rate", "inf"]
        alone = run_modes([*same, "--modes", BASELINE, "--repeats", "1"], options)
        prefill_s = _median_ttft_s(alone.runs[0])
        link = _BYTES_OF_RANK_64 / 1e6 / (_LOAD_SHARE_OF_PREFILL * prefill_s)
        words = [*same, "--modes", f"{BASELINE},assisted", "--emulate-link-mb-per-s", f"{link:g}", "--repeats", "1"]
        ttft_s: dict[str, list[float]] = {name: [] for name in _GROUPS}
        for _ in range(options.repeats):
            for name, serve in _GROUPS.items():
                measured = run_modes(words, options, serve)
                ttft_s[name] += [_median_ttft_s(run) for run in measured.runs if run.label == "assisted"]
        ratios = [one / several for one, several in zip(*ttft_s.values(), strict=True)]
        values.append(mean_value(f"rank {rank}: one group ÷ several, TTFT", ratios))
        for name, seconds in ttft_s.items():
            series[name].append(1000 * statistics.median(seconds))
        notes.append(f"Rank {rank}: a load takes {_LOAD_SHARE_OF_PREFILL * rank / 64:.0%} of a prefill of 128 tokens.")
    bars = tuple(Series(name, tuple(means)) for name, means in series.items())
    panel = Panel("Prefill of 128 tokens, assisted", "TTFT, ms", bars, categories=("rank 64", "rank 128"))
    return FigureData("measured", tuple(notes), tuple(values), (panel,))


def _mean_e2e_s(run: Run) -> float:
    return statistics.fmean(record.e2e_s for record in run.records)


def _done(run: Run) -> list[RequestRecord]:
    return [record for record in run.records if record.error is None]


def _prefill_ms(record: RequestRecord) -> float:
    return _phase(record, "prefill") + _phase(record, "load") + _phase(record, "stalled")


def _decode_step_ms(record: RequestRecord) -> float:
    return _phase(record, "decode") / max(1, record.output_tokens - 1)


def _median_ttft_s(run: Run) -> float:
    return statistics.median(record.ttft_s for record in run.records if record.ttft_s is not None)


def _lost(record: RequestRecord) -> float:
    """Returns the share of a request's time in which it waited for its own or another's load."""
    lost_ms = sum(_phase(record, name) for name in ("load", "stalled", "interrupted"))
    return lost_ms / (1000 * record.e2e_s)


def _phase(record: RequestRecord, name: str) -> float:
    return dict(record.phases).get(name, 0.0)
