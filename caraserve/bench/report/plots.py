"""Figures as PNG: panels of lines or bars, and the parts that other figures are made of.

matplotlib is an optional dependency and is imported when a figure is drawn (`can_draw`).
"""

import importlib.util
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can tell apart, with grey and Tol's violet in place of yellow and
# black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C", "#8F6BD1")
_DASHES = ("-", "--", ":", "-.")
INK, _GRID, _THEIRS = "#1f2328", "#d0d4d9", "#8C8C8C"
_NAME_LENGTH = 34
_PANEL_INCHES, _COLUMNS = (4.6, 3.6), 3
_GROUP_WIDTH = 0.8  # of all bars at one category
_LEVEL_NAMES, _LEVEL_LETTERS = 5, 40  # of categories whose names stand side by side; others are turned
_FEW_POINTS = 12  # of a line: fewer have dots
NO_FIGURES = "no figures: matplotlib, of the package's `plot` extra, is not installed"


@dataclass(frozen=True, slots=True)
class Series:
    """A line, or a group of bars. `x` has numbers for lines; bars stand at the panel's `categories`."""

    label: str
    y: tuple[float | None, ...]  # None: not measured there
    x: tuple[float, ...] = ()
    theirs: bool = False  # of others, for comparison: drawn in grey


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
class Look:
    """How a panel is drawn, beside its data."""

    log: str = ""  # axes with logarithmic scales, as `xy`
    highest: float | None = None  # end of the axis of values
    marks: Mapping[str, float] = field(default_factory=dict)  # upright lines by name
    levels: Mapping[str, float] = field(default_factory=dict)  # level lines by name
    horizontal: bool = False  # bars
    spreads: Sequence[float] = ()  # of the bars of the first series
    numbers: str = ""  # format of numbers at bars; "": none


def can_draw() -> bool:
    """Returns True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_panels(
    panels: Sequence[Panel],
    looks: Sequence[Look] = (),
    title: str = "",
    columns: int = _COLUMNS,
    inches: tuple[float, float] = _PANEL_INCHES,
) -> bytes:
    """Returns the panels as PNG, each `inches` wide and high, side by side, at most `columns` in a row. `looks[i]` is
    that of panel i."""
    columns = min(len(panels), columns)
    rows = -(-len(panels) // columns)
    figure = new_figure(max(6.0, inches[0] * columns), inches[1] * rows + 0.4)
    if title:
        figure.suptitle(title.replace("$", r"\$"), fontsize=10, color=INK)
    every = [axes for row in figure.subplots(rows, columns, squeeze=False) for axes in row]
    for axes, panel, look in zip_longest(every, panels, looks[: len(panels)]):
        if panel is None:
            axes.set_axis_off()
        else:
            _draw(axes, panel, look or Look())
    legend(figure, every[0])
    shown = [series.label for series in panels[0].series]
    for axes, panel in zip(every, panels, strict=False):
        labels = [series.label for series in panel.series]
        if labels != shown and len(labels) > 1:  # the figure's legend does not explain them
            axes.legend(loc="lower right" if not panel.categories else "upper right", fontsize=8, frameon=False)
            shown = labels
    return render(figure)


def _draw(axes: Any, panel: Panel, look: Look) -> None:
    (_bars if panel.categories else _lines)(axes, panel, look)
    style(axes, title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if look.horizontal:
        axes.set(xlabel=panel.y_label, ylabel=panel.x_label)
    if panel.categories:
        axes.grid(False, axis="y" if look.horizontal else "x")
    how = {"color": INK, "lw": 0.9, "ls": (0, (1, 2))}
    for name, at in look.marks.items():
        axes.axvline(at, **how)
        axes.annotate(name, (at, 0.02), (3, 0), ("data", "axes fraction"), "offset points", fontsize=8, color=INK)
    for name, at in look.levels.items():
        axes.axhline(at, **how)
        axes.annotate(name, (0.02, at), (0, 2), ("axes fraction", "data"), "offset points", fontsize=8, color=INK)
    for axis in look.log:
        axes.set(**{f"{axis}scale": "log"})
        getattr(axes, f"{axis}axis").set_major_formatter("{x:g}")
    if "y" not in look.log and not look.horizontal:
        axes.set_ylim(0, look.highest)


def _lines(axes: Any, panel: Panel, look: Look) -> None:
    ours = count()
    for series in panel.series:
        points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
        drawn: dict[str, Any] = {"color": _THEIRS, "ls": ":", "lw": 1.8} if series.theirs else line_style(next(ours))
        if panel.points:
            drawn |= {"ls": "none", "marker": "x" if series.theirs else ".", "ms": 5}
        elif len(points) < _FEW_POINTS:
            drawn |= {"marker": "o", "ms": 3}
        axes.plot([x for x, _ in points], [y for _, y in points], label=plain_name(series.label), **drawn)


def _bars(axes: Any, panel: Panel, look: Look) -> None:
    width = _GROUP_WIDTH / len(panel.series)
    ours = count()
    for place, series in enumerate(panel.series):
        left = -_GROUP_WIDTH / 2 + (place + 0.5) * width
        at = [(index + left, y) for index, y in enumerate(series.y) if y is not None]
        how: dict[str, Any] = {"color": "white", "edgecolor": _THEIRS, "hatch": "///"} if series.theirs else {}
        how = how or {"color": line_style(next(ours))["color"]}
        if look.spreads and place == 0:
            how |= {"xerr" if look.horizontal else "yerr": look.spreads, "ecolor": INK, "capsize": 3}
        draw = axes.barh if look.horizontal else axes.bar
        bars = draw([x for x, _ in at], [y for _, y in at], width, label=plain_name(series.label), **how)
        if look.numbers:
            axes.bar_label(bars, fmt=look.numbers, fontsize=8, padding=2)
    names = [plain_name(name) for name in panel.categories]
    if look.horizontal:
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
    else:
        crowded = len(names) > _LEVEL_NAMES or sum(map(len, names)) > _LEVEL_LETTERS
        turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
        axes.set_xticks(range(len(names)), names, **turned)
    axes.margins(x=0.12 if look.horizontal and look.numbers else 0.02)


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure of this size in inches; its parts are laid out when it is drawn."""
    # matplotlib is an optional dependency: only saved reports need it.
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def style(axes: Any, **settings: Any) -> None:
    """Sets labels and limits; draws two spines, a grid behind the data and small type."""
    axes.set(**settings)
    axes.set_axisbelow(True)
    axes.grid(True, color=_GRID, lw=0.6)
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(INK)
    axes.tick_params(which="both", labelsize=8, color=INK, labelcolor=INK)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set(color=INK, fontsize=9)
    axes.title.set_fontweight("bold")


def line_style(place: int) -> dict[str, Any]:
    """Returns the colour and dashes of the run at `place`; dashes change after each round of colours."""
    return {"color": COLOURS[place % len(COLOURS)], "ls": _DASHES[place // len(COLOURS) % len(_DASHES)], "lw": 1.5}


def legend(figure: Any, axes: Any) -> None:
    """Adds a legend below all panels, unless there is only one line."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = min(len(handles), 4 if max(map(len, labels)) < 22 else 3)
        shown = figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
        for text in shown.get_texts():
            text.set_color(INK)


def plain_name(name: str) -> str:
    """Returns a label that matplotlib shows unchanged: no mathematics, no leading underscore (which would hide it), at
    most 34 characters."""
    kept = "".join(letter if letter.isprintable() else "?" for letter in name)
    if len(kept) > _NAME_LENGTH:
        half = (_NAME_LENGTH - 1) // 2
        kept = f"{kept[:half]}…{kept[-half:]}"
    kept = kept.replace("$", r"\$")
    return f" {kept}" if kept.startswith("_") else kept


def render(figure: Any) -> bytes:
    """Returns a figure as PNG."""
    png = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in letters that the font lacks
        figure.savefig(png, format="png", dpi=140)
    return png.getvalue()
