"""Comparison of two saved reports: every figure of B over that of A."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from caraserve.bench.report.files import SavedReport
from caraserve.bench.report.ratios import LATENCY_FIGURES, Figure, by_label, known_mean
from caraserve.bench.report.tables import NONE, TextTable, number, to_rich
from caraserve.errors import ConfigError

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
