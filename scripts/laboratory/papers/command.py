"""`caraserve bench paper`: runs figures, prints the paper's values beside ours, draws and saves them."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from caraserve.bench.records import machine, versions
from caraserve.bench.report.files import make_folder, write_files
from caraserve.bench.report.plots import NO_FIGURES, can_draw
from caraserve.bench.report.tables import NONE, TextTable, number, open_console, to_rich, write_document
from caraserve.errors import ConfigError
from scripts.laboratory.papers.figures import (
    PAPERS,
    SCHEMA,
    FigureData,
    FigureResult,
    PaperFigure,
    PaperOptions,
    Value,
    draw_figure,
    find_figures,
    save_result,
)

Measurement: TypeAlias = Callable[[Mapping[str, str], PaperOptions], FigureData]  # of a figure's options


def bench_paper(paper: str, wanted: str, options: PaperOptions, folder: Path, as_line: bool) -> int:
    """Runs some figures of a paper, or all that any machine can. Raises ConfigError and BackendFailed, once the figures
    before have been reported."""
    figures = find_figures(paper, wanted)
    for figure in figures:
        if figure.measure is None:
            reason = f"cannot be run here: it needs {figure.needs}"
            if figure.within:
                reason = f"has the values of others: --figure {','.join(figure.within)}"
            raise ConfigError(f"figure {figure.number} of {PAPERS[paper]} {reason}")
    make_folder(folder)
    console = open_console()
    results: list[FigureResult] = []
    try:
        for figure in figures:
            result = run_figure(figure, options)
            results.append(result)
            console.print(to_rich(value_table(figure, result)))
            for sentence in result.data.setting:
                console.print(f"- {sentence}")
            for path in _save(folder, figure, result):
                console.print(f"written: {path}")
    finally:
        if results:
            if not can_draw():
                console.print(NO_FIGURES)
            write_document({"bench": "paper", "figures": msgspec.to_builtins(results)}, as_line)
    return 0


def measurement(figure: PaperFigure) -> Measurement:
    """Returns the function that measures a figure. Its module is imported now: parsing arguments stays fast."""
    assert figure.measure is not None
    module, _, name = figure.measure.partition(":")
    found: Measurement = getattr(importlib.import_module(f"scripts.laboratory.papers.{module}"), name)
    return found


def run_figure(figure: PaperFigure, options: PaperOptions) -> FigureResult:
    """Measures or simulates one figure."""
    data = measurement(figure)(figure.options, options)
    return FigureResult(SCHEMA, figure.paper, figure.number, options.seed, data, machine(), versions())


def value_table(figure: PaperFigure, result: FigureResult) -> TextTable:
    """Returns our values beside the paper's."""
    title = f"{PAPERS[figure.paper]}, figure {figure.number}: {figure.title}"
    rows = list(value_rows(figure, result))
    return TextTable(title, ("", "the paper", f"here ({result.data.how})"), rows, note=figure.shows)


def value_rows(figure: PaperFigure, result: FigureResult) -> Iterator[tuple[str, str, str]]:
    """Yields name, the paper's value and ours, for every value that either has; the paper's order comes first."""
    ours = {value.what: value for value in result.data.values}
    for value in figure.theirs:
        mine = ours.pop(value.what, None)
        yield value.what, shown(value.value, value.unit), NONE if mine is None else shown_spread(mine)
    for mine in ours.values():
        yield mine.what, NONE, shown_spread(mine)


def shown(value: float, unit: str, spread: float | None = None) -> str:
    """Formats a value, its standard deviation over repeats and its unit; ratios and counts have no unit."""
    numbers = [value] if spread is None else [value, spread]
    if unit == "%":
        return " ± ".join(f"{one:.1f}" for one in numbers) + " %"
    text = " ± ".join(map(number, numbers))
    return text if unit in ("x", "") else f"{text} {unit}"


def shown_spread(value: Value) -> str:
    """Formats a value of ours."""
    return shown(value.value, value.unit, value.spread)


def _save(folder: Path, figure: PaperFigure, result: FigureResult) -> list[Path]:
    document = folder / f"{figure.key}.json"
    save_result(document, result)
    drawing = draw_figure(figure, result) if can_draw() else None
    return [document] if drawing is None else [document, *write_files(folder, {f"{figure.key}.png": drawing})]
