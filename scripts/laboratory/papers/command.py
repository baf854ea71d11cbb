"""`caraserve bench paper`: runs figures, prints the paper's values beside ours, draws and saves them."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from caraserve.bench.console import open_console, write_document
from caraserve.bench.records import machine, versions
from caraserve.bench.report.files import make_folder, write_files
from caraserve.bench.report.plots import NO_FIGURES, can_draw
from caraserve.bench.report.tables import NONE, TextTable, number, to_rich
from caraserve.errors import ConfigError
from scripts.laboratory.papers.catalog import PAPERS, PaperFigure, find_figures
from scripts.laboratory.papers.plots import draw_figure
from scripts.laboratory.papers.result import SCHEMA, FigureData, FigureResult, Value, save_result


@dataclass(frozen=True, slots=True)
class PaperOptions:
    """How much is run."""

    duration_s: float  # of sending in each run on a server, and of simulated time
    repeats: int  # of each run on a server
    seed: int


# Measurements by the name that `figures.toml` uses: module and function. A function gets the figure's options from
# there and PaperOptions, and returns FigureData. They are imported when they run: parsing arguments stays fast.
_HERE = "scripts.laboratory.papers"
MEASURES: Mapping[str, str] = {
    "popularity": f"{_HERE}.loads:adapter_popularity",
    "rank_popularity": f"{_HERE}.loads:rank_popularity",
    "routing_example": f"{_HERE}.loads:routing_example",
    "staggered": f"{_HERE}.cold_starts:staggered",
    "interruptions": f"{_HERE}.cold_starts:interruptions",
    "load_times": f"{_HERE}.cold_starts:load_times",
    "iterations": f"{_HERE}.cold_starts:iterations",
    "fleet": f"{_HERE}.fleet:routing_policies",
    "fleet_rates": f"{_HERE}.fleet:rate_sweep",
    "fleet_scale": f"{_HERE}.fleet:scaling",
    "real_fleet": f"{_HERE}.real_fleet:routing_policies",
    "fleet_servers": f"{_HERE}.interference:servers",
    "prefill_by_rank": f"{_HERE}.interference:prefill_by_rank",
    "coserve": f"{_HERE}.interference:coserve",
    "rank_limits": f"{_HERE}.interference:rank_limits",
    "fetch_sources": f"{_HERE}.fetches:fetch_sources",
    "placement_example": f"{_HERE}.placement:placement_example",
    "decode_by_rank": f"{_HERE}.kernel_cost:decode_by_rank",
    "decode_fits": f"{_HERE}.kernel_cost:decode_fits",
    "prefill_by_mix": f"{_HERE}.kernel_cost:prefill_by_mix",
    "ipc": f"{_HERE}.cpu_lora:ipc",
    "hand_overs": f"{_HERE}.hand_over:hand_overs",
    "core_time": f"{_HERE}.cpu_lora:core_time",
    "cpu_threads": f"{_HERE}.cpu_lora:cpu_threads",
    "pipelining": f"{_HERE}.cold_starts:pipelining",
    "modes": f"{_HERE}.single_server:loading_modes",
    "use_of_cores": f"{_HERE}.single_server:use_of_cores",
    "quarter_of_workers": f"{_HERE}.single_server:quarter_of_workers",
}


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


def run_figure(figure: PaperFigure, options: PaperOptions) -> FigureResult:
    """Measures or simulates one figure."""
    assert figure.measure is not None
    module, _, name = MEASURES[figure.measure].partition(":")
    measure: Callable[[Mapping[str, str], PaperOptions], FigureData] = getattr(importlib.import_module(module), name)
    data = measure(figure.options, options)
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
