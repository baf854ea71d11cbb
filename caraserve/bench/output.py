"""Output of `bench serve`, `modes`, `compare` and `presets`: tables, files, JSON."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from caraserve.bench.options import ReportOptions
from caraserve.bench.report.files import compare, document, load_saved, make_folder, save_report, write_files
from caraserve.bench.report.plots import NO_FIGURES, can_draw
from caraserve.bench.report.ratios import PairedRatio, paired_document, paired_ratios
from caraserve.bench.report.run_plots import comparison_plot, run_plots
from caraserve.bench.report.summary import Summary, summarize
from caraserve.bench.report.tables import (
    NONE,
    TextTable,
    in_words,
    open_console,
    paired_table,
    report_tables,
    to_rich,
    write_document,
)
from caraserve.bench.serve import Measurements
from caraserve.bench.workload.presets import find_preset, load_presets
from caraserve.errors import BackendFailed, ConfigError

_INTERRUPTED = 130  # the exit code of shells after Ctrl-C


def run_and_report(
    kind: str,
    measure: Callable[[], Coroutine[Any, Any, Measurements]],
    options: ReportOptions,
    arguments: Mapping[str, object],
) -> int:
    """Runs a benchmark, prints and saves its report, and returns the exit code.

    With --json, and where stdout is not a terminal, the last line of stdout is one JSON document. Raises BackendFailed
    if the endpoint fails, and ConfigError if the report cannot be saved.
    """
    make_folder(options.save)
    try:
        measured = uvloop.run(measure())
    except OSError as error:
        raise BackendFailed(f"the endpoint is gone: {error.strerror or error}") from error
    summaries = [summarize(run, measured.slo, options.percentiles) for run in measured.runs]
    paired = paired_ratios(measured.runs)
    report = document(kind, summaries, arguments, measured.notes) | {"paired": paired_document(paired)}
    try:
        _print_and_save(summaries, paired, report, measured, options)
    finally:
        write_document(report, options.json)
    if measured.failure is not None:
        raise BackendFailed(f"ended early, with what was measured until then: {measured.failure}")
    if not measured.runs or any(run.interrupted for run in measured.runs):
        return _INTERRUPTED
    return 0 if any(summary.completed for summary in summaries) else 1


def _print_and_save(
    summaries: Sequence[Summary],
    paired: Mapping[str, Mapping[str, PairedRatio]],
    report: Mapping[str, object],
    measured: Measurements,
    options: ReportOptions,
) -> None:
    console = open_console()
    for table in report_tables(summaries, options.percentile_metrics):
        console.print(table)
    if paired:
        console.print(to_rich(paired_table(paired)))
    for summary in summaries:
        for reason in summary.invalid_because:
            console.print(f"{summary.label}: not valid: {reason}")
        if len(summaries) > 1:
            for error, count in summary.errors.items():
                console.print(f"{summary.label}: {count} failed: {error}")
    if len(summaries) == 1 and summaries[0].completed:
        console.print(in_words(summaries[0]))
    if options.save is not None:
        for path in save_report(options.save, report, measured.runs, run_plots(measured.runs, summaries)):
            console.print(f"written: {path}")
        if not can_draw():
            console.print(NO_FIGURES)


def show_comparison(a: Path, b: Path, folder: Path | None) -> int:
    """Prints two saved reports side by side, and draws their ratios to a PNG in `folder` if given. Returns 0."""
    comparison = compare(load_saved(a), load_saved(b))
    console = open_console()
    for table in comparison.tables():
        console.print(table)
    if folder is not None:
        if not can_draw():
            raise ConfigError("--save needs matplotlib to draw: install the package's `plot` extra")
        make_folder(folder)
        for path in write_files(folder, {"compare.png": comparison_plot(comparison)}):
            console.print(f"drawn in {path}")
    return 0


def show_presets(name: str | None) -> int:
    """Prints a table of the papers' settings, or one setting with its assumptions. Returns the exit code 0."""
    console = open_console()
    if name is None:
        heads = ("preset", "model", "requests/s", "adapters", "ranks", "popularity", "lengths", "source")
        rows = []
        for preset in (preset for key, preset in load_presets().items() if key == preset.name):
            rate = NONE if preset.rates is None else f"{preset.rates.default:g}"
            row = [preset.name, preset.base_model.default, rate, str(preset.adapters.default)]
            row += [",".join(map(str, preset.ranks.default)), preset.popularity.default, preset.lengths.default]
            rows.append([*row, preset.source])
        console.print(to_rich(TextTable("", heads, rows, left=len(heads))))
        return 0
    preset = find_preset(name)
    console.print(f"{preset.name}: {preset.source}; {preset.base_model.default} on {preset.hardware}")
    for note in preset.notes:
        console.print(f"- {note}")
    return 0
