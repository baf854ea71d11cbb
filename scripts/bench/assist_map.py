"""Maps where CPU workers that compute a cold adapter's first layers end a prefill earlier than waiting for the link.

    .venv/bin/python -m scripts.bench.assist_map predict [--save DIR]
    .venv/bin/python -m scripts.bench.assist_map measure [--save DIR]

`predict` asks the rule of `--loading-mode auto` about a request whose adapter begins to be copied as it arrives, on an
idle server: over ranks, modules, prompt lengths, and links of a 64th, a 16th, a quarter and all of the speed. The
machines are an A100 and an H100 with Llama-2-7B in bfloat16, put together from published peaks:

             dense bf16    memory      PCIe, one way   a core's fp32          memory of a core
    A100     312 TFLOP/s   2.04 TB/s   32 GB/s (4.0)   72 GFLOP/s (EPYC 7742)    3.2 GB/s
    H100     989 TFLOP/s   3.35 TB/s   64 GB/s (5.0)   128 GFLOP/s (Xeon 8480C)  5.5 GB/s

A peak counts by half for arithmetic and by 0.8 for memory and links; 16 cores are workers, and a hand-off takes 50 µs.
So these are predictions, not measurements. A number is the share of the waiting request's time to the first token that
assistance saves; a dash means that `auto` waits.

`measure` sends cold requests one after another to servers of a random model of 100 million parameters on this machine,
in modes `pipelined`, `assisted` and `auto`, over emulated links, and sets the rule's prediction beside the measured
times. A link is named by the time that it takes for an adapter of rank 64 on q, k and v, in times of a prefill of 128
tokens. It takes about 15 minutes on two cores, and the machine should do nothing else.
"""

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from caraserve.bench.options import TARGETS
from caraserve.bench.records import Run, machine, versions
from caraserve.bench.report.files import make_folder, write_files
from caraserve.bench.report.plots import INK, new_figure, render
from caraserve.bench.servers import working_folder
from caraserve.bench.synthetic import SHAPES, llama_config, write_model
from caraserve.config import LOADING_MODES
from caraserve.core.machine_profile import (
    ASSUMED_HANDOFF_MS,
    SCHEMA,
    Decode,
    LineFit,
    LoraRate,
    Prefill,
    PrefillCurve,
    Profile,
    load,
)
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS
from caraserve.lora.start_policy import AwaitedPrefill, StartPolicy
from caraserve.model.dtype import Dtype
from caraserve.model.families import plan_of
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import adapter_spec
from scripts.laboratory.papers.figures import PaperOptions
from scripts.laboratory.papers.servers import run_modes

_RANKS, _TOKENS, _LINKS = (8, 16, 32, 64, 128), (16, 64, 128, 256, 512, 1024), (1 / 64, 1 / 16, 1 / 4, 1)
_COMPUTE_SHARE, _MEMORY_SHARE = 0.5, 0.8  # of a published peak
_WORKERS = 16

_MODEL, _DTYPE = "100M", "float32"  # of `run_modes`
_MODES = ("cached", "pipelined", "assisted", "auto")
_MEASURED_RANKS, _MEASURED_TOKENS = (8, 32, 64, 128), (16, 64, 256)
# With room for one adapter of the largest rank, those of ranks 8 and 128 wait until the copy of the one before has
# ended, whatever the mode; the others find room beside it.
_REPORTED_RANKS = (32, 64)
_LOAD_TIMES = (0.25, 1.0, 4.0)
# Every 12 requests have each rank with each length once, and room for one adapter of the largest rank makes all cold.
_COLD = (
    *("--modes", ",".join(_MODES), "--ranks", ",".join(map(str, _MEASURED_RANKS))),
    *("--lora-assignment", "round-robin", "--adapters", "12", "--resident", "1"),
    *("--num-prompts", "36", "--max-concurrency", "1", "--request-rate", "inf"),
)


@dataclass(frozen=True, slots=True)
class _Gpu:
    """Published peaks of a GPU and of a core of its host."""

    name: str
    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    core_flops: float
    core_bytes_per_s: float

    def profile(self, plan: DecoderPlan) -> Profile:
        """Returns the profile of a model in bfloat16: a prefill reads all weights once, and computes each token."""
        linears = [linear for layer in plan.layers for linear in layer.linears]
        weights = sum(linear.inputs * linear.outputs for linear in linears)
        widths = sum(linear.inputs + linear.outputs for linear in linears)
        ms_per_flop = 1000 / (_COMPUTE_SHARE * self.flops)
        read_ms = 1000 * 2 * weights / (_MEMORY_SHARE * self.memory_bytes_per_s)
        rates_ms = {"per_token_ms": 2 * weights * ms_per_flop, "per_token_rank_ms": 2 * widths * ms_per_flop}
        curve = PrefillCurve(read_ms, base_ms=0.0, lora_ms=0.0, r2=1.0, **rates_ms)
        prefill = Prefill((), curve, base_ms=read_ms, r2=1.0, **rates_ms)
        none = LineFit(0.0, 0.0, 1.0)
        link = _MEMORY_SHARE * self.link_bytes_per_s
        rates = tuple(self._rate(plan, targets, rank) for targets, rank in product(("qkv", "all"), _RANKS))
        decode = Decode((), none, none, 0.0, 0.0, 0.0, 1.0)
        return Profile(
            SCHEMA, self.name, "llama2-7b", 0.0, False, link, 0.0, ASSUMED_HANDOFF_MS, rates, prefill, decode
        )

    def _rate(self, plan: DecoderPlan, targets: str, rank: int) -> LoraRate:
        values = rank * sum(
            one.inputs + one.outputs for one in plan.layers[0].linears if one.target in TARGETS[targets]
        )
        fixed_ms = 1000 * 2 * values / (_MEMORY_SHARE * self.core_bytes_per_s)
        return LoraRate(rank, targets, _COMPUTE_SHARE * self.core_flops / (2 * values), fixed_ms)  # type: ignore[arg-type]


_GPUS = (
    _Gpu("A100", 312e12, 2.04e12, 32e9, 72e9, 3.2e9),
    _Gpu("H100", 989e12, 3.35e12, 64e9, 128e9, 5.5e9),
)


@dataclass(frozen=True, slots=True)
class _Case:
    """A prompt with a cold adapter on a machine."""

    profile: Profile
    plan: DecoderPlan
    shared_cores: bool  # whether the workers' cores are the device's own
    workers: int
    targets: str
    rank: int
    link: float  # times the machine's

    def saved(self, tokens: int) -> float:
        """Returns the share of the time to the first token that CPU workers save; 0 where `auto` waits."""
        adapter = adapter_spec(self.plan, Dtype.BF16, self.rank, len(self.plan.layers), TARGETS[self.targets])
        prefill = AwaitedPrefill(tokens, begins_s=0.0)
        waiting = StartPolicy(
            LOADING_MODES["auto"],
            len(self.plan.layers),
            self.link * self.profile.link_bytes_per_s,
            self.profile,
            handoff_ms=ASSUMED_HANDOFF_MS if self.profile.handoff_ms is None else self.profile.handoff_ms,
            shared_cores=self.shared_cores,
            tokens_per_worker=self.profile.tokens_per_worker,
            attention_targets=frozenset(TARGETS["qkv"]),
            hand_offs=self.plan.most_groups,
            chunk_tokens=None if self.shared_cores else ASSISTED_CHUNK_TOKENS,
        )
        ends_s = []
        for policy in (waiting, replace(waiting, workers=self.workers)):
            start = policy.start(prefill, policy.plan_copy(adapter, 0.0, prefill).groups, adapter)
            assert start.ends_s is not None
            ends_s.append(start.ends_s)
        return 1 - ends_s[1] / ends_s[0] if start.assist else 0.0


def main() -> None:
    """Prints and draws the map of each machine, predicted or measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=("predict", "measure"))
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for the figure, and for the measured values")
    args = parser.parse_args()
    if args.save is not None:
        make_folder(args.save)
    files = _predict() if args.how == "predict" else _measure(args.repeats)
    if args.save is not None:
        write_files(args.save, files)


def _predict() -> dict[str, bytes]:
    """Prints the maps of the published machines. Returns their figure."""
    plan = _plan_of("llama2-7b")
    rows = list(product(("qkv", "all"), _RANKS))
    maps = []
    for gpu in _GPUS:
        profile = gpu.profile(plan)
        for link in _LINKS:
            cases = [_Case(profile, plan, False, _WORKERS, targets, rank, link) for targets, rank in rows]
            saved = [[case.saved(tokens) for tokens in _TOKENS] for case in cases]
            maps.append(_Map(f"{gpu.name}, {link * profile.link_bytes_per_s / 1e9:.3g} GB/s", _TOKENS, saved))
    names = [f"{targets} rank {rank}" for targets, rank in rows]
    for one in maps:
        _print(one, names)
    return {"assist_map.svg": _draw(maps, names, len(_LINKS))}


@dataclass(frozen=True, slots=True)
class _Map:
    """The share of the TTFT that CPU workers save, by row and by tokens of the prompt."""

    title: str
    tokens: Sequence[int]
    saved: Sequence[Sequence[float]]


def _measure(repeats: int) -> dict[str, bytes]:
    """Measures this machine, and reports measured and predicted maps."""
    with working_folder() as folder:
        profile_file, lengths_file = folder / "profile.json", folder / "lengths.csv"
        _profile_here(folder, profile_file)
        profile, plan = load(profile_file), _plan_of(_MODEL)
        lengths_file.write_text("prompt_tokens,output_tokens\n" + "".join(f"{each},2\n" for each in _MEASURED_TOKENS))
        options = PaperOptions(duration_s=0.0, repeats=repeats, seed=0)
        cells = list[_Cell]()
        for times, targets in product(_LOAD_TIMES, ("qkv", "all")):
            words = ["--targets", targets, "--trace", f"lengths:{lengths_file}", "--repeats", str(repeats), *_COLD]
            words += ["--emulate-link-mb-per-s", f"{_link_bytes_per_s(profile, plan, times) / 1e6:g}"]
            runs = run_modes(words, options, f"--profile {profile_file}").runs
            cells += _cells(profile, plan, times, targets, runs)
    return _reported(cells)


def _reported(cells: Sequence["_Cell"]) -> dict[str, bytes]:
    """Prints the maps of these cells. Returns them as JSON, with their figure."""
    rows = list(product(("qkv", "all"), _REPORTED_RANKS))
    found = {(cell.load_times, cell.targets, cell.rank, cell.tokens): cell for cell in cells}
    maps = [
        _Map(
            f"{name}, a load takes {times:g} prefills",
            _MEASURED_TOKENS,
            [[value(found[times, *row, tokens]) for tokens in _MEASURED_TOKENS] for row in rows],
        )
        for name, value in (("measured", attrgetter("saved")), ("predicted", attrgetter("predicted")))
        for times in _LOAD_TIMES
    ]
    names = [f"{targets} rank {rank}" for targets, rank in rows]
    for one in maps:
        _print(one, names)
    document = {"bench": "assist map", "machine": machine(), "versions": versions(), "cells": cells}
    indented = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    return {"assist_map.json": indented, "assist_map.png": _draw(maps, names, len(_LOAD_TIMES))}


@dataclass(frozen=True, slots=True)
class _Cell:
    """Cold requests of one kind. Times are medians in ms."""

    load_times: float  # the link: the time of a load of rank 64 on q, k and v, in prefills of 128 tokens
    targets: str
    rank: int
    tokens: int
    requests: int  # in each mode
    cached_ms: float
    pipelined_ms: float
    assisted_ms: float
    auto_ms: float
    predicted: float  # share of the TTFT that the rule expects CPU workers to save; 0: it waits for the link

    @property
    def saved(self) -> float:
        """The measured share of the TTFT that CPU workers save; below 0 if they make it longer."""
        return 1 - self.assisted_ms / self.pipelined_ms


def _cells(profile: Profile, plan: DecoderPlan, times: float, targets: str, runs: Sequence[Run]) -> Iterator[_Cell]:
    ttft_ms: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for run in runs:
        for record in run.records:
            if record.ttft_s is not None:
                ttft_ms[run.label, record.rank or 0, record.prompt_tokens].append(1000 * record.ttft_s)
    link = _link_bytes_per_s(profile, plan, times) / profile.link_bytes_per_s
    for rank, tokens in product(_REPORTED_RANKS, _MEASURED_TOKENS):
        cached, pipelined, assisted, auto = (median(ttft_ms[mode, rank, tokens]) for mode in _MODES)
        predicted = _Case(profile, plan, True, len(os.sched_getaffinity(0)) - 1, targets, rank, link).saved(tokens)
        count = len(ttft_ms[_MODES[0], rank, tokens])
        yield _Cell(times, targets, rank, tokens, count, cached, pipelined, assisted, auto, predicted)


def _profile_here(folder: Path, file: Path) -> None:
    write_model(folder / "model", SHAPES[_MODEL], _DTYPE, 1024, weights=False)
    words = ("profile", str(folder / "model"), "--load-format", "dummy", "--dtype", _DTYPE, "--output", str(file))
    subprocess.run([sys.executable, "-m", "caraserve", *words], check=True)


def _link_bytes_per_s(profile: Profile, plan: DecoderPlan, times: float) -> float:
    """Returns the speed of a link on which a load of rank 64 on q, k and v takes `times` prefills of 128 tokens."""
    adapter = adapter_spec(plan, Dtype.F16, 64, len(plan.layers), TARGETS["qkv"])
    return adapter.num_bytes / (times * profile.prefill_ms(128, 0) / 1000)


def _plan_of(model: str) -> DecoderPlan:
    config = llama_config(SHAPES[model], max_position=4096)
    return plan_of(config | {"bos_token_id": 0, "eos_token_id": None, "tie_word_embeddings": False})


def _print(one: _Map, names: Sequence[str]) -> None:
    table = Table(title=one.title)
    table.add_column("modules", no_wrap=True)
    for tokens in one.tokens:
        table.add_column(f"{tokens} tokens", justify="right")
    for name, row in zip(names, one.saved, strict=True):
        table.add_row(name, *(f"{share:.0%}" if share else "–" for share in row))
    Console(width=100).print(table)


def _draw(maps: Sequence[_Map], names: Sequence[str], columns: int) -> bytes:
    rows = len(maps) // columns
    figure = new_figure(3 * columns + 1, 3.5 * rows)
    plots = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for plot, one in zip(plots.flat, maps, strict=True):
        percent = [[100 * share for share in row] for row in one.saved]
        shown = plot.imshow(percent, vmin=-60, vmax=60, cmap="RdBu", aspect="auto")
        plot.set_title(one.title, fontsize=9)
        plot.set_xticks(range(len(one.tokens)), [str(tokens) for tokens in one.tokens], fontsize=8)
        plot.set_yticks(range(len(names)), names, fontsize=8)
        plot.set_xlabel("prompt tokens", fontsize=9)
        for (row, column), value in np.ndenumerate(np.array(percent)):
            plot.text(column, row, f"{value:.0f}" if value else "–", ha="center", va="center", fontsize=7, color=INK)
    figure.colorbar(shown, ax=plots, label="TTFT saved by CPU workers, %")
    return render(figure)


if __name__ == "__main__":
    main()
