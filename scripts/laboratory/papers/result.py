"""The result of a paper's figure: values to set beside the paper's, panels to draw, and what was run."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from caraserve.errors import ConfigError

SCHEMA = 1
_CDF_POINTS = 60  # of a line: more make no visible difference


@dataclass(frozen=True, slots=True)
class Value:
    """A value of ours. `what` is the name under which the catalog has the paper's."""

    what: str
    value: float
    unit: str = "x"  # x: a ratio
    spread: float | None = None  # standard deviation over repeats; None: one repeat, or the same in every one


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or a group of bars. `x` has numbers for lines; bars stand at the panel's `categories`."""

    label: str
    y: tuple[float | None, ...]  # None: not measured there
    x: tuple[float, ...] = ()
    theirs: bool = False  # the paper's values


@dataclass(frozen=True, slots=True)
class Panel:
    """One part of a figure."""

    title: str
    y_label: str
    series: tuple[Series, ...]
    x_label: str = ""
    categories: tuple[str, ...] = ()  # of bars; empty: lines over `x`
    points: bool = False  # separate points in place of lines


@dataclass(frozen=True, slots=True)
class FigureData:
    """What was measured or simulated for a figure."""

    how: Literal["measured", "simulated"]
    setting: tuple[str, ...]  # what was run, a sentence each: model, load, link, repeats
    values: tuple[Value, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class FigureResult:
    """A figure's data with what is needed to repeat it, as saved."""

    schema: int
    paper: str
    number: str
    seed: int
    data: FigureData
    machine: dict[str, str | int]
    versions: dict[str, str]


def spread(values: Sequence[float]) -> float | None:
    """Returns the standard deviation over repeats; None for one repeat."""
    return statistics.stdev(values) if len(values) > 1 else None


def mean_value(what: str, values: Sequence[float], unit: str = "x") -> Value:
    """Returns the mean of one value for each repeat, with its spread."""
    return Value(what, statistics.fmean(values), unit, spread(values))


def cdf_series(label: str, values: Sequence[float] | NDArray[np.float64]) -> Series:
    """Returns the share of values in percent that are at most x, as a line."""
    shares = np.linspace(0.0, 1.0, _CDF_POINTS)
    at = tuple(round(float(x), 3) for x in np.quantile(values, shares))
    return Series(label, tuple(round(100 * float(share), 2) for share in shares), at)


def load_result(path: Path) -> FigureResult:
    """Reads a result that `bench paper` has saved. Raises ConfigError that says what is wrong with it."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=FigureResult)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no result of `caraserve bench paper`: {error}") from None
    if result.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {result.schema}; this version reads {SCHEMA}")
    return result


def save_result(path: Path, result: FigureResult) -> None:
    """Writes a result as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
