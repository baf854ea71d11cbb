"""What calibration times on a backend: iterations over synthetic requests, copies of random adapters.

Used by `measure.py.py` alone.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from caraserve.core.backend import Backend
from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import A_COLUMNS, PANEL, AdapterSpec, HostAdapter, lay_out
from caraserve.errors import BackendFailed, ConfigError
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec
from caraserve.util.units import align_up, ceil_div

_T = TypeVar("_T")
_PATIENCE_S = 300.0  # for one iteration or copy; longer means that the device hangs
_NOISE = 0.02  # of adapter weights: what they add to activations stays small


@dataclass(frozen=True, slots=True)
class Measurement:
    """One point: how to time it, and the times so far.

    `tokens` of a sample: points of one `kind` with more tokens take longer, at most by as much. `is_needed`: a profile
    cannot do without it.
    """

    sample: Callable[[], list[float]]  # ms
    kind: str = ""
    tokens: int = 0
    is_needed: bool = True
    times_ms: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return median(self.times_ms)


class MeasuredBackend:
    """A backend asked for one thing after another by a thread that waits for each."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.limits = backend.limits
        self.host_memory = backend.host_memory

    def run(self, *plans: Batch) -> list[float]:
        """Runs plans back to back, as a busy server does; the time of each iteration in ms."""
        results: SimpleQueue[StepResult | Exception] = SimpleQueue()
        for plan in plans:
            self._backend.launch(plan, results.put)
        times_ms = []
        for _ in plans:
            result = _wait(results)
            if isinstance(result, Exception):
                raise BackendFailed(f"an iteration failed: {result}")
            times_ms.append(1000 * (result.done_s - result.started_s))
        return times_ms

    def load(self, adapter: HostAdapter, slot: int) -> float:
        """Copies an adapter to a slot; the time until it was there in ms."""
        results: SimpleQueue[tuple[Exception | None, float]] = SimpleQueue()
        started_s = time.perf_counter()
        self._backend.load_adapter(adapter, slot, lambda error: results.put((error, time.perf_counter())))
        error, done_s = _wait(results)
        if error is not None:
            raise BackendFailed(f"an adapter could not be copied: {error}")
        return 1000 * (done_s - started_s)

    def unload(self, slot: int) -> None:
        """Gives a slot's memory back after what runs."""
        self._backend.unload_adapter(slot)


def _wait(results: "SimpleQueue[_T]") -> _T:
    try:
        return results.get(timeout=_PATIENCE_S)
    except Empty:
        raise BackendFailed(f"the device gave no answer within {_PATIENCE_S:.0f} s") from None


# --- synthetic adapters ---


def adapter_spec(model: ModelSpec, dtype: Dtype, rank: int, layers: int) -> AdapterSpec:
    """An adapter of all seven modules of the first `layers` layers."""
    modules = {(layer, site): (rank, 1.0) for layer in range(layers) for site in SITES}
    spans, layer_ends = lay_out(model, dtype, modules)
    digest = hashlib.sha256(f"synthetic {dtype.name} {rank} {layers}".encode()).hexdigest()
    return AdapterSpec(digest, dtype, rank, SITES, layer_ends, spans)


def random_adapter(model: ModelSpec, spec: AdapterSpec, memory: NDArray[np.uint8]) -> HostAdapter:
    """Fills the front of `memory` with random weights; padding is zero, as everywhere."""
    data = memory[: spec.num_bytes]
    data[:] = 0
    noise = _bits(np.random.default_rng(spec.rank).standard_normal(1 << 16, np.float32) * _NOISE, spec.dtype)
    for span in spec.spans:
        inputs, outputs = model.site_shape(SITES[span.site])
        a = _matrix(data, span.a_offset, (span.padded_rank, align_up(inputs, A_COLUMNS)), spec.dtype)
        a[: span.rank, :inputs] = np.resize(noise, (span.rank, inputs))
        b = _matrix(data, span.b_offset, (ceil_div(outputs, PANEL), span.padded_rank, PANEL), spec.dtype)
        b[:, : span.rank] = np.resize(noise, (len(b), span.rank, PANEL))
        b[-1, :, outputs - PANEL * (len(b) - 1) :] = 0
    return HostAdapter(spec, data)


def _matrix(data: NDArray[np.uint8], offset: int, shape: tuple[int, ...], dtype: Dtype) -> NDArray[np.generic]:
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return data[offset : offset + num_bytes].view(dtype.storage).reshape(shape)


def _bits(values: NDArray[np.float32], dtype: Dtype) -> NDArray[np.generic]:
    """The values as stored in `dtype`; bfloat16 by cutting."""
    if dtype is Dtype.F32:
        return values
    if dtype is Dtype.F16:
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


# --- synthetic requests ---


class SyntheticRequests:
    """Requests in the backend's slots. They share KV blocks at will: what lies in a block does not change any time."""

    def __init__(
        self,
        device: MeasuredBackend,
        vocab_size: int,
        *,
        context_tokens: int,
        most: int,
        contexts: int,
        most_token_ms: float,
    ) -> None:
        """`contexts`: how many of the requests' contexts are computed; the others share them. Raises ConfigError where
        one token alone takes longer than `most_token_ms`."""
        limits = device.limits
        self._device, self._vocab, self._block = device, vocab_size, limits.block_tokens
        self.longest = min(limits.max_step_tokens, limits.max_context - 1, limits.num_blocks * self._block)  # prompt
        self._context = max(1, min(context_tokens, self.longest - 1))
        self._blocks_each = ceil_div(self._context + 1, self._block)
        self.most = min(most, limits.num_slots, limits.max_step_tokens, limits.num_blocks // self._blocks_each)
        self._contexts = min(contexts, self.most)
        token_ms = min(self._probe([ScheduledRow(0, 0, 1, BASE_ADAPTER_SLOT, samples=True)], burst=2).sample())
        if token_ms > most_token_ms:
            raise ConfigError(f"one token takes {token_ms:.0f} ms, too long to measure more at a start")
        self._fill(limits.max_step_tokens // self._context)

    def prefill(self, tokens: int, adapter: int) -> Measurement:
        """A whole prompt with the adapter in a slot."""
        return replace(
            self._probe([ScheduledRow(0, 0, tokens, adapter, samples=True)], burst=1), kind="prefill", tokens=tokens
        )

    def decode(self, adapters: Sequence[int], burst: int) -> Measurement:
        """One token for each of as many requests as adapter slots are given; `burst` times in a row."""
        rows = [
            ScheduledRow(slot, self._context, 1, adapter, samples=True) for slot, adapter in enumerate(sorted(adapters))
        ]
        return replace(self._probe(rows, burst), kind="decode", tokens=burst * len(rows) + 1)

    def _probe(self, rows: Sequence[ScheduledRow], burst: int) -> Measurement:
        """`burst` iterations after one that wakes the device's threads and brings the requests to their slots."""
        plan = Batch((), (), tuple(rows))
        first = self._started(
            {row.slot: row.start + row.count for row in rows}, [ScheduledRow(0, 0, 1, 0, samples=False)]
        )
        return Measurement(lambda: self._device.run(first, *[plan] * burst)[1:])

    def _fill(self, at_once: int) -> None:
        """Computes the contexts, so that the KV cache's memory is there."""
        for first in range(0, self._contexts, at_once):
            group = range(first, min(first + at_once, self._contexts))
            rows = [ScheduledRow(slot, 0, self._context, BASE_ADAPTER_SLOT, samples=False) for slot in group]
            self._device.run(self._started(dict.fromkeys(group, self._context), rows))

    def _started(self, tokens_by_slot: Mapping[int, int], rows: Sequence[ScheduledRow]) -> Batch:
        """A plan that begins with new requests of so many tokens."""
        starts, grants = [], []
        for slot, tokens in tokens_by_slot.items():
            ids = tuple((17 * index + 31 * slot) % self._vocab for index in range(tokens))
            starts.append(SlotStart(slot, ids, SlotSampling.greedy(tokens)))
            first = slot % self._contexts * self._blocks_each
            grants.append(BlockGrant(slot, 0, tuple(range(first, first + ceil_div(tokens, self._block)))))
        return Batch(tuple(starts), tuple(grants), tuple(rows))
