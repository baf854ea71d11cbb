"""Files of a report: a JSON document, a CSV row for every request, figures; a document read back, and two compared."""

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from caraserve.bench.records import Run, machine, versions
from caraserve.bench.report.ratios import LATENCY_FIGURES, Figure, by_label, ratio_document
from caraserve.bench.report.summary import Summary, known_mean
from caraserve.bench.report.tables import NONE, TextTable, number, to_rich
from caraserve.errors import ConfigError

SCHEMA = 1
_COLUMNS = (
    *("run", "index", "model", "rank", "due_s", "sent_s", "first_token_s", "last_token_s", "done_s"),
    *("prompt_tokens", "output_tokens", "error"),
)


@dataclass(frozen=True, slots=True)
class SavedReport:
    """A report that was read from a file."""

    bench: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    arguments: dict[str, Any]
    notes: tuple[str, ...]
    runs: tuple[Summary, ...]


def document(
    bench: str, summaries: Sequence[Summary], arguments: Mapping[str, object], notes: Sequence[str]
) -> dict[str, Any]:
    """Returns the report as JSON values: every figure, and everything needed to repeat the measurement."""
    return {
        "bench": bench,
        "schema": SCHEMA,
        "seed": arguments.get("seed"),
        "machine": machine(),
        "versions": versions(),
        "arguments": {name: _jsonable(value) for name, value in arguments.items()},
        "notes": list(notes),
        "valid": bool(summaries) and all(summary.valid for summary in summaries),
        "beside": ratio_document(summaries),
        "runs": [asdict(summary) for summary in summaries],
    }


def save_report(folder: Path, report: Mapping[str, Any], runs: Sequence[Run], plots: Mapping[str, bytes]) -> list[Path]:
    """Writes JSON, CSV and figures to a folder and returns the files. Raises ConfigError if it cannot be written."""
    contents = {f"{report['bench']}.json": as_json(report), "requests.csv": _csv(runs).encode()}
    return write_files(folder, {**contents, **plots})


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Writes files by name to a folder and returns their paths. Raises ConfigError if one cannot be written."""
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--save {folder}: {error.strerror}") from error
    return [folder / name for name in contents]


def make_folder(folder: Path | None) -> None:
    """Creates the folder of `--save` before anything is measured. Raises ConfigError if it cannot be written to."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--save {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--save {folder}: it cannot be written to")


def as_json(document: Mapping[str, Any]) -> bytes:
    """Returns a document as indented JSON."""
    return (json.dumps(document, indent=1) + "\n").encode()


def load_saved(path: Path) -> SavedReport:
    """Reads a document that `save_report` has written. Raises ConfigError that says what is wrong with it."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError(f"{path} is not JSON") from None
    if not isinstance(content, dict) or "bench" not in content or content.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is no report of `caraserve bench serve` or `modes`")
    where = "its head"
    try:
        runs = []
        report = msgspec.convert(content | {"runs": ()}, SavedReport)
        for index, run in enumerate(content["runs"]):
            where = f"runs[{index}]"
            runs.append(msgspec.convert(run, Summary))
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no whole report: {str(error).replace('$', where)}") from None
    return replace(report, runs=tuple(runs))


def _csv(runs: Sequence[Run]) -> str:
    """Returns a row for each request: times in s from the run's start, and a column for each phase reported."""
    phases = sorted({name for run in runs for record in run.records for name, _ in record.phases})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *(f"phase_{name}" for name in phases)])
    for place, run in enumerate(runs):
        for record in run.records:
            phase_ms = dict(record.phases)
            tokens = (record.token_s[0], record.token_s[-1]) if record.token_s else (None, None)
            times = (record.due_s, record.sent_s, *tokens, record.done_s)
            row = [f"{place}:{run.label}", record.index, record.model, record.rank]
            row += [None if time_s is None else f"{time_s:.6f}" for time_s in times]
            row += [record.prompt_tokens, record.output_tokens, record.error]
            writer.writerow([*row, *(phase_ms.get(name) for name in phases)])
    return text.getvalue()


def _jsonable(value: object) -> Any:
    """Converts paths to text, tuples to lists, NaN to `auto` and infinities to `inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return "auto" if math.isnan(value) else "inf"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value)


# --- comparison ---


_FIGURES: dict[str, Figure] = {
    **{f"{metric.upper()} {name}, ms": figure for (metric, name), figure in LATENCY_FIGURES.items()},
    "requests/s": lambda summary: summary.requests_per_s,
    "output tokens/s": lambda summary: summary.output_tokens_per_s,
    "requests complete": lambda summary: summary.completed,
    "requests failed": lambda summary: summary.failed,
    "SLO attainment": lambda summary: None if summary.attainment is None else summary.attainment.share,
}


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of both reports, as means over repeats."""

    name: str
    a: float
    b: float

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of each label that both reports have, and how the reports differ besides."""

    rows: dict[str, tuple[ComparedFigure, ...]]
    differences: tuple[tuple[str, str, str], ...]  # what, in A, in B

    def tables(self) -> Iterator[Table]:
        """Yields the tables for a terminal."""
        if self.differences:
            yield to_rich(TextTable("Measured differently", ("", "A", "B"), self.differences, left=3))
        for label, rows in self.rows.items():
            cells = tuple(
                (row.name, number(row.a), number(row.b), NONE if row.ratio is None else f"{row.ratio:.3f}")
                for row in rows
            )
            yield to_rich(TextTable(label, ("", "A", "B", "B ÷ A"), cells))


def compare(a: SavedReport, b: SavedReport) -> Comparison:
    """Compares two reports. Two reports of one label each are compared even if the labels differ: the label is often
    what was changed. Raises ConfigError when the reports have no label in common."""
    first, second = by_label(a.runs), by_label(b.runs)
    pairs = {label: (first[label], second[label]) for label in first if label in second}
    if not pairs and len(first) == len(second) == 1:
        (label_a, runs_a), (label_b, runs_b) = next(iter(first.items())), next(iter(second.items()))
        pairs = {f"{label_a} | {label_b}": (runs_a, runs_b)}
    if not pairs:
        raise ConfigError(f"no run of {', '.join(first)} is in the other report, which has {', '.join(second)}")
    rows = {}
    for label, sides in pairs.items():
        means = {name: [known_mean(map(figure, side)) for side in sides] for name, figure in _FIGURES.items()}
        rows[label] = tuple(
            ComparedFigure(name, x, y) for name, (x, y) in means.items() if x is not None and y is not None
        )
    return Comparison(rows, tuple(_differences(a, b)))


def _differences(a: SavedReport, b: SavedReport) -> Iterator[tuple[str, str, str]]:
    for name, side in (("A", a), ("B", b)):
        for summary in side.runs:
            if not summary.valid:
                reason = " ".join(summary.invalid_because)
                yield f"{summary.label} is NOT VALID", reason if name == "A" else NONE, reason if name == "B" else NONE
    for kind in ("machine", "versions", "arguments"):
        in_a, in_b = getattr(a, kind), getattr(b, kind)
        for name in sorted({*in_a, *in_b}):
            if name not in ("save", "date") and in_a.get(name) != in_b.get(name):
                x, y = (NONE if side.get(name) is None else str(side[name]) for side in (in_a, in_b))
                yield f"{kind}: {name}", x, y
