"""Maps where CPU workers that compute a cold adapter's first layers end a prefill earlier than waiting for the link.

    .venv/bin/python scripts/bench/assist_map.py [--profile FILE --model 100M] [--save DIR]

It asks the rule of `--loading-mode auto` about a request whose adapter begins to be copied as it arrives, on an idle
server: over ranks, modules, prompt lengths, and links of a 64th, a 16th, a quarter and all of the speed. Without
`--profile` the machines are an A100 and an H100 with Llama-2-7B in bfloat16, put together from published peaks:

             dense bf16    memory      PCIe, one way   a core's fp32          memory of a core
    A100     312 TFLOP/s   2.04 TB/s   32 GB/s (4.0)   72 GFLOP/s (EPYC 7742)    3.2 GB/s
    H100     989 TFLOP/s   3.35 TB/s   64 GB/s (5.0)   128 GFLOP/s (Xeon 8480C)  5.5 GB/s

A peak counts by half for arithmetic and by 0.8 for memory and links; 16 cores are workers, and a hand-off takes 50 µs.
So these are predictions, not measurements. A number is the share of the waiting request's time to the first token that
assistance saves; a dash means that `auto` waits.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from caraserve.bench.options import TARGETS
from caraserve.bench.report.files import make_folder, write_files
from caraserve.bench.report.plots import new_figure, render
from caraserve.bench.synthetic import SHAPES, llama_config
from caraserve.config import LOADING_MODES
from caraserve.core.machine_profile import (
    ASSUMED_HANDOFF_MS,
    SCHEMA,
    Decode,
    LineFit,
    LoraRate,
    Prefill,
    Profile,
    load,
)
from caraserve.lora.start_policy import AwaitedPrefill, StartPolicy
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec, parse_spec
from caraserve.profiling.microbench import adapter_spec

_RANKS, _TOKENS, _LINKS = (8, 16, 32, 64, 128), (16, 64, 128, 256, 512, 1024), (1 / 64, 1 / 16, 1 / 4, 1)
_COMPUTE_SHARE, _MEMORY_SHARE = 0.5, 0.8  # of a published peak
_WORKERS = 16


@dataclass(frozen=True, slots=True)
class _Gpu:
    """Published peaks of a GPU and of a core of its host."""

    name: str
    flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    core_flops: float
    core_bytes_per_s: float

    def profile(self, spec: ModelSpec) -> Profile:
        """Returns the profile of a model in bfloat16: a prefill reads all weights once, and computes each token."""
        weights = spec.layers * sum(inputs * outputs for inputs, outputs in map(spec.site_shape, SITES))
        widths = sum(sum(spec.site_shape(site)) for site in SITES)
        ms_per_flop = 1000 / (_COMPUTE_SHARE * self.flops)
        prefill = Prefill(
            (),
            base_ms=1000 * 2 * weights / (_MEMORY_SHARE * self.memory_bytes_per_s),
            per_token_ms=2 * weights * ms_per_flop,
            per_token_rank_ms=2 * spec.layers * widths * ms_per_flop,
            r2=1.0,
        )
        none = LineFit(0.0, 0.0, 1.0)
        link = _MEMORY_SHARE * self.link_bytes_per_s
        rates = tuple(self._rate(spec, targets, rank) for targets, rank in product(("qkv", "all"), _RANKS))
        decode = Decode((), none, none, 0.0, 0.0, 0.0, 1.0)
        return Profile(
            SCHEMA, self.name, "llama2-7b", 0.0, False, link, 0.0, ASSUMED_HANDOFF_MS, rates, prefill, decode
        )

    def _rate(self, spec: ModelSpec, targets: str, rank: int) -> LoraRate:
        values = rank * sum(sum(spec.site_shape(site)) for site in TARGETS[targets])
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
    spec: ModelSpec
    shared_cores: bool  # whether the workers' cores are the device's own
    workers: int
    targets: str
    rank: int
    link: float  # times the machine's

    def saved(self, tokens: int) -> float:
        """Returns the share of the time to the first token that CPU workers save; 0 where `auto` waits."""
        adapter = adapter_spec(self.spec, Dtype.BF16, self.rank, self.spec.layers, TARGETS[self.targets])
        prefill = AwaitedPrefill(tokens, begins_s=0.0)
        waiting = StartPolicy(
            LOADING_MODES["auto"],
            self.spec.layers,
            self.link * self.profile.link_bytes_per_s,
            self.profile,
            handoff_ms=ASSUMED_HANDOFF_MS if self.profile.handoff_ms is None else self.profile.handoff_ms,
            shared_cores=self.shared_cores,
            tokens_per_worker=self.profile.tokens_per_worker,
        )
        ends_s = []
        for policy in (waiting, replace(waiting, workers=self.workers)):
            start = policy.start(prefill, policy.plan_copy(adapter, 0.0, prefill).groups, adapter)
            assert start.ends_s is not None
            ends_s.append(start.ends_s)
        return 1 - ends_s[1] / ends_s[0] if start.assist else 0.0


def main() -> None:
    """Prints and draws the map of each machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="a machine profile, instead of the published peaks"
    )
    parser.add_argument("--model", default="llama2-7b", choices=tuple(SHAPES), help="the model of the profile")
    parser.add_argument("--workers", type=int, default=_WORKERS, help="CPU workers")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder for assist_map.svg")
    args = parser.parse_args()
    spec = _spec(args.model if args.profile else "llama2-7b")
    profiles = [gpu.profile(spec) for gpu in _GPUS] if args.profile is None else [load(args.profile)]
    rows = list(product(("qkv", "all"), _RANKS))
    maps = []
    for profile in profiles:
        for link in _LINKS:
            shared = profile.machine.endswith(("-core", "-cores"))  # otherwise the key ends with the accelerator
            cases = [_Case(profile, spec, shared, args.workers, targets, rank, link) for targets, rank in rows]
            saved = [[case.saved(tokens) for tokens in _TOKENS] for case in cases]
            maps.append((f"{profile.machine}, {link * profile.link_bytes_per_s / 1e9:.3g} GB/s", saved))
    names = [f"{targets} rank {rank}" for targets, rank in rows]
    for title, saved in maps:
        _print(title, names, saved)
    if args.save is not None:
        make_folder(args.save)
        write_files(args.save, {"assist_map.svg": _draw(maps, names)})


def _spec(model: str) -> ModelSpec:
    config = llama_config(SHAPES[model], max_position=4096)
    return parse_spec(config | {"bos_token_id": 0, "eos_token_id": None, "tie_word_embeddings": False})


def _print(title: str, names: Sequence[str], saved: Sequence[Sequence[float]]) -> None:
    table = Table(title=title)
    table.add_column("modules", no_wrap=True)
    for tokens in _TOKENS:
        table.add_column(f"{tokens} tokens", justify="right")
    for name, row in zip(names, saved, strict=True):
        table.add_row(name, *(f"{share:.0%}" if share else "–" for share in row))
    Console(width=100).print(table)


def _draw(maps: Sequence[tuple[str, Sequence[Sequence[float]]]], names: Sequence[str]) -> bytes:
    machines = len(maps) // len(_LINKS)
    figure = new_figure(12, 3.5 * machines)
    plots = figure.subplots(machines, len(_LINKS), sharex=True, sharey=True, squeeze=False)
    for plot, (title, saved) in zip(plots.flat, maps, strict=True):
        shown = plot.imshow([[100 * share for share in row] for row in saved], vmin=0, vmax=100, aspect="auto")
        plot.set_title(title, fontsize=9)
        plot.set_xticks(range(len(_TOKENS)), [str(tokens) for tokens in _TOKENS], fontsize=8)
        plot.set_yticks(range(len(names)), names, fontsize=8)
        plot.set_xlabel("prompt tokens", fontsize=9)
    figure.colorbar(shown, ax=plots, label="TTFT saved by CPU workers, %")
    return render(figure)


if __name__ == "__main__":
    main()
