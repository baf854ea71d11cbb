"""Reads `figures.toml`: every figure of the three papers, what its paper says, and how it is measured here."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from caraserve.bench.workload.forms import unknown

PAPERS = {"toppings": "Toppings (ATC 25)", "caraserve": "CaraServe (arXiv 2401.11240)", "loraserve": "LoRAServe"}
ALL = "all"


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
    measure: str | None = None  # a name in `command.MEASURES`
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
