"""Reads rows of CSV and JSON-lines files, plain or gzip-compressed. Errors name the file, line and column."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

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
