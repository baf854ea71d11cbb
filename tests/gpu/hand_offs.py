"""Hand-offs between a device and CPU LoRA workers: emulated kernels in this process, real worker processes."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import A_COLUMNS, PANEL
from caraserve.cpu import handoff
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.cpu.shared_memory import SharedRegion
from caraserve.cpu.structs import LORA_ENTRY
from caraserve.cpu.weight_memory import convert
from caraserve.gpu.kernels import cuda_launch, work_orders
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.linear_plan import accumulated
from caraserve.util.units import align_up
from tests.gpu.emulator import run
from tests.gpu.lora_case import address, stored

BY_DEVICE, BY_WORKERS, AWAITED, LOST = range(4)  # enum Outcome
PATIENCE_NS = 60_000_000_000
INPUTS, TOKENS = 92, 60  # a row of x is not a whole number of vectors; more tokens than one slice of a worker
BLOCK_BYTES = handoff.block_bytes(4)
WIDTHS = 140, 64, 100
UNEVEN_WIDTHS = 140, 64, 3, 33, 70, 5
ARRIVED = 7  # value of the layer's ready word once its weights have arrived

Matrix = NDArray[np.float64]


@dataclass(slots=True)
class Words:
    """Host memory shared by device and watchdog: u32 words, each on its own cache line."""

    status: NDArray[np.uint32]
    x_flag: NDArray[np.uint32]
    left: NDArray[np.uint32]  # beside x_flag
    y_flag: NDArray[np.uint32]


def comes_true(condition: Callable[[], bool], seconds: float = PATIENCE_NS / 1e9) -> bool:
    """Polls until a condition on shared memory holds. Returns False if it does not in time."""
    ends_s = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < ends_s:
        time.sleep(0.001)
    return holds


class HandOff:
    """Repeats one layer's hand-off of a prompt, each time with other data. `y` is the output of the base model, where
    the projections have these widths; the second one is not adapted."""

    def __init__(self, workers: int, widths: tuple[int, ...] = WIDTHS) -> None:
        self.activation, self.widths = Dtype.F32, widths
        self.region = SharedRegion(1 << 21)
        blocks = self.region.carve(workers * BLOCK_BYTES)
        self.blocks = blocks.reshape(workers, -1).view(np.int64)
        cores = sorted(os.sched_getaffinity(0))
        self.workers = WorkerPool(self.region, blocks, (cores[0], cores[-1])[:workers], BLOCK_BYTES)
        lines = self.region.carve(192).view(np.uint32)
        self.words = Words(*(lines[at : at + 1] for at in (0, 16, 18, 32)))
        self.arrived = np.zeros(1, np.uint32)
        self.asked, self.counter, self.outcome = (
            np.zeros(workers, np.int64),
            np.zeros(1, np.uint32),
            np.zeros(1, np.int32),
        )
        self.errors = np.zeros(1, np.uint32)
        self.number, self.generation = 0, 0
        self.x_stride = align_up(INPUTS, A_COLUMNS)
        self.host_x, self.wide_x = (self.region.carve(4 * TOKENS * self.x_stride) for _ in range(2))
        self.vectors: list[NDArray[np.float32]] = []  # [2, outputs] of each projection; some have them
        self.modules, self.products = self._adapter()
        self.delta_columns, self.delta_stride = work_orders.delta_columns(widths)
        self.deltas = [self.region.carve(4 * TOKENS * self.delta_stride) for _ in range(workers)]
        self.y_columns = tuple(accumulated(widths))[:-1]
        self.order = np.zeros(work_orders.work_order_bytes(workers) // 8, np.int64)
        self.workers.start()
        assert self.workers.await_all(PATIENCE_NS / 1e9)
        self.workers.keep_awake(True)

    def _adapter(self) -> tuple[work_orders.HostModules, list[Matrix]]:
        rng, entries, products = np.random.default_rng(0), np.zeros((1, len(self.widths)), LORA_ENTRY), []
        for index, outputs in enumerate(self.widths):
            rank, scale = (24, 0, 8, 24, 16, 8)[index], 0.5 + index / 2
            a, b = np.zeros((rank, self.x_stride)), np.zeros((rank, align_up(outputs, PANEL)))
            a[:, :INPUTS], b[:, :outputs] = rng.standard_normal((rank, INPUTS)), rng.standard_normal((rank, outputs))
            a_data, a = stored(a / 10, Dtype.BF16)
            b_data, b = stored(b.reshape(rank, b.shape[1] // PANEL, PANEL).swapaxes(0, 1) / 10, Dtype.BF16)
            places = []
            for data in (a_data, b_data):
                room = self.region.carve(max(data.nbytes, 1))
                room[: data.nbytes] = data
                places.append(self.region.offset(address(room)))
            vectors = self.region.carve(8 * align_up(outputs, PANEL)).view(np.float32).reshape(2, -1)
            vectors[:] = rng.uniform(-1, 1, vectors.shape) if index % 3 == 2 else [[1.0], [0.0]]
            has_vectors = self.region.offset(address(vectors)) if index % 3 == 2 else 0
            self.vectors.append(vectors[:, :outputs])
            entries[0, index] = (*places, rank, Dtype.BF16.value, has_vectors, scale)
            products.append(scale * a.T[:INPUTS] @ np.concatenate(list(b), axis=1)[:, :outputs])
        return work_orders.HostModules(entries, self.widths), products

    def begin(self, seed: int = 0, deadline_ns: int = PATIENCE_NS, *, rings: bool = True, asks: bool = True) -> None:
        """Makes new x and y and the next work order, which is not published yet. `rings`: uses x_flag and y_flag;
        `asks`: names the workers."""
        rng = np.random.default_rng(seed)
        self.number += 1
        self.generation = (self.generation + 1) % (1 << 32)
        self.words.status[0] = (self.generation - 1) % (1 << 32)
        step, shape = self.activation.storage, (TOKENS, align_up(sum(self.widths), A_COLUMNS))
        self.x = convert(rng.standard_normal((TOKENS, self.x_stride)).astype(np.float32), Dtype.F32, self.activation)
        self.x[:, INPUTS:] = np.frombuffer(b"\xff" * step.itemsize, step)[0]  # NaN
        self.y = convert(rng.standard_normal(shape).astype(np.float32), Dtype.F32, self.activation)
        self.before = self.y.copy()
        slices = work_orders.split_rows(TOKENS, -(-TOKENS // len(self.workers)), len(self.workers))
        tasks = [
            work_orders.WorkerTask(worker, address(self.blocks[worker]), *place, self.region.offset(address(deltas)))
            for worker, (place, deltas) in enumerate(zip(slices, self.deltas, strict=True))
        ]
        region = work_orders.SharedInput(
            self.region.base,
            self.region.offset(address(self.host_x)),
            self.x_stride,
            INPUTS,
            self.activation,
            self.region.offset(address(self.wide_x)),
        )
        ready, x_flag, y_flag = (
            np.array([address(word)]) for word in (self.arrived, self.words.x_flag, self.words.y_flag)
        )
        terms = work_orders.SyncAddresses(
            deadline_ns, ready, ARRIVED, address(self.words.status), self.generation, x_flag * rings, y_flag * rings
        )
        words, numbers = len(self.order), np.full((1, len(tasks)), self.number)
        if asks:
            (self.order[:],) = work_orders.work_orders(tasks, numbers, self.modules, region, terms, words)
        else:
            (self.order[:],) = work_orders.orders_without_workers(terms, words)

    def publish(self, grid: int = 3, seed: int = 0) -> int:
        x = cuda_launch.ActivationRows(address(self.x), self.x_stride, INPUTS)
        state = (address(self.asked), address(self.counter), address(self.outcome))
        launch = cuda_launch.publish(grid, address(self.order), x, self.x_stride, *state)
        run(launch, self.activation, seed)
        return int(self.outcome[0])

    def wait(self) -> int:
        run(cuda_launch.wait(address(self.order), address(self.outcome), address(self.errors)), self.activation)
        return int(self.outcome[0])

    def add(self, grid: int = 2) -> None:
        y = cuda_launch.ActivationRows(address(self.y), self.y.shape[1], sum(self.widths))
        places = cuda_launch.Projections(self.y_columns, self.widths)
        order, outcome = address(self.order), address(self.outcome)
        run(cuda_launch.add(grid, order, outcome, y, places, self.delta_stride, self.delta_columns), self.activation)

    def expected(self) -> Matrix:
        """Returns y with the LoRA of the present x, in fp64."""
        y, x = self.exact(self.before), self.exact(self.x[:, :INPUTS])
        modules = zip(self.y_columns, self.widths, self.products, self.vectors, self.modules.entries[0], strict=True)
        for column, outputs, product, (factor, bias), entry in modules:
            if entry["rank"]:
                y[:, column : column + outputs] = (y[:, column : column + outputs] + x @ product) * factor + bias
        return y

    def exact(self, values: NDArray[np.generic]) -> Matrix:
        return to_float32(np.ascontiguousarray(values), self.activation).astype(np.float64)

    def word(self, worker: int, at: int) -> int:
        return int(self.blocks[worker, at // 8])

    def pid(self, worker: int = 0) -> int:
        pid = self.workers.states()[worker].pid
        assert pid is not None
        return pid

    def await_all(self) -> None:
        """Waits until every worker runs and has finished its hand-offs."""
        assert self.workers.await_all(PATIENCE_NS / 1e9)
        assert comes_true(lambda: not any(state.is_busy for state in self.workers.states()))

    def close(self) -> None:
        self.workers.close()
        self.region.close()
