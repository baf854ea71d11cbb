"""Two saved reports side by side: every figure of B over that of A."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from caraserve.bench.report.canvas import (
    COLOURS,
    Picture,
    can_draw,
    ink,
    new_figure,
    picture,
    plain_name,
    style,
)
from caraserve.bench.report.files import Saved
from caraserve.bench.report.ratios import by_label
from caraserve.bench.report.summary import Summary
from caraserve.bench.report.table_text import NONE, Sheet, number
from caraserve.bench.report.tables import table
from caraserve.errors import ConfigError

_LATENCIES = ("ttft", "tpot", "tpt", "itl", "e2e")
_PER_SECOND = ("requests_per_s", "output_tokens_per_s")


@dataclass(frozen=True, slots=True)
class Line:
    """One figure in both, means over repeats."""

    what: str
    a: float
    b: float

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of each label that both have, its lines; and in what the reports differ besides."""

    lines: dict[str, tuple[Line, ...]]
    differences: tuple[tuple[str, str, str], ...]  # what, in A, in B

    def tables(self) -> Iterator[Table]:
        """For a terminal."""
        if self.differences:
            yield table(Sheet("Measured differently", ("", "A", "B"), self.differences, left=3))
        for label, lines in self.lines.items():
            rows = tuple((line.what, number(line.a), number(line.b), _ratio(line)) for line in lines)
            yield table(Sheet(label, ("", "A", "B", "B ÷ A"), rows))


def compare(a: Saved, b: Saved) -> Comparison:
    """Raises ConfigError when the reports have nothing in common. A report of one label is set against any other of
    one label: the label is often what was changed."""
    first, second = by_label(a.runs), by_label(b.runs)
    pairs = {label: (first[label], second[label]) for label in first if label in second}
    if not pairs and len(first) == len(second) == 1:
        (mine, theirs), (others, ours) = next(iter(first.items())), next(iter(second.items()))
        pairs = {f"{mine} | {others}": (theirs, ours)}
    if not pairs:
        raise ConfigError(f"no run of {', '.join(first)} is in the other report, which has {', '.join(second)}")
    lines = {label: tuple(_lines(*pair)) for label, pair in pairs.items()}
    return Comparison(lines, tuple(_differences(a, b)))


def _lines(a: list[Summary], b: list[Summary]) -> Iterator[Line]:
    for metric in _LATENCIES:
        for name in ("mean", "p50", "p95", "p99"):
            values = _latency(a, metric, name), _latency(b, metric, name)
            if values[0] is not None and values[1] is not None:
                yield Line(f"{metric.upper()} {name}, ms", values[0], values[1])
    for field in _PER_SECOND:
        named = field.removesuffix("_per_s").replace("_", " ")
        yield Line(f"{named}/s", _mean([getattr(s, field) for s in a]), _mean([getattr(s, field) for s in b]))
    yield Line("requests complete", _mean([s.completed for s in a]), _mean([s.completed for s in b]))
    yield Line("requests failed", _mean([s.failed for s in a]), _mean([s.failed for s in b]))
    kept = [[s.attainment.share for s in side if s.attainment is not None] for side in (a, b)]
    if all(kept):
        yield Line("SLO attainment", _mean(kept[0]), _mean(kept[1]))


def _latency(side: list[Summary], metric: str, name: str) -> float | None:
    found = [getattr(summary.latency, metric) for summary in side]
    values = [each.mean_ms if name == "mean" else each.percentiles_ms.get(name) for each in found if each is not None]
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _differences(a: Saved, b: Saved) -> Iterator[tuple[str, str, str]]:
    for name, side in (("A", a), ("B", b)):
        for summary in side.runs:
            if not summary.valid:
                words = " ".join(summary.invalid_because)
                yield f"{summary.label} is NOT VALID", words if name == "A" else NONE, words if name == "B" else NONE
    for kind in ("machine", "versions", "arguments"):
        mine, theirs = getattr(a, kind), getattr(b, kind)
        for name in sorted({*mine, *theirs}):
            if name != "save" and mine.get(name) != theirs.get(name):
                yield f"{kind}: {name}", _shown(mine.get(name)), _shown(theirs.get(name))


def _shown(value: object) -> str:
    return NONE if value is None else str(value)


def _ratio(line: Line) -> str:
    return NONE if line.ratio is None else f"{line.ratio:.3f}"


def draw(comparison: Comparison) -> Picture | None:
    """Ratios as bars, a panel for each label; None without matplotlib."""
    if not can_draw():
        return None
    panels = len(comparison.lines)
    most = max(len(lines) for lines in comparison.lines.values())
    figure = new_figure(3.4 + 3.4 * panels, 1.2 + 0.24 * most)
    for axes, (label, lines) in zip(
        figure.subplots(1, panels, squeeze=False)[0], comparison.lines.items(), strict=True
    ):
        known = [line for line in lines if line.ratio is not None]
        places = range(len(known))
        ratios = [line.ratio or 0.0 for line in known]
        axes.barh(places, ratios, color=[COLOURS[1] if ratio > 1 else COLOURS[0] for ratio in ratios])
        axes.axvline(1, color=ink(), lw=0.9)
        style(axes, title=plain_name(label), xlabel="B ÷ A")
        axes.set_yticks(places, [line.what.removesuffix(", ms") for line in known])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
    return picture(figure, "compare", "Every figure of B over that of A")
