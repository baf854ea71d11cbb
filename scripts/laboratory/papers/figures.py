"""The figures of the three papers and our results: what each paper says, how it is measured here, and how it is drawn.

`figures.toml` has every figure, its paper's values, and the name of its measurement.
"""

import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from caraserve.bench.report.plots import Panel, Series, draw_panels
from caraserve.bench.workload.forms import unknown
from caraserve.errors import ConfigError

PAPERS = {"toppings": "Toppings (ATC 25)", "caraserve": "CaraServe (arXiv 2401.11240)", "loraserve": "LoRAServe"}
ALL = "all"


@dataclass(frozen=True, slots=True)
class PaperOptions:
    """How much is run."""

    duration_s: float  # of sending in each run on a server, and of simulated time
    repeats: int  # of each run on a server
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperValue:
    """A value that a paper prints."""

    what: str  # the name of the same value in our result
    value: float
    unit: str = "x"  # x: a ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """A figure or table of a paper: measured, not to be run here, or with all its values in other figures. With both
    `measure` and `needs`, the measurement raises ConfigError on a machine that lacks what it needs."""

    paper: str  # a key of PAPERS
    number: str  # as in the paper: 14, or 4-left
    title: str
    shows: str  # the paper's claim, in a sentence
    measure: str | None = None  # module:function below this package; it gets `options` and PaperOptions
    options: Mapping[str, str] = field(default_factory=dict)  # of the measurement
    needs: str | None = None  # what this machine lacks to measure or simulate it
    within: tuple[str, ...] = ()  # numbers of the figures that have its values
    theirs: tuple[PaperValue, ...] = ()
    differs: str = ""  # why our values differ

    @property
    def key(self) -> str:
        """The name of the figure's files."""
        return f"{self.paper}-{self.number}"


@cache
def load_figures() -> tuple[PaperFigure, ...]:
    """Returns all figures, in the papers' order."""
    text = Path(__file__).with_name("figures.toml").read_text(encoding="utf-8")
    return tuple(msgspec.convert(tomllib.loads(text)["figure"], list[PaperFigure]))


def find_figures(paper: str, wanted: str) -> tuple[PaperFigure, ...]:
    """Returns the paper's figures with these numbers, separated by commas, or those that any machine can run for `all`.
    Raises ConfigError."""
    figures = {figure.number: figure for figure in load_figures() if figure.paper == paper}
    if wanted == ALL:
        return tuple(figure for figure in figures.values() if figure.measure is not None and figure.needs is None)
    numbers = dict.fromkeys(number.strip() for number in wanted.split(","))
    for number in numbers:
        if number not in figures:
            raise unknown(f"figure of {PAPERS[paper]}", number, figures)
    return tuple(figures[number] for number in numbers)


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


def draw_figure(figure: PaperFigure, result: FigureResult) -> bytes | None:
    """Returns a figure's panels as PNG; None without any."""
    panels = figure_panels(figure, result)
    title = f"{PAPERS[figure.paper]}, figure {figure.number}: {figure.title}"
    return draw_panels(panels, title=title) if panels else None


def figure_panels(figure: PaperFigure, result: FigureResult) -> tuple[Panel, ...]:
    """Returns a figure's panels, after one of the values that the paper prints."""
    return (*_beside_the_paper(figure, result), *result.data.panels)


def _beside_the_paper(figure: PaperFigure, result: FigureResult) -> Iterator[Panel]:
    """Yields a panel with the paper's ratios beside ours, where both have at least two."""
    ours = {value.what: value.value for value in result.data.values}
    pairs = [(value, ours[value.what]) for value in figure.theirs if value.unit == "x" and value.what in ours]
    if len(pairs) > 1:
        names = [value.what.split() for value, _ in pairs]
        shared = 0
        while len({tuple(words[: shared + 1]) for words in names}) == 1:
            shared += 1
        paper = Series("the paper", tuple(value.value for value, _ in pairs), theirs=True)
        here = Series("here", tuple(mine for _, mine in pairs))
        yield Panel("Beside the paper", "ratio", (paper, here), "", tuple(" ".join(words[shared:]) for words in names))
