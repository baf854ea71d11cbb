"""CPU LoRA workers as processes: cores and names, results, replacement, and that none outlives the pool."""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.core.lora_layout import A_COLUMNS, PANEL, AdapterSpec, HostAdapter, lay_out
from caraserve.cpu.backend import CpuBackend, CpuSizes
from caraserve.cpu.lora_workers import pool
from caraserve.cpu.lora_workers.compute_side import PIECE_WORDS
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.cpu.shared_memory import SharedRegion
from caraserve.cpu.weight_memory import convert
from caraserve.cpu.weights import dummy_reader, load_model
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.families import plan_of
from caraserve.profiling.microbench import MeasuredBackend
from caraserve.util.units import align_up
from tests.processes import until

SPEC = plan_of(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 80,
        "intermediate_size": 144,
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    }
)
SCALES = 0.5, 2.0, 1.25  # of q, k and v
LINEARS = SPEC.layers[0].linears[:3]
WIDTHS = [align_up(linear.outputs, PANEL) for linear in LINEARS]  # columns of the modules' deltas, in order
SLOT = 1
TOKENS = 90  # of a prompt: more than a worker computes at once, whole or cut in two
USABLE_CORES = sorted(os.sched_getaffinity(0))
PATIENCE_S = 120.0  # timeout for a worker to start; the first time, kernels are compiled
BLOCK_BYTES = 1 << 16
NAN = 0xFF  # NaN in every dtype, if every byte has this value

Matrix = NDArray[np.float64]


def cores(workers: int) -> tuple[int, ...]:
    """Returns as many cores as workers: the first and the last core of this process."""
    return (USABLE_CORES[0], USABLE_CORES[-1])[:workers]


@contextlib.contextmanager
def serving(workers: int) -> Iterator[CpuBackend]:
    """Yields a backend whose workers all run; with two, prompts are cut into two slices."""
    loaded = load_model(SPEC, Dtype.F32, 256, dummy_reader(0, Dtype.F32), lambda: None)
    sizes = CpuSizes(
        threads=1,
        num_slots=2,
        adapter_slots=2,
        max_step_tokens=TOKENS,
        max_context=256,
        kv_cache_bytes=1 << 20,
        host_bytes=1 << 20,
        lora_cpus=cores(workers),
    )
    backend = CpuBackend(SPEC, loaded, sizes)
    try:
        backend.warm_up()
        backend.start_workers(lambda rank: TOKENS // 2)
        assert backend.workers.await_all(PATIENCE_S)
        yield backend
    finally:
        backend.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[CpuBackend]:
    with serving(1) as backend:
        yield backend


@pytest.fixture(scope="module")
def pair() -> Iterator[CpuBackend]:
    """Yields a backend with two workers that have computed something: earlier they may lack their name and core."""
    with serving(2) as backend:
        hand_off(backend, make_adapter(8, Dtype.F32, backend)[0])
        yield backend


def pids(workers: WorkerPool) -> list[int]:
    return [state.pid for state in workers.states() if state.pid is not None]


def of_process(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8").strip()


def stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third on, the state; the name before may contain any character."""
    return of_process(pid, "stat").rpartition(")")[2].split()


def fork_server_of(workers: WorkerPool) -> int:
    return int(stat(pids(workers)[0])[1])


def is_alive(pid: int) -> bool:
    try:
        return stat(pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def next_life(workers: WorkerPool, place: int, before: int) -> int:
    """Waits for the worker that replaces `before` at a place, and returns its pid."""
    with workers.changed:
        workers.changed.wait_for(lambda: workers.states()[place].pid not in (None, before), PATIENCE_S)
    pid = workers.states()[place].pid
    assert pid is not None
    assert pid != before, "the worker was not replaced"
    return pid


# --- processes ---


def test_a_worker_stays_on_its_core(pair: CpuBackend) -> None:
    assert [os.sched_getaffinity(pid) for pid in pids(pair.workers)] == [{core} for core in cores(2)]


def test_a_worker_process_has_a_name_of_its_own(pair: CpuBackend) -> None:
    assert [of_process(pid, "comm") for pid in pids(pair.workers)] == ["caraserve-lora0", "caraserve-lora1"]
    assert of_process(fork_server_of(pair.workers), "comm") == "caraserve-fork"


def test_no_worker_has_loaded_torch(pair: CpuBackend) -> None:
    for pid in (fork_server_of(pair.workers), *pids(pair.workers)):
        maps = of_process(pid, "maps")
        assert "numba" in maps
        assert "torch" not in maps


def test_a_worker_is_one_thread(pair: CpuBackend) -> None:
    for pid in (fork_server_of(pair.workers), *pids(pair.workers)):
        assert os.listdir(f"/proc/{pid}/task") == [str(pid)]


def test_memory_is_shared_without_a_name_in_the_file_system(pair: CpuBackend) -> None:
    for pid in pids(pair.workers):
        maps = of_process(pid, "maps")
        assert "/memfd:caraserve" in maps
        assert "/dev/shm" not in maps


def ticks(processes: Sequence[int]) -> int:
    """Returns the CPU time used so far, user and system."""
    return sum(int(field) for pid in processes for field in stat(pid)[11:13])


def test_idle_workers_use_no_cpu(pair: CpuBackend) -> None:
    """Nor does the fork server; also after the workers have computed something."""
    hand_off(pair, make_adapter(8, Dtype.F32, pair)[0])
    until(lambda: all(state.is_asleep for state in pair.workers.states()), 5.0)  # on a busy machine, not at once
    idle = [fork_server_of(pair.workers), *pids(pair.workers)]
    with pair.workers.changed:
        before = ticks(idle)
        assert not pair.workers.changed.wait(0.5), "a worker was born or has died"
        assert ticks(idle) - before <= 1


# --- results ---


def make_adapter(rank: int, dtype: Dtype, backend: CpuBackend) -> tuple[HostAdapter, list[Matrix]]:
    """Returns an adapter of q, k, v in the host cache, and for each module the factor of x, [inputs, columns of y]."""
    rng = np.random.default_rng(rank)
    spans, layer_ends = lay_out(SPEC, dtype, {(0, index): (rank, scale) for index, scale in enumerate(SCALES)})
    data = backend.host_memory[: layer_ends[-1]]
    data[:] = 0
    products = []
    for span in spans:
        inputs, outputs = LINEARS[span.site].inputs, LINEARS[span.site].outputs
        a, b = np.zeros((rank, align_up(inputs, A_COLUMNS))), np.zeros((rank, align_up(outputs, PANEL)))
        a[:, :inputs], b[:, :outputs] = rng.standard_normal((rank, inputs)), rng.standard_normal((rank, outputs))
        a = store(a / rank, dtype, data[span.a_offset :])
        b = store(b.reshape(rank, -1, PANEL).swapaxes(0, 1), dtype, data[span.b_offset :])
        products.append(span.scale * a[:, :inputs].T @ b.swapaxes(0, 1).reshape(rank, -1))
    return HostAdapter(AdapterSpec(f"{rank} {dtype}", dtype, rank, SPEC.targets[:3], layer_ends, spans), data), products


def store(values: Matrix, dtype: Dtype, at: NDArray[np.uint8]) -> Matrix:
    """Writes values in the stored dtype; returns the exact values that the stored ones represent."""
    raw = np.ascontiguousarray(convert(np.ascontiguousarray(values, np.float32), Dtype.F32, dtype))
    at[: raw.nbytes] = raw.reshape(-1).view(np.uint8)
    return to_float32(raw, dtype).astype(np.float64)


def floats_at(address: int, rows: int, width: int) -> NDArray[np.float32]:
    return np.ctypeslib.as_array((ctypes.c_float * (rows * width)).from_address(address)).reshape(rows, width)


def words_at(address: int, rows: int, width: int) -> NDArray[np.int64]:
    return np.ctypeslib.as_array((ctypes.c_int64 * (rows * width)).from_address(address)).reshape(rows, width)


def inputs_of(backend: CpuBackend) -> NDArray[np.float32]:
    """Returns the first input of a layer, [tokens, inputs], which workers read in place."""
    address, width = int(backend._buffers.record["normed"][0]), align_up(SPEC.hidden, PANEL)
    return floats_at(address, TOKENS, width)[:, : SPEC.hidden]


def hand_off(backend: CpuBackend, adapter: HostAdapter) -> NDArray[np.float32]:
    """Returns the workers' deltas of a prompt, [tokens, columns of q, k, v]; each worker computes a slice.

    Repeats the hand-off if it was abandoned because a worker did not get its core in time.
    """
    MeasuredBackend(backend).load(adapter, SLOT)
    inputs_of(backend)[:] = np.random.default_rng(0).standard_normal((TOKENS, SPEC.hidden))
    lora, deltas = backend._lora, np.full((TOKENS, sum(WIDTHS)), np.nan, np.float32)
    for _ in range(100):
        backend._buffers._deltas[:] = NAN
        done = backend.time_hand_off(SLOT, TOKENS) is not None
        count = int(words_at(int(lora["segment_slices"][0]), 1, 2)[0, 1])
        slices = words_at(int(lora["slices"][0]), count, PIECE_WORDS)
        if done and {int(worker) for worker in slices[:, 0]} == set(range(len(backend.workers))):
            for _, _, _, first, rows, address in slices.tolist():
                deltas[first : first + rows] = floats_at(address, rows, sum(WIDTHS))
            return deltas
        with backend.workers.changed:
            backend.workers.changed.wait(0.05)
    raise AssertionError("some worker never did what it was asked for")


@pytest.mark.parametrize("workers", ["alone", "pair"])
@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("rank", [8, 24, 64])
def test_deltas_are_scale_times_x_times_a_times_b(
    request: pytest.FixtureRequest, workers: str, dtype: Dtype, rank: int
) -> None:
    backend: CpuBackend = request.getfixturevalue(workers)
    adapter, products = make_adapter(rank, dtype, backend)
    deltas = hand_off(backend, adapter)
    x = inputs_of(backend).astype(np.float64)
    np.testing.assert_allclose(deltas, np.concatenate([x @ product for product in products], axis=1), atol=1e-5)


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("rank", [8, 24, 64])
def test_a_prompt_cut_into_slices_has_the_same_bits(
    alone: CpuBackend, pair: CpuBackend, dtype: Dtype, rank: int
) -> None:
    whole, cut = (hand_off(backend, make_adapter(rank, dtype, backend)[0]) for backend in (alone, pair))
    assert whole.tobytes() == cut.tobytes()


# --- replacement and end ---


def test_a_killed_worker_is_replaced() -> None:
    with serving(2) as backend:
        adapter, _ = make_adapter(24, Dtype.F32, backend)
        before = hand_off(backend, adapter)
        killed = pids(backend.workers)[1]
        os.kill(killed, signal.SIGKILL)
        next_life(backend.workers, 1, killed)
        assert hand_off(backend, adapter).tobytes() == before.tobytes()
        reborn = pids(backend.workers)[1]
        assert (of_process(reborn, "comm"), os.sched_getaffinity(reborn)) == ("caraserve-lora1", {cores(2)[1]})


def test_a_worker_that_stops_in_a_hand_off_is_replaced() -> None:
    with serving(1) as backend:
        adapter, _ = make_adapter(24, Dtype.F32, backend)
        before = hand_off(backend, adapter)
        stopped = pids(backend.workers)[0]
        os.kill(stopped, signal.SIGSTOP)
        assert backend.time_hand_off(SLOT, TOKENS) is None
        backend.workers.watch(True)
        next_life(backend.workers, 0, stopped)
        assert hand_off(backend, adapter).tobytes() == before.tobytes()


def test_a_worker_that_waits_for_a_core_in_a_hand_off_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: Queue[None] = Queue()

    def runnable(pid: int | None) -> bool:
        checked.put(None)
        return True

    monkeypatch.setattr(pool, "_is_runnable", runnable)
    with serving(1) as backend:
        adapter, _ = make_adapter(24, Dtype.F32, backend)
        before = hand_off(backend, adapter)
        waiting = pids(backend.workers)[0]
        os.kill(waiting, signal.SIGSTOP)
        assert backend.time_hand_off(SLOT, TOKENS) is None
        backend.workers.watch(True)
        checked.get(timeout=PATIENCE_S)
        checked.get(timeout=PATIENCE_S)  # checked again: the first check has killed nothing
        os.kill(waiting, signal.SIGCONT)
        assert hand_off(backend, adapter).tobytes() == before.tobytes()
        assert pids(backend.workers) == [waiting]


def test_a_stopped_process_cannot_run() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert not pool._is_runnable(process.pid)
            assert pool._is_runnable(os.getpid())
        finally:
            process.kill()


def test_a_killed_fork_server_is_replaced_with_its_workers() -> None:
    with serving(2) as backend:
        adapter, _ = make_adapter(24, Dtype.F32, backend)
        before, fork_server, workers = (
            hand_off(backend, adapter),
            fork_server_of(backend.workers),
            pids(backend.workers),
        )
        os.kill(fork_server, signal.SIGKILL)
        for place, pid in enumerate(workers):
            next_life(backend.workers, place, pid)
        assert not any(is_alive(pid) for pid in (fork_server, *workers))
        assert hand_off(backend, adapter).tobytes() == before.tobytes()


def test_workers_share_cores_with_iterations_unless_there_is_a_core_for_each(
    monkeypatch: pytest.MonkeyPatch, alone: CpuBackend
) -> None:
    assert alone.shares_cores == (len(USABLE_CORES) < 2), "one thread and one worker"
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: {USABLE_CORES[0]})
        with serving(1) as backend:
            assert backend.shares_cores


def test_a_worker_that_keeps_dying_is_replaced_at_growing_intervals() -> None:
    with serving(1) as backend:
        waits_s = []
        for _ in range(5):
            pid, killed_s = pids(backend.workers)[0], time.monotonic()
            os.kill(pid, signal.SIGKILL)
            next_life(backend.workers, 0, pid)
            waits_s.append(time.monotonic() - killed_s)
        assert waits_s[3] >= 0.1
        assert waits_s[4] >= 1.0


@pytest.mark.parametrize("number", [None, signal.SIGSTOP], ids=["idle", "stopped"])
def test_close_leaves_no_process(number: signal.Signals | None) -> None:
    with serving(2) as backend:
        left = [fork_server_of(backend.workers), *pids(backend.workers)]
        if number is not None:
            os.kill(left[1], number)
    assert not any(is_alive(pid) for pid in left)


def test_deaths_and_close_leave_no_open_descriptor() -> None:
    region = SharedRegion(BLOCK_BYTES)
    try:
        gc.collect()  # unmaps the regions of earlier tests
        before = sorted(os.listdir("/proc/self/fd"))
        workers = WorkerPool(region, region.carve(BLOCK_BYTES), cores(1), BLOCK_BYTES)
        workers.start()
        try:
            assert workers.await_all(PATIENCE_S)
            for dies_of_itself in (True, False):
                pid = pids(workers)[0]
                os.kill(pid if dies_of_itself else fork_server_of(workers), signal.SIGKILL)
                next_life(workers, 0, pid)
        finally:
            workers.close()
        assert sorted(os.listdir("/proc/self/fd")) == before
    finally:
        region.close()
