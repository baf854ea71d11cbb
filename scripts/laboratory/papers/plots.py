"""Draws a figure's panels as PNG; the paper's values are hatched bars and dotted grey lines."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from caraserve.bench.report.plots import INK, legend, line_style, new_figure, plain_name, render, style
from scripts.laboratory.papers.catalog import PAPERS, PaperFigure
from scripts.laboratory.papers.result import FigureResult, Panel, Series

_PANEL_WIDTH, _HEIGHT, _COLUMNS = 4.6, 3.6, 3
_THEIRS = "#8C8C8C"
_GROUP_WIDTH = 0.8  # of all bars at one category
_LEVEL_NAMES = 5  # categories whose names stand side by side; more are turned


def draw_figure(figure: PaperFigure, result: FigureResult) -> bytes | None:
    """Returns a figure's panels as PNG; None without any."""
    panels = figure_panels(figure, result)
    title = f"{PAPERS[figure.paper]}, figure {figure.number}: {figure.title}"
    return draw_panels(title, panels) if panels else None


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


def draw_panels(title: str, panels: Sequence[Panel]) -> bytes:
    """Returns the panels side by side, at most three in a row."""
    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    figure = new_figure(max(6.0, _PANEL_WIDTH * columns), _HEIGHT * rows + 0.4)
    figure.suptitle(plain_title(title), fontsize=10, color=INK)
    every = [axes for row in figure.subplots(rows, columns, squeeze=False) for axes in row]
    for axes, panel in zip(every, panels, strict=False):
        (_bars if panel.categories else _lines)(axes, panel)
        style(axes, title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    legend(figure, every[0])
    shown = [series.label for series in panels[0].series]
    for axes, panel in zip(every, panels, strict=False):
        labels = [series.label for series in panel.series]
        if labels != shown:  # lines of modes beside bars of metrics: the figure's legend does not explain them
            axes.legend(loc="lower right" if not panel.categories else "upper right", fontsize=8, frameon=False)
            shown = labels
    return render(figure)


def plain_title(text: str) -> str:
    """Returns text that matplotlib shows unchanged."""
    return text.replace("$", r"\$")


def _lines(axes: Any, panel: Panel) -> None:
    ours = count()
    for series in panel.series:
        points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
        drawn: dict[str, Any] = {"color": _THEIRS, "ls": ":", "lw": 1.8} if series.theirs else line_style(next(ours))
        if panel.points:
            drawn |= {"ls": "none", "marker": "x" if series.theirs else ".", "ms": 5}
        elif len(points) < 12:
            drawn |= {"marker": "o", "ms": 3}
        axes.plot([x for x, _ in points], [y for _, y in points], label=plain_name(series.label), **drawn)
    axes.set_ylim(0, None)


def _bars(axes: Any, panel: Panel) -> None:
    width = _GROUP_WIDTH / len(panel.series)
    ours = count()
    for place, series in enumerate(panel.series):
        left = -_GROUP_WIDTH / 2 + (place + 0.5) * width
        at = [(index + left, y) for index, y in enumerate(series.y) if y is not None]
        colours = {"color": "white", "edgecolor": _THEIRS, "hatch": "///"} if series.theirs else {}
        colours = colours or {"color": line_style(next(ours))["color"]}
        axes.bar([x for x, _ in at], [y for _, y in at], width, label=plain_name(series.label), **colours)
    crowded = len(panel.categories) > _LEVEL_NAMES
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(range(len(panel.categories)), panel.categories, **turned)
    axes.grid(False, axis="x")
