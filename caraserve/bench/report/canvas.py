"""How every figure looks, and how it becomes PNG and inline SVG.

matplotlib is an extra: it is imported when something is drawn. In the SVG, ink and grid are drawn in two colours that
stand for the page's own text colour, so that a figure follows a dark page.
"""

import importlib.util
import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from caraserve.bench.report.columns import Floats

# Okabe and Ito's colours, which stay apart for colour-blind readers; yellow and black, which vanish on a light or on a
# dark page, give way to grey and to Tol's indigo-like violet.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C8C8C", "#8F6BD1")
_DASHES = ("-", "--", ":", "-.")
_INK, _GRID = "#1f2328", "#d0d4d9"
_NAME_LENGTH = 34


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure in both forms; `title` says what is seen, for those who do not see it too."""

    name: str  # of its file, without ending
    title: str
    png: bytes
    svg: str


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """An empty figure in inches, whose parts are laid out when it is drawn."""
    # An extra, and only saved reports need it.
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def style(axes: Any, **settings: Any) -> None:
    """Quiet axes: two spines, a grid behind what is drawn, small type."""
    axes.set(**settings)
    axes.set_axisbelow(True)
    axes.grid(True, color=_GRID, lw=0.6)
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_INK)
    axes.tick_params(which="both", labelsize=8, color=_INK, labelcolor=_INK)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set(color=_INK, fontsize=9)
    axes.title.set_fontweight("bold")


def line_style(place: int) -> dict[str, Any]:
    """Of the run at `place`: its colour, and dashes once the colours begin anew."""
    return {"color": COLOURS[place % len(COLOURS)], "ls": _DASHES[place // len(COLOURS) % len(_DASHES)], "lw": 1.5}


def ink() -> str:
    """The colour of text and of lines that are no data."""
    return _INK


def legend(figure: Any, axes: Any) -> None:
    """Below all panels, so that it hides nothing; none where there is but one line."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = min(len(handles), 4 if max(map(len, labels)) < 22 else 3)
        shown = figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
        for text in shown.get_texts():
            text.set_color(_INK)


def plain_name(name: str) -> str:
    """A label that matplotlib shows as it is: no mathematics, not hidden for a leading underscore, not too long."""
    kept = "".join(letter if letter.isprintable() else "?" for letter in name)
    if len(kept) > _NAME_LENGTH:
        half = (_NAME_LENGTH - 1) // 2
        kept = f"{kept[:half]}…{kept[-half:]}"
    kept = kept.replace("$", r"\$")
    return f" {kept}" if kept.startswith("_") else kept


def time_scale(values_ms: Sequence[float] | Floats) -> tuple[float, str]:
    """What to multiply milliseconds with, and its unit: seconds where the greatest is above ten of them."""
    known = np.asarray(values_ms, np.float64)
    known = known[np.isfinite(known)]
    return (1e-3, "s") if known.size and known.max() > 10_000 else (1.0, "ms")


def picture(figure: Any, name: str, title: str) -> Picture:
    """Draws it, white behind for the PNG, nothing behind for the SVG."""
    from matplotlib import rc_context  # type: ignore[import-not-found, unused-ignore]

    png, svg = io.BytesIO(), io.StringIO()
    # Text stays text: it can be found, copied, and follows the page's colour. The salt makes files repeatable.
    with warnings.catch_warnings(), rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in letters that the font lacks
        figure.savefig(png, format="png", dpi=140)
        nothing: dict[str, None] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
    return Picture(name, title, png.getvalue(), _inline(svg.getvalue(), name))


def _inline(svg: str, name: str) -> str:
    """The `<svg>` element alone, with ids that no other figure on the page has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", svg)
    svg = re.sub(r'(<svg[^>]*?) (?:width="[^"]*" height="[^"]*"|height="[^"]*" width="[^"]*")', r"\1", svg, count=1)
    return svg.replace(_INK, "currentColor").replace(_GRID, "var(--line)").strip()
