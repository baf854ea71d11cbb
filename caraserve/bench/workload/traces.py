"""Reads recorded traffic in published formats, each with a name:

`azure-llm`  CSV: TIMESTAMP, ContextTokens, GeneratedTokens; or arrival_s, prompt_tokens, output_tokens and optionally
             adapter
`mooncake`   JSON lines: timestamp in ms, input_length, output_length; or CSV with the second set of columns above
`maf2019`    CSV with a row per function: columns that describe it, then its invocations in each minute, in columns
             named 1, 2, … or m0, m1, …; each function stands for an adapter. Without a file it is the sample of a
             checkout (scripts/laboratory), whose source and licence are in `distributions.json`
`lengths`    CSV: prompt_tokens, output_tokens
"""

import csv
import gzip
import json
import math
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.checkout import laboratory_file
from caraserve.bench.workload.forms import unknown
from caraserve.errors import ConfigError

MOST_TOKENS = 100_000_000  # limit of any count in a file: sums and products stay within 64 bits


@dataclass(frozen=True, slots=True)
class Row:
    """One unparsed row: cells are text in CSV files, and any JSON values in JSON files."""

    path: Path
    line: int
    cells: Mapping[str, object]

    def tokens(self, column: str) -> int:
        """Returns the cell as a whole number from 0 to MOST_TOKENS, or raises ConfigError."""
        value = count = self._cell(column)
        if isinstance(value, str) and value.isascii() and value.strip().isdecimal() and len(value) < 20:
            count = int(value)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_TOKENS:
            raise self.wrong(column, f"{_short(value)} is not a whole number from 0 to {MOST_TOKENS}")
        return count

    def number(self, column: str) -> float:
        """Returns the cell as a finite number, or raises ConfigError."""
        value = self._cell(column)
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.wrong(column, f"{_short(value)} is not a finite number")
        return number

    def date_s(self, column: str) -> float:
        """Returns the cell, an ISO 8601 date with time, in seconds since 1970. A date without a zone is UTC."""
        value = self._cell(column)
        try:
            date = datetime.fromisoformat(value) if isinstance(value, str) else None
        except ValueError:
            date = None
        if date is None:
            raise self.wrong(column, f"{_short(value)} is not a date and time like 2023-11-16 18:15:46.68")
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()

    def wrong(self, column: str, why: str) -> ConfigError:
        """Returns an error that names the file, the line and the column."""
        return ConfigError(f"{self.path}, line {self.line}, column {column!r}: {why}")

    def _cell(self, column: str) -> object:
        if column not in self.cells:
            raise self.wrong(column, "is missing")
        return self.cells[column]


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV file that is read row by row."""

    path: Path
    header: list[str]
    cells: Iterator[tuple[int, list[str]]]  # line number and cells of every row after the header

    @classmethod
    def open(cls, path: Path) -> "CsvTable":
        """Reads the header; empty lines are skipped. Raises ConfigError if the file is empty."""

        def cells() -> Iterator[tuple[int, list[str]]]:
            reader = csv.reader(lines(path))
            header: list[str] | None = None
            try:
                for row in reader:
                    if row:
                        same_width(path, reader.line_num, header or row, row)
                        header = header or row
                        yield reader.line_num, row
            except csv.Error as error:
                raise ConfigError(f"{path}, line {reader.line_num}: {error}") from None

        found = cells()
        first = next(found, None)
        if first is None:
            raise ConfigError(f"{path}: the file is empty")
        return cls(path, [name.strip() for name in first[1]], found)

    def rows(self, *columns: str) -> Iterator[Row]:
        """Yields the rows with cells by column. Raises ConfigError if one of these columns is missing."""
        for column in columns:
            if column not in self.header:
                shown = ", ".join(self.header[:8]) + (", …" if len(self.header) > 8 else "")
                raise ConfigError(f"{self.path}, line 1, column {column!r}: is missing; the header has {shown}")
        return (Row(self.path, line, dict(zip(self.header, cells, strict=True))) for line, cells in self.cells)


def same_width(path: Path, line: int, header: Sequence[str], cells: Sequence[str]) -> None:
    """Raises ConfigError if the row has fewer or more cells than the header."""
    if len(cells) < len(header):
        raise ConfigError(f"{path}, line {line}, column {header[len(cells)]!r}: is missing; the row ends before it")
    if len(cells) > len(header):
        raise ConfigError(f"{path}, line {line}: {len(cells)} cells, but the header names {len(header)}")


def json_rows(path: Path) -> Iterator[Row]:
    """Yields the JSON object on each line; empty lines are skipped."""
    for line, text in enumerate(lines(path), start=1):
        if not text.strip():
            continue
        try:
            cells = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {line}: not valid JSON: {error}") from None
        if not isinstance(cells, dict):
            raise ConfigError(f"{path}, line {line}: not a JSON object")
        yield Row(path, line, cells)


def lines(path: Path) -> Iterator[str]:
    """Yields the lines of a UTF-8 text file, decompressed if its name ends in `.gz`."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    line = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                yield raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}, line {line}: not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}, after line {line}: cannot be read: {error}") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


MINUTE_S = 60.0
INCLUDED = "maf2019"


@dataclass(frozen=True, slots=True, eq=False)
class RequestTrace:
    """Single requests in order of arrival. Columns that the file does not have are None."""

    source: str
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    at_s: NDArray[np.float64] | None = None  # since the first request
    adapters: NDArray[np.int64] | None = None  # numbered from 0, in the order of the file's rows that first name them


@dataclass(frozen=True, slots=True, eq=False)
class RateTrace:
    """The number of calls of each adapter in each minute, without single requests."""

    source: str
    calls: NDArray[np.int32]  # [adapters, minutes]

    def group(self, rng: np.random.Generator, adapters: int) -> "RateTrace":
        """Returns a random selection of `adapters` functions, or this trace itself if it has exactly that many.

        Raises ConfigError if the trace has fewer functions.
        """
        functions = len(self.calls)
        if adapters > functions:
            raise ConfigError(f"{self.source} has {functions} functions with calls; it cannot name {adapters} adapters")
        if adapters == functions:
            return self
        calls = self.calls[rng.choice(functions, adapters, replace=False)]
        return replace(self, calls=calls)


Trace: TypeAlias = RequestTrace | RateTrace


def parse_trace(text: str) -> Trace:
    """Reads the trace that a text such as `azure-llm:PATH` names."""
    name, colon, path = text.strip().partition(":")
    reader = READERS.get(name)
    if reader is None:
        raise unknown("trace", text, _forms())
    if name == INCLUDED and not colon:
        return included_trace()
    if not colon or not path:
        raise ConfigError(f"trace {text!r}: write {name}:PATH")
    return reader(Path(path))


@cache
def included_trace() -> RateTrace:
    """Returns the sample of Azure Functions 2019 of a checkout: 1,250 functions with calls, over one day. Raises
    ConfigError in an installed package."""
    path = laboratory_file("maf2019.csv.gz", "name a file of calls by minute, as maf2019:PATH")
    return replace(_read_functions(path), source="a sample of 1,250 functions of Azure Functions 2019")


def _forms() -> Iterator[str]:
    """Yields the notation of every trace."""
    for name in READERS:
        yield f"{name}[:PATH]" if name == INCLUDED else f"{name}:PATH"


def needs_trace(kind: str, trace: Trace | None) -> Trace:
    """Returns the trace, or raises ConfigError with the notation for traces if it is None."""
    if trace is None:
        raise ConfigError(f"{kind} 'trace' need a trace: {', '.join(_forms())}")
    return trace


def read_lengths(path: Path) -> RequestTrace:
    """Reads prompt and output lengths from a file in any of this module's formats that has them."""
    if _is_json(path):
        return _read_mooncake(path)
    table = CsvTable.open(path)
    return _original_azure(table) if "ContextTokens" in table.header else _untimed(table)


def _read_azure(path: Path) -> RequestTrace:
    table = CsvTable.open(path)
    return _original_azure(table) if "TIMESTAMP" in table.header else _timed(table)


def _read_mooncake(path: Path) -> RequestTrace:
    if not _is_json(path):
        return _timed(CsvTable.open(path))
    return _gather(path, json_rows(path), "input_length", "output_length", lambda row: row.number("timestamp") / 1e3)


def _original_azure(table: CsvTable) -> RequestTrace:
    columns = "ContextTokens", "GeneratedTokens"
    return _gather(table.path, table.rows("TIMESTAMP", *columns), *columns, lambda row: row.date_s("TIMESTAMP"))


def _timed(table: CsvTable) -> RequestTrace:
    adapter, columns = "adapter" if "adapter" in table.header else None, ("prompt_tokens", "output_tokens")
    rows = table.rows("arrival_s", *columns)
    return _gather(table.path, rows, *columns, lambda row: row.number("arrival_s"), adapter)


def _untimed(table: CsvTable) -> RequestTrace:
    columns = "prompt_tokens", "output_tokens"
    return _gather(table.path, table.rows(*columns), *columns, None)


def _gather(
    path: Path,
    rows: Iterator[Row],
    prompt: str,
    output: str,
    time_s: Callable[[Row], float] | None,
    adapter: str | None = None,
) -> RequestTrace:
    times_s, prompts, outputs, adapters = array("d"), array("q"), array("q"), array("q")
    indices: dict[object, int] = {}
    for row in rows:
        prompts.append(row.tokens(prompt))
        outputs.append(row.tokens(output))
        if time_s is not None:
            times_s.append(time_s(row))
        if adapter is not None:
            adapters.append(indices.setdefault(row.cells[adapter], len(indices)))
    if not prompts:
        raise ConfigError(f"{path}: has no requests")
    prompt_tokens = np.array(prompts, dtype=np.int64)
    output_tokens = np.array(outputs, dtype=np.int64)
    if time_s is None:
        return RequestTrace(str(path), prompt_tokens, output_tokens)
    at_s = np.array(times_s)
    order = np.argsort(at_s, kind="stable")
    return RequestTrace(
        str(path),
        prompt_tokens[order],
        output_tokens[order],
        at_s[order] - at_s[order[0]],
        np.array(adapters, dtype=np.int64)[order] if adapter is not None else None,
    )


def _read_functions(path: Path) -> RateTrace:
    table = CsvTable.open(path)
    header = table.header
    minutes = [index for index, name in enumerate(header) if re.fullmatch(r"m?\d+", name)]
    if not minutes or minutes != list(range(minutes[0], len(header))):
        raise ConfigError(f"{path}, line 1: the last columns must be minutes, named 1, 2, … or m0, m1, …")
    every = (_counts(path, line, header, cells, minutes[0]) for line, cells in table.cells)
    calls = [counts for counts in every if counts.any()]  # a function without calls stands for no adapter
    if not calls:
        raise ConfigError(f"{path}: has no function with a call")
    return RateTrace(str(path), np.stack(calls))


def _counts(path: Path, line: int, header: list[str], cells: list[str], first: int) -> NDArray[np.int32]:
    try:
        counts = np.array(cells[first:], dtype=np.int64)
    except (ValueError, OverflowError):
        counts = np.full(1, -1)
    if counts.min() < 0 or counts.max() > MOST_TOKENS:
        row = Row(path, line, dict(zip(header, cells, strict=True)))  # slower, but its error names the wrong cell
        counts = np.array([row.tokens(name) for name in header[first:]])
    return counts.astype(np.int32)


def _is_json(path: Path) -> bool:
    return ".jsonl" in path.suffixes or ".json" in path.suffixes


READERS: dict[str, Callable[[Path], Trace]] = {
    "azure-llm": _read_azure,
    "mooncake": _read_mooncake,
    "maf2019": _read_functions,
    "lengths": lambda path: _untimed(CsvTable.open(path)),
}
