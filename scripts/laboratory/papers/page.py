"""Writes docs/papers.md: every figure of the papers, with saved results of ours beside the paper's values."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from caraserve.bench.report.tables import NONE
from caraserve.bench.workload.presets import load_presets
from scripts.laboratory.papers.command import value_rows
from scripts.laboratory.papers.figures import PAPERS, FigureResult, PaperFigure, load_figures, load_result

_HEAD = """\
# The papers' figures

This page is made by `scripts/bench/papers_page.py` from the results in `scripts/bench/results/papers/`; do not edit it.
`caraserve bench paper toppings --figure 14-s3` runs a figure again, prints the paper's values next to ours, and writes
JSON and a plot.

Papers measure 7B to 70B models on A100 and A10 GPUs. Here a random model of 100 million parameters runs on two CPU
cores, with an emulated link to its memory. Where a figure says so, one core stands for the GPU and CPU LoRA workers
have the other; otherwise the model has both, and workers take time from it. Two ratios are kept: the rate of requests
to the rate that the machine can serve, and the time to load an adapter times the rate. A third is about the same
without scaling: 16 adapters of rank 64 on q, k and v make a decode iteration about a tenth longer, there (Toppings,
figure 6) and here (figure 5). So ratios compare, and milliseconds do not. Fleets are simulated where the papers
simulated them. What a GPU has shown comes first.

Each figure names the machine, the day and the commit of its run. Results older than 27 November 2026 have the day and
the commit with which they were added to the repository. Until then the begin of the next iteration was predicted too
early, so that `pipelined` waited and `auto` used CPU workers more often than they do now: the figures of loading modes
are of that state, except Toppings' 14-s3, 8, 15 and 7.2-use, which were measured again.
"""

_MOST_OTHERS = 8  # values that the paper does not print, shown beside those that it does


def papers_page(results: Path) -> str:
    """Returns the page as Markdown. Raises ConfigError for a damaged result."""
    found = {figure.key: results / f"{figure.key}.json" for figure in load_figures()}
    saved = {key: load_result(path) for key, path in found.items() if path.exists()}
    parts = [_HEAD, *gpu_section(results.parent / "gpu_h200"), "## All figures\n", *_overview(saved)]
    for paper, name in PAPERS.items():
        parts.append(f"\n## {name}\n")
        for figure in load_figures():
            if figure.paper == paper and figure.key in saved:
                parts += _section(figure, saved)
    return "\n".join(parts) + "\n"


def _overview(saved: Mapping[str, FigureResult]) -> Iterator[str]:
    yield "| paper | figure | what it shows | here |"
    yield "| --- | --- | --- | --- |"
    for figure in load_figures():
        command = f"`bench paper {figure.paper} --figure {figure.number}`"
        if figure.key in saved:
            here = f"[{saved[figure.key].data.how}](#{figure.key})"
        elif figure.within:
            here = "in " + ", ".join(f"[{number}](#{figure.paper}-{number})" for number in figure.within)
        elif figure.needs is not None:
            here = f"not run: needs {figure.needs}" + (f"; {command}" if figure.measure else "")
        else:
            here = f"not run yet: {command}"
        yield f"| {PAPERS[figure.paper]} | {figure.number} | {figure.title} | {here} |"


def _section(figure: PaperFigure, saved: Mapping[str, FigureResult]) -> Iterator[str]:
    result = saved[figure.key]
    yield f'\n<a id="{figure.key}"></a>\n### Figure {figure.number}: {figure.title}\n'
    yield f"The paper: {figure.shows}\n"
    if (same := same_before(figure.key, saved)) is not None:
        yield f"The result is that of [{same}](#{same}).\n"
        return
    rows = list(value_rows(figure, result))
    paired = [row for row in rows if NONE not in row]
    zero = {value.what for value in result.data.values if value.value == 0}
    others = [row for row in rows if row not in paired and row[0] not in zero]
    if paired and len(others) > _MOST_OTHERS:
        yield from _table(result, paired)
        yield f"<details>\n<summary>{len(others)} other values</summary>\n"
        yield from _table(result, others)
        yield "</details>\n"
    elif rows:
        yield from _table(result, paired + others)
    yield from _setting(result.data.setting)
    yield _origin(result)
    if figure.differs:
        yield f"Why it differs: {figure.differs}\n"
    if result.data.panels:
        yield f"![{figure.title}](images/papers/{figure.key}.png)\n"


def _origin(result: FigureResult) -> str:
    """Returns a sentence about the machine, the day and the commit of a run. What was simulated does not depend on the
    machine."""
    machine = result.machine
    where = "Simulated" if result.data.how == "simulated" else f"Measured on {machine['cpu']}, {machine['cores']} cores"
    commit = f", commit {result.versions['commit']}" if "commit" in result.versions else ""
    return f"{where}, {machine['date']}{commit}.\n" if "date" in machine else f"{where}{commit}.\n"


def same_before(key: str, saved: Mapping[str, FigureResult]) -> str | None:
    """Returns the first figure with the same data, if there is one before this figure."""
    first = next(other for other in saved if saved[other].data == saved[key].data)
    return None if first == key else first


def _table(result: FigureResult, rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    yield f"| | the paper | here ({result.data.how}) |"
    yield "| --- | --- | --- |"
    yield from (f"| {what} | {theirs} | {ours} |" for what, theirs, ours in rows)
    yield ""


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


CHECK, MODES, AUTO = "gpu_check.json", "modes.json", "modes_auto.json"


def gpu_section(results: Path) -> Iterator[str]:
    """Yields the part as Markdown; nothing if the folder has no results."""
    if not (results / MODES).exists():
        return
    modes, auto, check = (json.loads((results / name).read_text(encoding="utf-8")) for name in (MODES, AUTO, CHECK))
    means = {run["label"]: run["latency"]["ttft"]["mean_ms"] for run in modes["runs"]}
    cold = check["stages"]["cold"]["figures"]
    points = [point["exposed_ms"] for point in cold["exposed"]]
    slower = sum(point["assisted"] > point["pipelined"] for point in points)
    growth = cold["itl"]["pipelined"]["p99_ms"] / cold["itl"]["warm"]["p99_ms"] - 1
    yield "## On a GPU\n"
    yield (
        f"On one {modes['device']} copying an adapter layer by layer suffices, and CPU workers only add to it: the "
        f"mean TTFT is {means['cached']:.1f} ms with all adapters on the device, {means['pipelined']:.1f} with "
        f"`pipelined`, {means['ondemand']:.1f} with `ondemand` and {means['assisted']:.1f} with `assisted`. Of "
        f"{len(points)} cold prompts that were measured alone, `assisted` was slower than `pipelined` in {slower}. "
        f"While cold requests load, the 99th percentile of their neighbours' gaps grows by {100 * growth:.0f} % with "
        "`pipelined`.\n"
    )
    yield (
        "The load is Toppings' S3: Llama-2-7B's shape with random weights in bf16, adapters of rank 64 on all modules "
        "(320 MB, 5.8 ms over this link of PCIe 5), each request's adapter cold, "
        f"{modes['arguments']['request_rate'][0]:g} requests/s, one run of each mode; {modes['date']}, commit "
        f"{modes['commit']} ([results](../scripts/bench/results/gpu_h200/README.md)). The papers' cards copy over "
        "PCIe 4, which has half of the speed; nothing of ours has run on one.\n"
    )
    yield "| mode | TTFT, mean | p99 | time per token | p99 of its gaps |"
    yield "| --- | --- | --- | --- | --- |"
    base = modes["runs"][0]["latency"]
    for run in modes["runs"]:
        yield _row(f"`{run['label']}`", run["latency"], base)
    for run in auto["runs"]:
        yield _row(f"`{run['label']}`, another run", run["latency"], None)
    here, other = modes["arguments"], auto["arguments"]
    yield (
        f"\nRatios are to `cached`. `auto` was measured with {other['adapters']} adapters of which {other['resident']} "
        f"were on the device; the others with {here['adapters']} and {here['resident']}.\n"
    )


def _row(name: str, latency: Mapping[str, Any], base: Mapping[str, Any] | None) -> str:
    def text(kind: str, percentile: str | None = None) -> str:
        value = _ms(latency, kind, percentile)
        return f"{value:.1f} ms" if base is None else f"{value:.1f} ms ({value / _ms(base, kind, percentile):.2f})"

    return f"| {name} | {text('ttft')} | {text('ttft', 'p99')} | {text('tpot')} | {text('itl', 'p99')} |"


def _ms(latency: Mapping[str, Any], kind: str, percentile: str | None) -> float:
    found = latency[kind]["mean_ms"] if percentile is None else latency[kind]["percentiles_ms"][percentile]
    return float(found)
