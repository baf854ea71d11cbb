"""`caraserve bench …`: arguments of the benchmarks, and which of them runs. Level 5.

Whatever computes is imported when it is asked for: the command line itself must not wait for kernels.
"""

import argparse
from pathlib import Path
from typing import Any

from caraserve.config import parse_cpus

LORA_PARTS = ("kernels", "round-trip", "threads")


def add_benchmarks(bench: argparse.ArgumentParser) -> None:
    """Declares the subcommands of `caraserve bench`; each sets `run`."""
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="KIND")
    _add_lora(kinds)


def _add_lora(kinds: Any) -> None:
    lora = kinds.add_parser(
        "lora",
        help="what the CPU LoRA path costs on this machine",
        description="Measures the CPU LoRA kernels beside torch and NumPy on one core, hand-overs to CPU LoRA workers "
        "beside a UNIX socket, and the workers beside torch's threads.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    lora.add_argument("--parts", nargs="+", choices=LORA_PARTS, default=LORA_PARTS, help="what to measure")
    lora.add_argument(
        "--lora-cpus", type=parse_cpus, metavar="LIST", help="cores to measure on, as 1-3,6 (default: all)"
    )
    lora.add_argument("--quick", action="store_true", help="fewer points and repeats")
    _add_save(lora)
    lora.set_defaults(run=_lora)


def _add_save(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--save", type=Path, metavar="DIR", help="folder for the report: JSON and figures")


def _lora(args: argparse.Namespace) -> int:
    from caraserve.bench.lora.run import FULL, QUICK, bench_lora

    bench_lora(args.parts, args.lora_cpus, QUICK if args.quick else FULL, args.save)
    return 0
