"""A report's files: one JSON document, a row for every request, a page, pictures."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caraserve.bench.machine import machine, versions
from caraserve.bench.records import Run
from caraserve.bench.report.figures import all_pictures
from caraserve.bench.report.html import page
from caraserve.bench.report.plain import read
from caraserve.bench.report.ratios import every_ratio
from caraserve.bench.report.summary import Summary
from caraserve.errors import ConfigError

SCHEMA = 1
_COLUMNS = (
    "run",
    "index",
    "model",
    "rank",
    "due_s",
    "sent_s",
    "first_token_s",
    "last_token_s",
    "done_s",
    "prompt_tokens",
    "output_tokens",
    "error",
)


@dataclass(frozen=True, slots=True)
class Saved:
    """A report read back."""

    bench: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    arguments: dict[str, Any]
    notes: tuple[str, ...]
    runs: tuple[Summary, ...]


def document(
    bench: str, summaries: Sequence[Summary], arguments: Mapping[str, object], notes: Sequence[str]
) -> dict[str, Any]:
    """All that is said, and everything that is needed to measure it again."""
    return {
        "bench": bench,
        "schema": SCHEMA,
        "seed": arguments.get("seed"),
        "machine": machine(),
        "versions": versions(),
        "arguments": {name: _jsonable(value) for name, value in arguments.items()},
        "notes": list(notes),
        "valid": bool(summaries) and all(summary.valid for summary in summaries),
        "beside": every_ratio(summaries),
        "runs": [asdict(summary) for summary in summaries],
    }


def save(folder: Path, told: Mapping[str, Any], runs: Sequence[Run], summaries: Sequence[Summary]) -> list[Path]:
    """Writes everything to a folder and returns the files. Raises ConfigError where it cannot be written."""
    pictures = all_pictures(runs, summaries)
    contents = {
        f"{told['bench']}.json": (json.dumps(told, indent=1) + "\n").encode(),
        "requests.csv": _rows(runs).encode(),
        "report.html": page(told, summaries, pictures).encode(),
        **{f"{picture.name}.png": picture.png for picture in pictures},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--save {folder}: {error.strerror}") from error
    return [folder / name for name in contents]


def load_saved(path: Path) -> Saved:
    """Reads a document of `save`. Raises ConfigError that says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{path} is not JSON") from None
    if not isinstance(content, dict) or "bench" not in content or content.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is no report of `caraserve bench serve` or `modes`")
    try:
        return Saved(
            bench=read(str, content["bench"], "bench"),
            machine=dict(content["machine"]),
            versions=dict(content["versions"]),
            arguments=dict(content["arguments"]),
            notes=tuple(map(str, content["notes"])),
            runs=tuple(read(Summary, run, f"runs[{index}]") for index, run in enumerate(content["runs"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no whole report: {error}") from None


def _rows(runs: Sequence[Run]) -> str:
    """Numbers only, times in s from the run's start; a column for each phase that any server told."""
    phases = sorted({name for run in runs for record in run.records for name, _ in record.phases})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *(f"phase_{name}" for name in phases)])
    for number, run in enumerate(runs):
        for record in run.records:
            told = dict(record.phases)
            tokens = (record.token_s[0], record.token_s[-1]) if record.token_s else (None, None)
            times = (record.due_s, record.sent_s, *tokens, record.done_s)
            writer.writerow(
                [
                    f"{number}:{run.label}",
                    record.index,
                    record.model,
                    record.rank,
                    *(None if time_s is None else f"{time_s:.6f}" for time_s in times),
                    record.prompt_tokens,
                    record.output_tokens,
                    record.error,
                    *(told.get(name) for name in phases),
                ]
            )
    return text.getvalue()


def _jsonable(value: object) -> Any:
    """Paths as text, tuples as lists, and no number that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return "auto" if math.isnan(value) else "inf"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value)
