"""Files of a report: one JSON document, a CSV row for every request, figures; and reading a document back."""

import csv
import dataclasses
import io
import json
import math
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from caraserve.bench.records import Run, machine, versions
from caraserve.bench.report.ratios import ratio_document
from caraserve.bench.report.summary import Summary
from caraserve.errors import ConfigError

SCHEMA = 1
_T = TypeVar("_T")
_SCALARS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
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
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{path} is not JSON") from None
    if not isinstance(content, dict) or "bench" not in content or content.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is no report of `caraserve bench serve` or `modes`")
    try:
        return SavedReport(
            bench=read_dataclass(str, content["bench"], "bench"),
            machine=dict(content["machine"]),
            versions=dict(content["versions"]),
            arguments=dict(content["arguments"]),
            notes=tuple(map(str, content["notes"])),
            runs=tuple(read_dataclass(Summary, run, f"runs[{index}]") for index, run in enumerate(content["runs"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no whole report: {error}") from None


def _csv(runs: Sequence[Run]) -> str:
    """Returns a row for each request: times in s from the run's start, and a column for each phase reported."""
    phases = sorted({name for run in runs for record in run.records for name, _ in record.phases})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_COLUMNS, *(f"phase_{name}" for name in phases)])
    for number, run in enumerate(runs):
        for record in run.records:
            phase_ms = dict(record.phases)
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
                    *(phase_ms.get(name) for name in phases),
                ]
            )
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


def read_dataclass(kind: type[_T], value: object, where: str) -> _T:
    """Builds a frozen dataclass from JSON values: the opposite of `dataclasses.asdict`.

    Fields may be scalars, dataclasses, `tuple[X, ...]`, `dict[str, X]` and `X | None`. A field with a default may be
    missing, as in reports of older versions. Raises ValueError that names the field, prefixed by `where`.
    """
    made: _T = _read(kind, value, where)
    return made


def _read(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _read(arguments[0], value, where)
    if origin is tuple:
        _expect(isinstance(value, list), "a list", where)
        return tuple(_read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), "an object", where)
        return {name: _read(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if kind is float and type(value) is int:  # JavaScript writes 3.0 as 3
        value = float(value)
    _expect(type(value) is kind and not (kind is float and not math.isfinite(value)), _SCALARS[kind], where)
    return value


def _object(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), "an object", where)
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        _expect(field.name in value or field.default is not dataclasses.MISSING, "there", f"{where}.{field.name}")
    found = {name: _read(hint, value[name], f"{where}.{name}") for name, hint in hints.items() if name in value}
    return kind(**found)


def _expect(good: bool, what: str, where: str) -> None:
    if not good:
        raise ValueError(f"{where} is not {what}")
