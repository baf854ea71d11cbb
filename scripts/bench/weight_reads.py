"""Measures how fast a checkpoint's weights get into pinned memory: by threads, and as one thread would do it.

    .venv/bin/python -m scripts.bench.weight_reads --layers 4

There is no device, and copies to it take no time: what is measured is the most that the reader can deliver. Without
threads, a tensor is read into new memory and then copied to pinned memory, piece by piece. All ways alternate in one
run, with the file in the page cache and without. The last line of stdout is one JSON document: the machine, and GB/s,
medians over the rounds.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np
import torch

from caraserve.bench.records import machine, versions
from caraserve.bench.synthetic import SHAPES, WEIGHTS_NAME, shape_plan, write_repeating_weights
from caraserve.cpu.weight_memory import huge_pages
from caraserve.gpu.memory.weight_transfer import WeightTransfer
from caraserve.gpu.weights import load
from caraserve.model.folder_reader import FolderReader, StoredTensor
from caraserve.model.plan import DecoderPlan
from scripts.laboratory.gpu.null_device import null_device
from scripts.laboratory.papers.fetches import drop_cached

_THREADS = (1, 2, 4, 8)
_STAGING_BYTES = 32 << 20
_CONTEXT = 64
Read = Callable[[DecoderPlan, Sequence[StoredTensor]], None]


def main() -> None:
    """Measures all ways and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=4, help="of a 7B shape in bf16, 0.4 GB each; its ends have 0.5 GB"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    args = parser.parse_args()
    plan = shape_plan(replace(SHAPES["llama2-7b"], layers=args.layers), _CONTEXT)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = Path(folder) / "model"
        write_repeating_weights(model, plan, "bfloat16")
        found = {state: _measure(plan, model, args.rounds, state) for state in ("page cache", "disk")}
    print(json.dumps({"machine": machine(), "versions": versions(), "gb_per_s": found}))


def _measure(plan: DecoderPlan, folder: Path, rounds: int, state: str) -> dict[str, float]:
    """Returns GB/s by way, with the file in the page cache or only on disk."""
    ways: dict[str, Read] = {"one tensor after another": _one_after_another}
    ways |= {f"{count} threads": partial(_with_threads, count) for count in _THREADS}
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, read in ways.items():
            _set_state(folder / WEIGHTS_NAME, state)
            speeds[way].append(_gb_per_s(plan, folder, read))
    for way, measured in speeds.items():
        print(f"{state:10}  {way:24}  {'  '.join(f'{speed:6.2f}' for speed in measured)} GB/s", flush=True)
    return {way: median(measured) for way, measured in speeds.items()}


def _set_state(file: Path, state: str) -> None:
    """Removes the file from the page cache, or reads it into it."""
    drop_cached(file)
    if state != "disk":
        memory = bytearray(_STAGING_BYTES)
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(memory):
                pass


def _gb_per_s(plan: DecoderPlan, folder: Path, read: Read) -> float:
    found: list[StoredTensor] = []
    with FolderReader(folder) as reader:

        def find(name: str, target: torch.Tensor) -> None:
            found.append(reader.find(name, tuple(target.shape)))

        load(plan, torch.bfloat16, _CONTEXT, torch.device("meta"), find)
        started_s = time.perf_counter()
        read(plan, found)
        seconds = time.perf_counter() - started_s
    return sum(tensor.num_bytes for tensor in found) / seconds / 1e9


def _one_after_another(plan: DecoderPlan, tensors: Sequence[StoredTensor]) -> None:
    pinned = cycle([huge_pages(_STAGING_BYTES) for _ in range(2)])
    for tensor in tensors:
        values = np.empty(tensor.num_bytes, np.uint8)
        tensor.read_into(values.data, 0)
        for start in range(0, len(values), _STAGING_BYTES):
            piece = values[start : start + _STAGING_BYTES]
            next(pinned)[: len(piece)] = piece


def _with_threads(threads: int, plan: DecoderPlan, tensors: Sequence[StoredTensor]) -> None:
    device = null_device()
    with WeightTransfer(device, tensors, threads=threads) as transfer:
        load(plan, torch.bfloat16, _CONTEXT, device.device, transfer.fill)


if __name__ == "__main__":
    main()
