"""Compares hand-offs of q, k and v to CPU LoRA workers with workers behind UNIX sockets and with torch's threads.

Toppings Fig. 12 (right) and Fig. 17 (right).
"""

import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from statistics import median

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.lora.kernels import QKV, KernelCase, adapter_of, one_layer_plan, torch_layers
from caraserve.bench.lora.process import deaf_to_interrupts, pin, pinned_process
from caraserve.cpu.backend import CpuBackend, CpuSizes
from caraserve.cpu.lora_workers.timing import RoundTrip
from caraserve.cpu.weights import dummy_reader, load_model
from caraserve.errors import BackendFailed
from caraserve.model.dtype import Dtype
from caraserve.profiling.microbench import MeasuredBackend, adapter_spec, random_adapter
from caraserve.util.units import ceil_div

_BIRTH_S = 30.0
_MOST_TOKENS = 256
_SOCKET_BUFFER_BYTES = 4 << 20
_HOST_BYTES = 64 << 20
_DONE = b"\0"


@dataclass(frozen=True, slots=True)
class RoundTripPoint:
    """Times of hand-offs of a prompt to `workers` workers."""

    transport: str  # "shared memory" or "UNIX socket"
    workers: int
    tokens: int
    total_us: float  # median
    beyond_us: float  # median of total time minus the slowest worker's compute time
    beyond_p99_us: float  # 99th percentile of the same difference


@dataclass(frozen=True, slots=True)
class ThreadsPoint:
    """Median times of q, k and v of one layer for a prompt, with workers and torch on the same cores."""

    cores: int
    rank: int
    workers_ms: float
    torch_ms: float

    @property
    def ratio(self) -> float:
        """torch's time ÷ the workers'."""
        return self.torch_ms / self.workers_ms


# --- shared memory ---


class HandoffBench:
    """A backend of one layer whose only work is hand-offs, with one adapter for each dtype and rank given."""

    def __init__(self, hidden: int, adapters: Sequence[tuple[Dtype, int]], cores: Sequence[int]) -> None:
        self._plan = one_layer_plan(hidden)
        loaded = load_model(self._plan, Dtype.F16, _MOST_TOKENS, dummy_reader(0, Dtype.F16), lambda: None)
        sizes = CpuSizes(
            threads=1,
            num_slots=1,
            adapter_slots=len(adapters) + 1,
            max_step_tokens=_MOST_TOKENS,
            max_context=_MOST_TOKENS,
            kv_cache_bytes=self._plan.kv_bytes_per_token(4) * _MOST_TOKENS,
            host_bytes=_HOST_BYTES,
            lora_cpus=tuple(cores),
        )
        self._backend = CpuBackend(self._plan, loaded, sizes)
        self._slots = {adapter: slot for slot, adapter in enumerate(adapters, 1)}

    def __enter__(self) -> "HandoffBench":
        self._backend.warm_up()
        self._backend.start_workers(lambda rank: _MOST_TOKENS)
        if not self._backend.workers.await_all(_BIRTH_S):
            raise BackendFailed(f"the CPU LoRA workers did not appear within {_BIRTH_S:.0f} s")
        device, at = MeasuredBackend(self._backend), 0
        for (dtype, rank), slot in self._slots.items():
            spec = adapter_spec(self._plan, dtype, rank, 1, QKV)
            device.load(random_adapter(self._plan, spec, device.host_memory[at:]), slot)
            at += spec.num_bytes
        return self

    def __exit__(self, *error: object) -> None:
        self._backend.close()

    def exchange(self, dtype: Dtype, rank: int, tokens: int, workers: int) -> RoundTrip:
        """Times one hand-off of `tokens` tokens, split among `workers` workers."""
        self._backend.set_slices(lambda _: ceil_div(tokens, workers))
        while (timed := self._backend.time_hand_off(self._slots[dtype, rank], tokens)) is None:
            if not self._backend.workers.await_all(_BIRTH_S):
                raise BackendFailed("a CPU LoRA worker died and was not replaced")
        return timed


# --- UNIX socket ---


class SocketWorkers:
    """Processes that receive x through a UNIX socket and send the deltas back, as raw bytes without pickling."""

    def __init__(self, hidden: int, rank: int, tokens: int, cores: Sequence[int]) -> None:
        self._shares = [len(each) for each in np.array_split(np.arange(tokens), len(cores))]
        self._ends: list[socket.socket] = []
        self._processes: list[SpawnProcess] = []
        context = multiprocessing.get_context("spawn")
        for core, share in zip(cores, self._shares, strict=True):
            ours, theirs = socket.socketpair()
            for end in (ours, theirs):
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
            process = context.Process(target=_serve_socket, args=(theirs, hidden, rank, share, core), daemon=True)
            with deaf_to_interrupts():
                process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        self._x = np.zeros((tokens, hidden), np.float32)
        self._deltas = [np.zeros((len(QKV), share, hidden), np.float32) for share in self._shares]
        for end in self._ends:
            _receive(end, np.empty(1, np.uint8))  # sent when the worker's kernels are compiled

    def exchange(self) -> RoundTrip:
        """Times one round trip: x to all workers, the deltas of all workers back."""
        computed_s = np.empty(1)  # by a worker
        slowest_s, first = 0.0, 0
        started_s = time.perf_counter()
        for end, share in zip(self._ends, self._shares, strict=True):
            end.sendall(self._x[first : first + share].data.cast("B"))
            first += share
        for end, deltas in zip(self._ends, self._deltas, strict=True):
            _receive(end, computed_s)
            _receive(end, deltas)
            slowest_s = max(slowest_s, float(computed_s[0]))
        return RoundTrip(time.perf_counter() - started_s, slowest_s)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join()


def _serve_socket(end: socket.socket, hidden: int, rank: int, tokens: int, core: int) -> None:
    """Serves one socket worker until the other end closes the socket."""
    pin([core])
    from caraserve.profiling.cpu_lora_rate import LayerLora  # compiles kernels

    plan = one_layer_plan(hidden)
    lora = LayerLora(plan, adapter_of(plan, Dtype.F16, rank), QKV, tokens)
    lora.layer_ms(1)
    deltas = np.zeros((len(QKV), tokens, hidden), np.float32)
    end.sendall(_DONE)
    x = np.zeros((tokens, hidden), np.float32)
    try:
        while True:
            _receive(end, x)
            lora.x[:tokens, :hidden] = x
            computed_s = np.array([lora.layer_ms(1) / 1000])
            end.sendall(computed_s.data.cast("B"))
            end.sendall(deltas.data.cast("B"))
    except (EOFError, ConnectionError):
        return


def _receive(end: socket.socket, into: NDArray[np.generic]) -> None:
    """Fills an array. Raises EOFError when the other end has closed."""
    view = into.reshape(-1).view(np.uint8).data
    if end.recv_into(view, len(view), socket.MSG_WAITALL) < len(view):
        raise EOFError


# --- what is measured ---


def round_trips(
    bench: HandoffBench, hidden: int, rank: int, prompts: Sequence[int], cores: Sequence[int], repeats: int
) -> Iterator[RoundTripPoint]:
    """Yields points with one worker and with all, over shared memory and over sockets."""
    for workers in dict.fromkeys((1, len(cores))):
        for tokens in prompts:
            yield from timed_transports(bench, hidden, rank, tokens, cores[:workers], repeats)


def timed_transports(
    bench: HandoffBench, hidden: int, rank: int, tokens: int, cores: Sequence[int], repeats: int
) -> tuple[RoundTripPoint, RoundTripPoint]:
    """Times a prompt's hand-offs to a worker on each core, over shared memory and over sockets.

    Both transports alternate after each hand-off, so that changes of the machine's speed affect both alike.
    """
    sockets = SocketWorkers(hidden, rank, tokens, cores)
    try:
        shared, sent = [], []
        for _ in range(repeats):
            shared.append(bench.exchange(Dtype.F16, rank, tokens, len(cores)))
            sent.append(sockets.exchange())
    finally:
        sockets.close()
    shared_point = _point("shared memory", len(cores), tokens, shared)
    return shared_point, _point("UNIX socket", len(cores), tokens, sent)


def _point(transport: str, workers: int, tokens: int, exchanges: Sequence[RoundTrip]) -> RoundTripPoint:
    beyond_us = [1e6 * (each.total_s - each.compute_s) for each in exchanges]
    return RoundTripPoint(
        transport=transport,
        workers=workers,
        tokens=tokens,
        total_us=1e6 * median(each.total_s for each in exchanges),
        beyond_us=median(beyond_us),
        beyond_p99_us=float(np.percentile(beyond_us, 99)),
    )


def beside_threads(
    bench: HandoffBench,
    hidden: int,
    ranks: Sequence[int],
    cores: Sequence[int],
    repeats: int,
    tokens: int = _MOST_TOKENS,
) -> Iterator[ThreadsPoint]:
    """Yields times of a prompt in fp32, with one worker and with all, and with as many torch threads."""
    for count in dict.fromkeys((1, len(cores))):
        with pinned_process(cores[:count]) as pool:
            for rank in ranks:
                case = KernelCase(hidden, Dtype.F32, rank, tokens)
                ours_ms, torch_ms = [], []
                for _ in range(repeats):
                    ours_ms.append(1000 * bench.exchange(Dtype.F32, rank, tokens, count).total_s)
                    torch_ms.append(pool.submit(_torch_ms, case, count).result())
                yield ThreadsPoint(count, rank, median(ours_ms), median(torch_ms))


def _torch_ms(case: KernelCase, threads: int) -> float:
    compute = torch_layers(case, 1, threads)
    compute(0)
    started_s = time.perf_counter()
    compute(0)
    return 1000 * (time.perf_counter() - started_s)
