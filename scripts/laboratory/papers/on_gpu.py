"""The part of docs/papers.md on what a GPU has shown: Toppings' S3 on one H200, from saved results."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
