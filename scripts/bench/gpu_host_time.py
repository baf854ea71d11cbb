"""Measures the CPU time that the CUDA backend's threads spend on an iteration, on a device where nothing runs.

    .venv/bin/python -m scripts.bench.gpu_host_time [--tree OTHER_CHECKOUT] [--rows 64]

An 8B shape decodes with another adapter in every row; graphs are captured, and no operation of the driver takes time,
so the figures are Python's share of the launching and of the results thread: on a GPU the driver's calls are added.
With `--tree` several checkouts run in turns, so that their figures compare. The last line of stdout is one JSON
document: µs an iteration, medians over the rounds, by checkout, load and thread.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from statistics import median

from caraserve.bench.records import machine, versions
from caraserve.bench.synthetic import shape_plan
from caraserve.core.batch import Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.builder import GpuSizes
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.weights import TORCH_DTYPES, load
from caraserve.model.dtype import Dtype
from caraserve.profiling.microbench import adapter_spec
from scripts.laboratory.gpu.null_device import NullDriver, null_device
from scripts.laboratory.gpu.setup import LLAMA3_8B

_ROOT = Path(__file__).parents[2]
_CONTEXT, _PROMPT, _BLOCK = 4096, 32, 16
_AHEAD = 2  # iterations in flight, as the engine has them
_WARM = 80  # first iterations, in which adapters are used for the first time
_THREADS = ("launch", "results")
Figures = dict[str, dict[str, float]]  # µs, by load and thread


def main() -> None:
    """Measures all checkouts in turns and prints a line for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to measure too")
    parser.add_argument("--rows", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters, on all modules (default %(default)s)")
    parser.add_argument("--iterations", type=int, default=300, help="of each load (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="store_true", help="measure in this process, once")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(_measure(args.rows, args.rank, args.iterations)))
        return
    trees = [_ROOT, *(path.resolve() for path in args.tree)]
    found: dict[str, list[Figures]] = {tree.name: [] for tree in trees}
    for _ in range(args.rounds):
        for tree in trees:
            found[tree.name].append(_measured_in(tree, args))
    medians = {tree: _medians(rounds) for tree, rounds in found.items()}
    for tree, loads in medians.items():
        for name, us in loads.items():
            parts = ", ".join(f"{thread} {us[thread]:5.0f}" for thread in _THREADS)
            print(f"{tree:20} {name:40} {sum(us.values()):6.0f} µs an iteration: {parts}")
    print(json.dumps({"machine": machine(), "versions": versions(), "rows": args.rows, "us": medians}))


def _measured_in(tree: Path, args: argparse.Namespace) -> Figures:
    sizes = [f"--{name}={getattr(args, name)}" for name in ("rows", "rank", "iterations")]
    command = [sys.executable, str(Path(__file__).resolve()), "--only", *sizes]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    made = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: Figures = json.loads(made.stdout.splitlines()[-1])
    return figures


def _medians(rounds: Sequence[Figures]) -> Figures:
    return {load: {thread: median(each[load][thread] for each in rounds) for thread in _THREADS} for load in rounds[0]}


def _measure(rows: int, rank: int, iterations: int) -> Figures:
    loads = {
        f"{rows} rows of the base model": _decoding([0] * rows, iterations),
        f"{rows} rows of one adapter": _decoding([1] * rows, iterations),
        f"{rows} rows of {rows} adapters": _decoding(range(1, rows + 1), iterations),
        "one of them leaves, another joins": _changing(rows, iterations),
    }
    with _backend(rows, rank) as backend:
        return {name: _us_an_iteration(backend, batches) for name, batches in loads.items()}


class _IdleDriver(NullDriver):
    """Issues nothing at all, so that no kernel needs to be compiled."""

    def run(self, stream: Stream, issue: Callable[[], None]) -> None: ...


@contextmanager
def _backend(rows: int, rank: int) -> Iterator[CudaBackend]:
    """Yields a warm backend with adapters of all modules in the slots up to twice `rows`."""
    device, plan = replace(null_device(), driver=_IdleDriver()), shape_plan(LLAMA3_8B, _CONTEXT)
    spec = adapter_spec(plan, Dtype.BF16, rank, len(plan.layers))
    sizes = GpuSizes(
        num_slots=rows,
        adapter_slots=2 * rows + 1,
        max_step_tokens=2048,
        max_context=_CONTEXT,
        memory_utilization=0.9,
        host_bytes=spec.num_bytes,
        pool_bytes=(2 * rows + 1) * 2 * spec.num_bytes,
    )
    weights = load(plan, TORCH_DTYPES[Dtype.BF16], _CONTEXT, device.device, lambda name, target: None)
    backend = CudaBackend(plan, weights, sizes, device)
    try:
        backend.warm_up()
        loaded: SimpleQueue[Exception | None] = SimpleQueue()
        for slot in range(1, 2 * rows + 1):
            backend.load_adapter(HostAdapter(spec, backend.host_memory[: spec.num_bytes]), slot, loaded.put)
            assert loaded.get() is None
        yield backend
    finally:
        backend.close()


def _us_an_iteration(backend: CudaBackend, batches: Sequence[Batch]) -> dict[str, float]:
    """Runs a load, and returns the CPU time in µs that each thread spends on one of its iterations."""
    ended: SimpleQueue[StepResult | Exception] = SimpleQueue()
    before: dict[str, float] = {}
    for number, batch in enumerate(batches):
        if number >= _AHEAD:
            _check(ended.get())
        if number == _WARM:
            before = _cpu_s()
        backend.launch(batch, ended.put)
    for _ in range(_AHEAD):
        _check(ended.get())
    return {thread: 1e6 * (_cpu_s()[thread] - before[thread]) / (len(batches) - _WARM) for thread in _THREADS}


def _check(outcome: StepResult | Exception) -> None:
    if isinstance(outcome, Exception):
        raise outcome


def _cpu_s() -> dict[str, float]:
    """Returns the CPU time of the backend's threads so far, in s."""
    names = {f"caraserve-{name}": name for name in _THREADS}
    return {
        names[thread.name]: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name in names and thread.ident is not None
    }


def _decoding(adapters: Sequence[int], iterations: int) -> list[Batch]:
    """Returns iterations of requests that decode on, one with each adapter. Each needs a block every 16 tokens, not
    all at once."""
    starts = [_start(slot) for slot in range(len(adapters))]
    batches = []
    for step in range(iterations):
        rows, grants = [], []
        for slot, adapter in enumerate(adapters):
            position = _PROMPT + slot % _BLOCK + step
            rows.append(ScheduledRow(slot, position, 1, adapter, samples=True))
            if position % _BLOCK == 0:
                grants.append(BlockGrant(slot, position // _BLOCK, (slot,)))
        batches.append(Batch(tuple(starts) if step == 0 else (), tuple(grants), tuple(rows)))
    return batches


def _changing(rows: int, iterations: int) -> list[Batch]:
    """Returns iterations in each of which a request begins with its prompt in place of one that decoded, with an
    adapter that has no other."""
    adapters, positions = list(range(1, rows + 1)), [_PROMPT] * rows
    batches = []
    for step in range(iterations):
        new = step % rows
        adapters[new] = 1 + (adapters[new] - 1 + rows) % (2 * rows)
        made = [
            ScheduledRow(slot, 0, _PROMPT, adapters[slot], samples=True)
            if slot == new
            else ScheduledRow(slot, positions[slot], 1, adapters[slot], samples=True)
            for slot in range(rows)
        ]
        positions = [_PROMPT if slot == new else position + 1 for slot, position in enumerate(positions)]
        grant = BlockGrant(new, 0, tuple(range(_PROMPT // _BLOCK + 1)))
        ordered = sorted(made, key=lambda row: row.adapter_slot)
        batches.append(Batch((_start(new),), (grant,), tuple(ordered)))
    return batches


def _start(slot: int) -> SlotStart:
    return SlotStart(slot, tuple(range(_PROMPT)), SlotSampling.greedy(_PROMPT))


if __name__ == "__main__":
    main()
