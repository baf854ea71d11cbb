"""Repeats hand-offs to CPU workers: the device publishes, waits and adds, and every sum is checked.

Each round writes another x to the same host memory, so that a flag set before its data, or a sum computed too early,
shows as the sum of an older x.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from caraserve.bench.synthetic import Shape, shape_plan
from caraserve.core.lora_layout import PANEL, HostAdapter
from caraserve.cpu import handoff
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.cpu.shared_memory import PAGE_BYTES, SharedRegion
from caraserve.cpu.structs import LORA_ENTRY
from caraserve.errors import BackendFailed
from caraserve.gpu.kernels import cuda_launch, work_orders
from caraserve.model.dtype import Dtype
from caraserve.profiling.microbench import adapter_spec, random_adapter
from caraserve.util.units import align_up
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.adapters import TOLERANCE
from scripts.laboratory.gpu.results import WrongResult, check_close
from scripts.laboratory.gpu.setup import CheckSetup

_SHAPE = Shape(hidden=128, layers=1, intermediate=128, vocab=64, heads=2, kv_heads=2)
_QKV = ("q_proj", "k_proj", "v_proj")
_RANK, _ROWS = 8, 4
_WORDS_BYTES = 192  # status and the two flags, each on its own cache line
_PATIENCE_NS = 10_000_000_000
_BIRTH_S = 60.0
_BY_WORKERS = 1  # value of enum Outcome in handoff.cu
_NUMBER, _GENERATION = 0x5EED_0001, 0x5EED_0002  # placeholders in the work order for what differs between rounds


@dataclass(slots=True)
class HandshakeBench:
    """Workers with their region, and the device words for them."""

    acc: Accelerator
    region: SharedRegion
    base: int  # device address of the region
    workers: WorkerPool
    blocks: NDArray[np.uint8]
    adapter: HostAdapter
    words: NDArray[np.uint32]  # status, x_flag, y_flag
    host_x: NDArray[np.uint8]
    deltas: NDArray[np.uint8]
    wide_x: NDArray[np.uint8]
    rounds_done: int = 0

    def on_device(self, array: NDArray[np.generic]) -> int:
        return self.base + self.region.offset(int(array.ctypes.data))


@contextmanager
def handshake_bench(setup: CheckSetup, acc: Accelerator) -> Iterator[HandshakeBench]:
    """Yields a bench with one worker."""
    plan, block_bytes = shape_plan(_SHAPE, 64), align_up(handoff.block_bytes(1), PAGE_BYTES)
    region = SharedRegion(1 << 21)
    blocks, words = region.carve(block_bytes), region.carve(_WORDS_BYTES).view(np.uint32)
    layout = adapter_spec(plan, Dtype.F16, _RANK, len(plan.layers), _QKV)
    adapter = random_adapter(plan, layout, region.carve(1 << 18))
    host_x, wide_x = (region.carve(4 * _ROWS * _SHAPE.hidden) for _ in range(2))
    deltas = region.carve(4 * _ROWS * 3 * _SHAPE.hidden)
    base = acc.device.driver.register_host(region.base, region.num_bytes)
    workers = WorkerPool(region, blocks, setup.cores(1), block_bytes)
    workers.start()
    try:
        if not workers.await_all(_BIRTH_S):
            raise BackendFailed(f"no CPU LoRA worker was there within {_BIRTH_S:.0f} s")
        workers.keep_awake(True)
        yield HandshakeBench(acc, region, base, workers, blocks, adapter, words, host_x, deltas, wide_x)
    finally:
        workers.close()
        acc.device.driver.unregister_host(region.base)
        region.close()


def run_rounds(bench: HandshakeBench, rounds: int, generator: torch.Generator, *, by_stream: bool) -> float:
    """Runs rounds and checks them when all are done; returns the seconds per round. `by_stream`: the stream waits for
    the completion counter, instead of a kernel. Raises WrongResult."""
    acc, width, columns = bench.acc, 3 * _SHAPE.hidden, tuple(range(0, 3 * _SHAPE.hidden, _SHAPE.hidden))
    x = acc.random(generator, rounds, _ROWS, _SHAPE.hidden)
    y = acc.random(generator, rounds, _ROWS, width)
    expected = y.double() + x.double() @ _product(bench).to(acc.place)
    request = torch.zeros(1, dtype=torch.int64, device=acc.place)
    counted, errors = (torch.zeros(1, dtype=torch.int32, device=acc.place) for _ in range(2))
    outcomes = torch.full((rounds,), -1, dtype=torch.int32, device=acc.place)
    arrived = torch.zeros(1, dtype=torch.int32, device=acc.place)  # ready word of weights that never arrive
    made = _work_orders(bench, rounds, arrived.data_ptr())
    on_device = torch.from_numpy(made).to(acc.place)
    projections = cuda_launch.Projections(columns, (_SHAPE.hidden,) * 3)
    acc.settle()
    started_s = time.monotonic()
    for index in range(rounds):
        order, outcome = on_device[index].data_ptr(), outcomes.data_ptr() + 4 * index
        rows = cuda_launch.ActivationRows(x[index].data_ptr(), _SHAPE.hidden, _SHAPE.hidden)
        state = request.data_ptr(), counted.data_ptr(), outcome
        acc.launch(cuda_launch.publish(2, order, rows, _SHAPE.hidden, *state))
        if by_stream:
            generation = bench.rounds_done + index + 1
            acc.device.driver.wait_value(acc.stream, bench.on_device(bench.words[32:]), generation)
        acc.launch(cuda_launch.wait(order, outcome, errors.data_ptr()))
        target = cuda_launch.ActivationRows(y[index].data_ptr(), width, width)
        acc.launch(cuda_launch.add(2, order, outcome, target, projections, width, columns))
    acc.settle()
    spent_s = time.monotonic() - started_s
    bench.rounds_done += rounds
    if int(errors[0]) or not bool((outcomes == _BY_WORKERS).all()):
        late = int((outcomes != _BY_WORKERS).sum())
        raise WrongResult(f"{late} of {rounds} hand-offs were not answered by the worker")
    check_close("what workers computed", y, expected, 2 * TOLERANCE[acc.dtype])
    return spent_s / rounds


def _work_orders(bench: HandshakeBench, rounds: int, arrived: int) -> NDArray[np.int64]:
    """Returns [rounds, words]: one work order, with the numbers of each round."""
    spans = {span.site: span for span in bench.adapter.spec.spans}
    image = bench.region.offset(int(bench.adapter.data.ctypes.data))
    entries = np.zeros((1, len(_QKV)), LORA_ENTRY)
    for site in range(len(_QKV)):
        a, b = image + spans[site].a_offset, image + spans[site].b_offset
        entries[0, site] = a, b, _RANK, bench.adapter.spec.dtype.value, 0, spans[site].scale
    modules, offset_of = work_orders.HostModules(entries, (_SHAPE.hidden,) * len(_QKV)), bench.region.offset
    deltas = offset_of(int(bench.deltas.ctypes.data))
    task = work_orders.WorkerTask(0, bench.on_device(bench.blocks), 0, _ROWS, deltas)
    x, wide_x = (offset_of(int(array.ctypes.data)) for array in (bench.host_x, bench.wide_x))
    region = work_orders.SharedInput(bench.base, x, _SHAPE.hidden, _SHAPE.hidden, bench.acc.dtype, wide_x)
    flags = [bench.on_device(bench.words[at:]) for at in (0, 16, 32)]
    ready, x_flag, y_flag = (np.array([address]) for address in (arrived, *flags[1:]))
    terms = work_orders.SyncAddresses(_PATIENCE_NS, ready, 1, flags[0], _GENERATION, x_flag, y_flag)
    words = work_orders.work_order_bytes(1) // 8
    (order,) = work_orders.work_orders([task], np.array([[_NUMBER]]), modules, region, terms, words)
    made = np.tile(order, (rounds, 1))
    numbers = bench.rounds_done + 1 + np.arange(rounds)
    for placeholder in (_NUMBER, _GENERATION):
        made[:, order == placeholder] = numbers[:, None]
    return made


def _product(bench: HandshakeBench) -> torch.Tensor:
    """Returns A B of the three projections side by side, [inputs, outputs], float64."""
    parts, data = [], bench.adapter.data
    for span in bench.adapter.spec.spans:
        size = 2 * _RANK * _SHAPE.hidden
        a = data[span.a_offset : span.a_offset + size].view(np.float16).reshape(_RANK, _SHAPE.hidden)
        b = data[span.b_offset : span.b_offset + size].view(np.float16).reshape(-1, _RANK, PANEL)
        wide = np.concatenate(list(b), axis=1)
        parts.append(span.scale * a.astype(np.float64).T @ wide.astype(np.float64))
    return torch.from_numpy(np.concatenate(parts, axis=1))
