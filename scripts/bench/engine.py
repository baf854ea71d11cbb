"""Compares the engine, in-process, with transformers + peft: tokens/s and time per output token.

    .venv/bin/python scripts/bench/engine.py --dtype float32 bfloat16

Closed batches of 1, 8 and 16 requests: (a) on the base model, (b) all on one adapter, (c) each on its own. Both sides
run in one go, in alternating order; medians are reported. The floor is the time to read a decode step's bytes once at
this machine's measured memory bandwidth. Needs the package's `test` extra unless --no-peft. The last line of stdout is
one JSON document.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numba import njit
from peft_baseline import Answer, PeftBaseline, Request
from rich.console import Console
from rich.progress import track

from caraserve.bench.options import TARGETS
from caraserve.bench.records import machine, versions
from caraserve.bench.report.plots import can_draw, legend, line_style, new_figure, render, style
from caraserve.bench.report.tables import TextTable, to_rich
from caraserve.bench.synthetic import ITEMSIZE, SHAPES, adapter_bytes, write_adapters, write_model
from caraserve.cli.options import OptionParser
from caraserve.config import EngineConfig, LoraConfig, ModelConfig
from caraserve.core.request import GenerateRequest, SamplingParams
from caraserve.engine.token_stream import TokenStream
from caraserve.loop import Engine
from caraserve.model.plan import DecoderPlan
from caraserve.serve import build_engine
from caraserve.util.units import human_bytes

Side = Callable[[Sequence[Request]], Awaitable[list[Answer]]]

_ADAPTER_BYTES = str(8 << 30)  # room for every adapter: no loading is measured here
_READ_BYTES, _READS = 1 << 30, 3  # of a measurement of the memory bandwidth
_CORES = len(os.sched_getaffinity(0))
_WIDTH = 200  # columns of the table where stdout is no terminal
_METRICS = ("tokens_per_s", "tpot_ms", "ttft_ms")


def main() -> None:
    """Runs the benchmark for each dtype and prints the tables, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--model", choices=tuple(SHAPES), default="100M", help="size of the random model")
    parser.add_argument("--ranks", type=_integers, default=[16], help="adapters' ranks in turn, as 8,16,32")
    parser.add_argument("--targets", choices=tuple(TARGETS), default="all", help="adapted modules")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=_integers, default=[1, 8, 16], help="requests at once, as 1,8,16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=_CORES, help="compute threads of either side")
    parser.add_argument("--no-peft", action="store_true", help="measure the engine alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON document here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the tables as bars; needs the `plot` extra")
    args = parser.parse_args()
    if args.output_tokens < 2:
        parser.error("--output-tokens: time per token after the first needs at least 2")
    if args.plot is not None and not can_draw():
        parser.error("--plot needs matplotlib: install the package's `plot` extra")
    reports = []
    for dtype in args.dtype:
        with tempfile.TemporaryDirectory(prefix="caraserve-bench-") as folder:
            reports.append(asyncio.run(_measure(Path(folder), args, dtype)))
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(to_rich(_table(reports[-1])))
    if args.plot is not None:
        args.plot.write_bytes(draw(reports))
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    result = {"benchmark": "engine", "machine": machine(), "versions": versions(), "args": shown, "reports": reports}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# --- measurement ---


async def _measure(folder: Path, args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Writes a model and adapters of `dtype` to `folder`, measures every case on both sides, and returns a report."""
    targets = TARGETS[args.targets]
    plan = write_model(folder / "model", SHAPES[args.model], dtype, args.prompt_tokens + args.output_tokens)
    adapters = write_adapters(folder, plan, count=max(args.concurrency), ranks=args.ranks, targets=targets, dtype=dtype)
    # A decode step reads all linear modules and the head, but not the embeddings.
    weight_bytes = (plan.num_parameters - plan.vocab_size * plan.hidden) * ITEMSIZE[dtype]
    ranks = [args.ranks[index % len(args.ranks)] for index in range(max(args.concurrency))]
    kv_bytes = (args.prompt_tokens + args.output_tokens // 2) * plan.kv_bytes_per_token(4)  # halfway, in fp32
    names = list(adapters)
    cases, used = [], []
    for count in args.concurrency:
        for situation, own in (("base", [None] * count), ("one adapter", names[:1] * count), ("own adapters", names)):
            read = {adapter: rank for adapter, rank in zip(own[:count], ranks, strict=False) if adapter is not None}
            step_bytes = weight_bytes + count * kv_bytes
            step_bytes += sum(adapter_bytes(plan, rank, targets, dtype) for rank in read.values())
            cases.append({"situation": situation, "concurrency": count, "step_bytes": step_bytes})
            used.append(own[:count])
    peft_versions: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        sides: dict[str, Side] = {}
        if not args.no_peft:
            peft = PeftBaseline(folder / "model", adapters, dtype, args.threads, args.output_tokens)
            sides["peft"], peft_versions = stack.enter_context(peft).run, peft.versions
        engine = await _start_engine(stack, folder / "model", adapters, args, dtype)
        sides["caraserve"] = lambda sent: _ask_engine(engine, sent, args.output_tokens)
        await _run_cases(cases, used, sides, args, plan)
    for case in cases:
        base = next(one for one in cases if (one["situation"], one["concurrency"]) == ("base", case["concurrency"]))
        case["ratios"] = _ratios(case, base, weight_bytes)
    return {
        "dtype": dtype,
        "num_parameters": plan.num_parameters,
        "decode_weight_bytes": weight_bytes,
        "read_bandwidth_gb_per_s": median(value for case in cases for value in case["read_bandwidths_gb_per_s"]),
        "peft_versions": peft_versions,
        "cases": cases,
    }


async def _run_cases(
    cases: Sequence[dict[str, Any]],
    used: Sequence[Sequence[str | None]],
    sides: Mapping[str, Side],
    args: argparse.Namespace,
    plan: DecoderPlan,
) -> None:
    """Runs all cases `repeats` times after one warm-up, and adds the measurements to them.

    The side that goes first alternates. The memory bandwidth of a shared machine varies, so it is measured beside each.
    """
    words = np.ones(_READ_BYTES // 8, np.uint64)  # written, so that pages are not all one page of zeros
    _sum(words[:8])
    for case in cases:
        repeats: dict[str, dict[str, list[float]]] = {name: {metric: [] for metric in _METRICS} for name in sides}
        case |= {"read_bandwidths_gb_per_s": [], "equal_answers": None, "sides": repeats, "equal": []}
    console = Console(stderr=True)
    for turn in track(range(args.repeats + 1), "measuring", console=console, disable=not console.is_terminal):
        for index, (case, adapters) in enumerate(zip(cases, used, strict=True)):
            rng = np.random.default_rng(1000 * index + turn)  # no two prompts share a prefix: no prefix cache helps
            sent = [(rng.integers(2, plan.vocab_size, args.prompt_tokens).tolist(), name) for name in adapters]
            answers = {name: await sides[name](sent) for name in sorted(sides, reverse=bool(turn % 2))}
            if turn == 0:
                continue
            case["read_bandwidths_gb_per_s"].append(_read_bytes_per_s(words) / 1e9)
            for name, batch in answers.items():
                for metric, value in _figures(batch).items():
                    case["sides"][name][metric].append(value)
            if "peft" in answers:
                pairs = zip(answers["caraserve"], answers["peft"], strict=True)
                case["equal"] += [list(ours[0]) == list(theirs[0]) for ours, theirs in pairs]
    for case in cases:
        equal = case.pop("equal")
        case["equal_answers"] = fmean(equal) if equal else None
        for metrics in case["sides"].values():
            metrics |= {name: {"median": median(values), "repeats": values} for name, values in metrics.items()}


def _figures(batch: Sequence[Answer]) -> dict[str, float]:
    """Returns a batch's output tokens/s from sending to the last token, and mean times per request in ms."""
    return {
        "tokens_per_s": 1000 * sum(len(ids) for ids, _, _ in batch) / max(last_ms for _, _, last_ms in batch),
        "tpot_ms": fmean((last_ms - first_ms) / (len(ids) - 1) for ids, first_ms, last_ms in batch),
        "ttft_ms": fmean(first_ms for _, first_ms, _ in batch),
    }


@njit(nogil=True, cache=False)
def _sum(words):  # type: ignore[no-untyped-def]
    """Returns the sum of integers: the compiler can reorder it freely, so it is as fast as the loads."""
    total = np.uint64(0)
    for i in range(words.size):
        total += words[i]
    return total


def _read_bytes_per_s(words: Any) -> float:
    """Returns the bytes/s at which all cores read 1 GiB: the fastest of three, as others on the host slow some down."""
    times_s = []
    with ThreadPoolExecutor(_CORES) as pool:
        for _ in range(_READS):
            started_s = time.perf_counter()
            assert sum(map(int, pool.map(_sum, np.array_split(words, _CORES)))) == words.size
            times_s.append(time.perf_counter() - started_s)
    return float(words.nbytes / min(times_s))


async def _start_engine(
    stack: AsyncExitStack, model: Path, adapters: Mapping[str, Path], args: argparse.Namespace, dtype: str
) -> Engine:
    """Returns the server's engine without HTTP, with all adapters loaded."""
    words = [str(model), "--served-model-name", "base", "--dtype", dtype, "--device", "cpu"]
    words += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items()), "--loading-mode", "cached"]
    words += ["--lora-pool-bytes", _ADAPTER_BYTES, "--max-host-adapters-bytes", _ADAPTER_BYTES]
    words += ["--max-num-seqs", str(max(args.concurrency)), "--cpu-threads", str(args.threads)]
    configs = OptionParser((ModelConfig, LoraConfig, EngineConfig)).parse_args(words).configs
    return (await build_engine(stack, *configs)).engine


async def _ask_engine(engine: Engine, sent: Sequence[Request], output_tokens: int) -> list[Answer]:
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    started_s = time.perf_counter()
    streams = [
        engine.submit(GenerateRequest(f"bench-{i}", tuple(prompt), adapter, params, time.monotonic()))
        for i, (prompt, adapter) in enumerate(sent)
    ]
    return list(await asyncio.gather(*(_read(stream, started_s) for stream in streams)))


async def _read(stream: TokenStream, started_s: float) -> Answer:
    ids: list[int] = []
    times_ms: list[float] = []
    async for delta in stream:
        if delta.token_ids:
            times_ms.append(1000 * (time.perf_counter() - started_s))
        ids += delta.token_ids
        if delta.finish is not None and delta.finish.reason != "length":
            raise RuntimeError(f"a request ended with {delta.finish.reason}: {delta.finish.error}")
    return ids, times_ms[0], times_ms[-1]


# --- report ---


def _median(case: Mapping[str, Any], side: str, metric: str) -> float:
    return float(case["sides"][side][metric]["median"])


def _ratios(case: Mapping[str, Any], base: Mapping[str, Any], weight_bytes: int) -> dict[str, float]:
    """Returns our figures over peft's, over those on the base model, and over the time to read the step's bytes."""

    def over_reading(num_bytes: int) -> float:
        pairs = zip(case["sides"]["caraserve"]["tpot_ms"]["repeats"], case["read_bandwidths_gb_per_s"], strict=True)
        return float(median(tpot_ms * gb_per_s * 1e6 / num_bytes for tpot_ms, gb_per_s in pairs))

    ours = {metric: _median(case, "caraserve", metric) for metric in _METRICS}
    result = {
        "tokens_per_s_vs_base": ours["tokens_per_s"] / _median(base, "caraserve", "tokens_per_s"),
        "tpot_vs_floor": over_reading(case["step_bytes"]),
        "tpot_vs_weights_once": over_reading(weight_bytes),
    }
    if "peft" in case["sides"]:
        result |= {f"{metric}_vs_peft": value / _median(case, "peft", metric) for metric, value in ours.items()}
    return result


def _table(report: Mapping[str, Any]) -> TextTable:
    with_peft = "peft" in report["cases"][0]["sides"]
    heads = ["situation", "requests", "tok/s", "tok/s ÷ base", "TPOT ms", "TPOT ÷ floor", "TPOT ÷ weights", "TTFT ms"]
    if with_peft:
        heads += ["peft tok/s", "peft TPOT ms", "peft TTFT ms", "tok/s ÷ peft", "TPOT ÷ peft", "same answers"]
    rows = []
    for case in report["cases"]:
        ratio, (tokens_per_s, tpot_ms, ttft_ms) = case["ratios"], (_median(case, "caraserve", m) for m in _METRICS)
        row = [
            case["situation"],
            str(case["concurrency"]),
            f"{tokens_per_s:.1f}",
            f"{ratio['tokens_per_s_vs_base']:.2f}",
        ]
        row += [f"{tpot_ms:.2f}", f"{ratio['tpot_vs_floor']:.2f}", f"{ratio['tpot_vs_weights_once']:.2f}"]
        row.append(f"{ttft_ms:.0f}")
        if with_peft:
            tokens_per_s, tpot_ms, ttft_ms = (_median(case, "peft", metric) for metric in _METRICS)
            row += [f"{tokens_per_s:.1f}", f"{tpot_ms:.2f}", f"{ttft_ms:.0f}"]
            row += [f"{ratio['tokens_per_s_vs_peft']:.2f}", f"{ratio['tpot_ms_vs_peft']:.2f}"]
            row.append(f"{case['equal_answers']:.0%}")
        rows.append(tuple(row))
    weight_bytes, gb_per_s = report["decode_weight_bytes"], report["read_bandwidth_gb_per_s"]
    note = (
        f"A decode step reads {human_bytes(weight_bytes)} of weights: {weight_bytes / gb_per_s / 1e6:.2f} ms at "
        f"{gb_per_s:.1f} GB/s, the median; ratios take the bandwidth beside each repeat.\n"
        "The floor reads the batch's adapters and KV too. TPOT: time per output token after the first.\n"
        "Same answers: requests with every token equal; logits that rounding cannot tell apart may go either way."
    )
    title = f"{report['dtype']}, {report['num_parameters']:,} parameters"
    return TextTable(title, tuple(heads), tuple(rows), note=note)


def draw(reports: Sequence[Mapping[str, Any]]) -> bytes:
    """Draws tokens/s as bars, a panel for each dtype; our bars are labelled with their ratio to peft's."""
    figure = new_figure(11, 4 * len(reports))
    panels = figure.subplots(len(reports), 1, squeeze=False)[:, 0]
    for axes, report in zip(panels, reports, strict=True):
        cases = report["cases"]
        places = np.arange(len(cases))
        sides = sorted(cases[0]["sides"])
        for index, side in enumerate(sides):
            heights = [_median(case, side, "tokens_per_s") for case in cases]
            bars = axes.bar(places + 0.4 * index, heights, 0.4, label=side, color=line_style(index)["color"])
            if side == "caraserve" and "peft" in sides:
                axes.bar_label(bars, [f"{case['ratios']['tokens_per_s_vs_peft']:.1f}×" for case in cases], fontsize=8)
        names = [f"{case['concurrency']} × {case['situation']}" for case in cases]
        axes.set_xticks(places + 0.2 * (len(sides) - 1), names, rotation=20)
        title = f"{report['num_parameters'] / 1e6:.0f}M parameters, {report['dtype']}"
        style(axes, ylabel="output tokens/s", title=title + ", ratio to peft" * ("peft" in sides))
        axes.grid(False, axis="x")
        axes.margins(x=0.02, y=0.1)
    legend(figure, panels[0])
    return render(figure)


if __name__ == "__main__":
    main()
