"""Comparison of two saved reports: every figure of B over that of A."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from caraserve.bench.report.files import SavedReport
from caraserve.bench.report.ratios import by_label
from caraserve.bench.report.summary import LATENCIES, Summary
from caraserve.bench.report.tables import NONE, TextTable, number, to_rich
from caraserve.errors import ConfigError

_PER_SECOND = ("requests_per_s", "output_tokens_per_s")


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
    rows = {label: tuple(_figures(*pair)) for label, pair in pairs.items()}
    return Comparison(rows, tuple(_differences(a, b)))


def _figures(a: list[Summary], b: list[Summary]) -> Iterator[ComparedFigure]:
    for metric in LATENCIES:
        for name in ("mean", "p50", "p95", "p99"):
            values = _latency(a, metric, name), _latency(b, metric, name)
            if values[0] is not None and values[1] is not None:
                yield ComparedFigure(f"{metric.upper()} {name}, ms", values[0], values[1])
    for field in _PER_SECOND:
        name = field.removesuffix("_per_s").replace("_", " ")
        yield ComparedFigure(f"{name}/s", _mean([getattr(s, field) for s in a]), _mean([getattr(s, field) for s in b]))
    yield ComparedFigure("requests complete", _mean([s.completed for s in a]), _mean([s.completed for s in b]))
    yield ComparedFigure("requests failed", _mean([s.failed for s in a]), _mean([s.failed for s in b]))
    shares = [[s.attainment.share for s in side if s.attainment is not None] for side in (a, b)]
    if all(shares):
        yield ComparedFigure("SLO attainment", _mean(shares[0]), _mean(shares[1]))


def _latency(side: list[Summary], metric: str, name: str) -> float | None:
    found = [getattr(summary.latency, metric) for summary in side]
    values = [each.mean_ms if name == "mean" else each.percentiles_ms.get(name) for each in found if each is not None]
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _differences(a: SavedReport, b: SavedReport) -> Iterator[tuple[str, str, str]]:
    for name, side in (("A", a), ("B", b)):
        for summary in side.runs:
            if not summary.valid:
                reason = " ".join(summary.invalid_because)
                yield f"{summary.label} is NOT VALID", reason if name == "A" else NONE, reason if name == "B" else NONE
    for kind in ("machine", "versions", "arguments"):
        in_a, in_b = getattr(a, kind), getattr(b, kind)
        for name in sorted({*in_a, *in_b}):
            if name != "save" and in_a.get(name) != in_b.get(name):
                yield f"{kind}: {name}", _shown(in_a.get(name)), _shown(in_b.get(name))


def _shown(value: object) -> str:
    return NONE if value is None else str(value)
