"""Timed operations on a backend: iterations over synthetic requests, copies of random adapters."""

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from caraserve.core.backend import Backend
from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import PANEL, AdapterSpec, HostAdapter, modules_of, stored_a, stored_b
from caraserve.core.machine_profile import Targets
from caraserve.errors import BackendFailed, ConfigError
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import ceil_div

_T = TypeVar("_T")
_TIMEOUT_S = 300.0  # of one iteration or copy, after which the device counts as hung
_NOISE = 0.02  # of adapter weights, so that they change activations little


@dataclass(frozen=True, slots=True)
class Measurement:
    """One point of a measurement: a function that times it, and the times so far.

    `tokens`: of a sample; the time of points of one `kind` grows at most in proportion. `is_needed`: the fits need it.
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
    """A backend whose operations the calling thread waits for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.limits = backend.limits
        self.host_memory = backend.host_memory

    def run(self, *batches: Batch) -> list[float]:
        """Runs batches back to back, as a busy server does. Returns the time of each iteration in ms."""
        results: SimpleQueue[StepResult | Exception] = SimpleQueue()
        for batch in batches:
            self._backend.launch(batch, results.put)
        times_ms = []
        for _ in batches:
            result = wait_for(results)
            if isinstance(result, Exception):
                raise BackendFailed(f"an iteration failed: {result}")
            times_ms.append(1000 * (result.done_s - result.started_s))
        return times_ms

    def load(self, adapter: HostAdapter, slot: int) -> float:
        """Copies an adapter to a slot. Returns the time until its arrival in ms."""
        results: SimpleQueue[tuple[Exception | None, float]] = SimpleQueue()
        started_s = time.perf_counter()
        self._backend.load_adapter(adapter, slot, lambda error: results.put((error, time.perf_counter())))
        error, done_s = wait_for(results)
        if error is not None:
            raise BackendFailed(f"an adapter could not be copied: {error}")
        return 1000 * (done_s - started_s)

    def unload(self, slot: int) -> None:
        """Unloads the adapter of a slot after the batches launched so far."""
        self._backend.unload_adapter(slot)


def wait_for(results: "SimpleQueue[_T]", timeout_s: float = _TIMEOUT_S) -> _T:
    """Returns the queue's next item. Raises BackendFailed when there is none in time."""
    try:
        return results.get(timeout=timeout_s)
    except Empty:
        raise BackendFailed(f"the device gave no answer within {timeout_s:.0f} s") from None


# --- synthetic adapters ---


def target_sets(plan: DecoderPlan) -> dict[Targets, tuple[str, ...]]:
    """Returns the names of the modules whose LoRA is timed together: those that read the attention's input, and all."""
    inputs = (linear.target for attention in plan.attentions for linear in attention.linears)
    return {"qkv": tuple(dict.fromkeys(inputs)), "all": plan.targets}


def adapter_spec(
    plan: DecoderPlan, dtype: Dtype, rank: int, layers: int, targets: Collection[str] | None = None
) -> AdapterSpec:
    """Returns the spec of an adapter of the modules of these names, None: of all, in the first `layers` layers."""
    targets = plan.targets if targets is None else tuple(targets)
    modules = dict.fromkeys(modules_of(plan, targets, layers), (rank, 1.0))
    digest = hashlib.sha256(f"synthetic {dtype.name} {rank} {layers} {targets}".encode()).hexdigest()
    return AdapterSpec.of(plan, dtype, modules, digest)


def random_adapter(plan: DecoderPlan, spec: AdapterSpec, memory: NDArray[np.uint8]) -> HostAdapter:
    """Writes an adapter of random weights, with zero padding, to the front of `memory`."""
    data = memory[: spec.num_bytes]
    data[:] = 0
    noise = _bits(np.random.default_rng(spec.rank).standard_normal(1 << 16, np.float32) * _NOISE, spec.dtype)
    for span in spec.spans:
        site = plan.layers[span.layer].sites[span.site]
        a = stored_a(data, span, site.inputs, spec.dtype)
        a[: span.rank, : site.inputs] = np.resize(noise, (span.rank, site.inputs))
        b = stored_b(data, span, site.outputs, spec.dtype)
        b[:, : span.rank] = np.resize(noise, (len(b), span.rank, PANEL))
        b[-1, :, site.outputs - PANEL * (len(b) - 1) :] = 0
    return HostAdapter(spec, data)


def _bits(values: NDArray[np.float32], dtype: Dtype) -> NDArray[np.generic]:
    """Converts values to stored bits of `dtype`; bfloat16 by truncation."""
    if dtype is Dtype.F32:
        return values
    if dtype is Dtype.F16:
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


# --- synthetic requests ---


class SyntheticRequests:
    """Synthetic requests in the backend's slots. They share KV blocks, whose contents do not affect times."""

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
        """`contexts`: how many of the requests' contexts are computed; the others share them. Raises ConfigError if one
        token alone takes longer than `most_token_ms`."""
        limits = device.limits
        self._device, self._vocab, self._block = device, vocab_size, limits.block_tokens
        self.longest = min(limits.max_step_tokens, limits.max_context - 1, limits.num_blocks * self._block)  # prompt
        self._context = max(1, min(context_tokens, self.longest - 1))
        self._blocks_each = ceil_div(self._context + 1, self._block)
        self.most = min(most, limits.num_slots, limits.max_step_tokens, limits.num_blocks // self._blocks_each)
        self._contexts = min(contexts, self.most)
        token_ms = min(self._measurement([ScheduledRow(0, 0, 1, BASE_ADAPTER_SLOT, samples=True)], burst=2).sample())
        if token_ms > most_token_ms:
            raise ConfigError(f"one token takes {token_ms:.0f} ms, too long to measure more at a start")
        self._compute_contexts(limits.max_step_tokens // self._context)

    def prefill(self, tokens: int, *adapters: int) -> Measurement:
        """Returns the measurement of one iteration over a whole prompt of `tokens` for each of `adapters` (slots)."""
        rows = [ScheduledRow(slot, 0, tokens, adapter, samples=True) for slot, adapter in enumerate(adapters)]
        return replace(self._measurement(rows, burst=1), kind="prefill", tokens=tokens * len(rows))

    def decode(self, adapters: Sequence[int], burst: int) -> Measurement:
        """Returns the measurement of one token for each of `adapters` (slots), `burst` times in a row."""
        rows = [
            ScheduledRow(slot, self._context, 1, adapter, samples=True) for slot, adapter in enumerate(sorted(adapters))
        ]
        return replace(self._measurement(rows, burst), kind="decode", tokens=burst * len(rows) + 1)

    def _measurement(self, rows: Sequence[ScheduledRow], burst: int) -> Measurement:
        """Returns the measurement of `burst` iterations after one that wakes the threads and starts the requests."""
        batch = Batch((), (), tuple(rows))
        first = self._starting_batch(
            {row.slot: row.start + row.count for row in rows}, [ScheduledRow(0, 0, 1, 0, samples=False)]
        )
        return Measurement(lambda: self._device.run(first, *[batch] * burst)[1:])

    def _compute_contexts(self, at_once: int) -> None:
        """Computes the contexts, which also makes the system allocate the KV cache's memory."""
        for first in range(0, self._contexts, at_once):
            group = range(first, min(first + at_once, self._contexts))
            rows = [ScheduledRow(slot, 0, self._context, BASE_ADAPTER_SLOT, samples=False) for slot in group]
            self._device.run(self._starting_batch(dict.fromkeys(group, self._context), rows))

    def _starting_batch(self, tokens_by_slot: Mapping[int, int], rows: Sequence[ScheduledRow]) -> Batch:
        """Returns a batch of `rows` that starts new requests with so many tokens in each slot."""
        starts, grants = [], []
        for slot, tokens in tokens_by_slot.items():
            ids = tuple((17 * index + 31 * slot) % self._vocab for index in range(tokens))
            starts.append(SlotStart(slot, ids, SlotSampling.greedy(tokens)))
            first = slot % self._contexts * self._blocks_each
            grants.append(BlockGrant(slot, 0, tuple(range(first, first + ceil_div(tokens, self._block)))))
        return Batch(tuple(starts), tuple(grants), tuple(rows))
