"""From measured runs to what the user gets: tables, files, one JSON line."""

import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from caraserve.bench.options import ReportOptions
from caraserve.bench.report.compare import compare, draw
from caraserve.bench.report.files import document, load_saved, save
from caraserve.bench.report.summary import Summary, summarize
from caraserve.bench.report.tables import tables
from caraserve.bench.serve import Measured
from caraserve.bench.workload.presets import find_preset, load_presets
from caraserve.errors import BackendFailed, ConfigError

_INTERRUPTED = 130  # as shells have it
_WIDTH = 200  # of tables in a file or a pipe


def finish(
    kind: str, measure: Callable[[], Awaitable[Measured]], report: ReportOptions, asked: Mapping[str, object]
) -> int:
    """Measures, then says what came of it; returns the exit code. The last line of stdout is one JSON document."""
    _make(report.save)
    try:
        measured = uvloop.run(_awaited(measure))
    except OSError as error:
        raise BackendFailed(f"the endpoint is gone: {error.strerror or error}") from error
    summaries = [summarize(run, measured.slo, report.percentiles) for run in measured.runs]
    told = document(kind, summaries, asked, measured.notes)
    try:
        _tell(summaries, told, measured, report)
    finally:
        sys.stdout.write(json.dumps(told) + "\n")
    if measured.failure is not None:
        raise BackendFailed(f"ended early, with what was measured until then: {measured.failure}")
    if not measured.runs or any(run.interrupted for run in measured.runs):
        return _INTERRUPTED
    return 0 if any(summary.completed for summary in summaries) else 1


def _tell(summaries: Sequence[Summary], told: Mapping[str, object], measured: Measured, report: ReportOptions) -> None:
    console = _console()
    for table in tables(summaries, report.percentile_metrics):
        console.print(table)
    for summary in summaries:
        for reason in summary.invalid_because:
            console.print(f"{summary.label}: not valid: {reason}")
        if len(summaries) > 1:
            for error, count in summary.errors.items():
                console.print(f"{summary.label}: {count} failed: {error}")
    if report.save is not None:
        for path in save(report.save, told, measured.runs, summaries):
            console.print(f"written: {path}")


def _make(folder: Path | None) -> None:
    """Before anything is measured, not after."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--save {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--save {folder}: it cannot be written to")


async def _awaited(measure: Callable[[], Awaitable[Measured]]) -> Measured:
    return await measure()


def show_comparison(a: Path, b: Path, folder: Path | None) -> int:
    """Two saved reports beside one another."""
    comparison = compare(load_saved(a), load_saved(b))
    console = _console()
    for table in comparison.tables():
        console.print(table)
    if folder is not None:
        drawn = draw(comparison)
        if drawn is None:
            raise ConfigError("--save needs matplotlib to draw: install the package's `plot` extra")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "compare.png").write_bytes(drawn.png)
        except OSError as error:
            raise ConfigError(f"--save {folder}: {error.strerror}") from error
        console.print(f"drawn in {folder / 'compare.png'}")
    return 0


def show_presets(name: str | None) -> int:
    """All of the papers' settings, or one with its assumptions."""
    console = _console()
    if name is None:
        table = Table()
        for head in ("preset", "model", "requests/s", "adapters", "ranks", "popularity", "lengths", "source"):
            table.add_column(head)
        for key, preset in load_presets().items():
            if key == preset.name:
                rate = "–" if preset.rates is None else f"{preset.rates.default:g}"
                ranks = ",".join(map(str, preset.ranks.default))
                table.add_row(
                    key,
                    preset.base_model.default,
                    rate,
                    str(preset.adapters.default),
                    ranks,
                    preset.popularity.default,
                    preset.lengths.default,
                    preset.source,
                )
        console.print(table)
        return 0
    preset = find_preset(name)
    console.print(f"{preset.name}: {preset.source}; {preset.base_model.default} on {preset.hardware}")
    for note in preset.notes:
        console.print(f"- {note}")
    return 0


def _console() -> Console:
    """As wide as the terminal; elsewhere nothing is folded."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, soft_wrap=True, highlight=False, markup=False)
