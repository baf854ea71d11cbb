"""Writes docs/papers.md: every figure of the papers, with saved results of ours beside the paper's values."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from caraserve.bench.papers.catalog import PAPERS, PaperFigure, load_figures
from caraserve.bench.papers.command import value_rows
from caraserve.bench.papers.result import FigureResult, load_result
from caraserve.bench.workload.presets import load_presets

_HEAD = """\
# The papers' figures

This page is made by `scripts/bench/papers_page.py` from the results in `scripts/bench/results/papers/`; do not edit it.
`caraserve bench paper toppings --figure 14-s3` runs a figure again, prints the paper's values next to ours, and writes
JSON and a plot.

Papers measure 7B to 70B models on A100 and A10 GPUs. Here a random model of 100 million parameters runs on two CPU
cores, of which one stands for the GPU, with an emulated link to its memory. Three ratios are kept: the rate of requests
to the rate that the machine can serve, the time to load an adapter times the rate, and the share of LoRA in an
iteration. So ratios compare, and milliseconds do not. Fleets are simulated where the papers simulated them.
"""


def papers_page(results: Path) -> str:
    """Returns the page as Markdown. Raises ConfigError for a damaged result."""
    found = {figure.key: results / f"{figure.key}.json" for figure in load_figures()}
    saved = {key: load_result(path) for key, path in found.items() if path.exists()}
    parts = [_HEAD, *_overview(saved)]
    for paper, name in PAPERS.items():
        parts.append(f"\n## {name}\n")
        for figure in load_figures():
            if figure.paper == paper and figure.key in saved:
                parts += _section(figure, saved[figure.key])
    return "\n".join(parts) + "\n"


def _overview(saved: Mapping[str, FigureResult]) -> Iterator[str]:
    yield "| paper | figure | what it shows | here |"
    yield "| --- | --- | --- | --- |"
    for figure in load_figures():
        command = f"`bench paper {figure.paper} --figure {figure.number}`"
        if figure.key in saved:
            here = f"[{saved[figure.key].data.how}](#{figure.key})"
        elif figure.needs is not None:
            here = f"not run: needs {figure.needs}" + (f"; {command}" if figure.measure else "")
        elif figure.measure is None:
            here = "not measured yet"
        else:
            here = f"not run yet: {command}"
        yield f"| {PAPERS[figure.paper]} | {figure.number} | {figure.title} | {here} |"


def _section(figure: PaperFigure, result: FigureResult) -> Iterator[str]:
    yield f'\n<a id="{figure.key}"></a>\n### Figure {figure.number}: {figure.title}\n'
    yield f"The paper: {figure.shows}\n"
    rows = list(value_rows(figure, result))
    if rows:
        yield f"| | the paper | here ({result.data.how}) |"
        yield "| --- | --- | --- |"
        yield from (f"| {what} | {theirs} | {ours} |" for what, theirs, ours in rows)
        yield ""
    yield from _setting(result.data.setting)
    if figure.differs:
        yield f"Why it differs: {figure.differs}\n"
    if result.data.panels:
        yield f"![{figure.title}](images/papers/{figure.key}.png)\n"


def _setting(sentences: Sequence[str]) -> Iterator[str]:
    """Yields how a figure was run: a paragraph, and for figures of several presets a list of what differs."""
    own: dict[str, list[str]] = {}
    for sentence in sentences:
        preset, colon, rest = sentence.partition(": ")
        if colon and preset in load_presets():
            own.setdefault(preset, []).append(rest)
    for_all = [one for one in sentences if one.partition(": ")[0] not in own]
    shared = [one for one in next(iter(own.values()), []) if all(one in others for others in own.values())]
    yield " ".join(shared + for_all) + "\n"
    differing = {preset: [one for one in of_it if one not in shared] for preset, of_it in own.items()}
    if any(differing.values()):
        yield from (f"- `{preset}`: {' '.join(of_it)}" for preset, of_it in differing.items())
        yield ""
