"""Measures a machine profile on an idle backend: chooses the points, their order, and the number of repeats.

All points are timed once in each of several rounds, and the result is the median over the rounds, so that a slow period
of a shared machine affects all points alike.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, product

from caraserve.core import machine_profile as profiles
from caraserve.core.backend import Backend
from caraserve.core.batch import BASE_ADAPTER_SLOT
from caraserve.core.lora_layout import ALIGN_BYTES, HostAdapter, aligned_bytes
from caraserve.errors import ConfigError
from caraserve.model.dtype import DTYPES, Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import (
    MeasuredBackend,
    Measurement,
    SyntheticRequests,
    adapter_spec,
    random_adapter,
    target_sets,
)
from caraserve.util.units import align_up, human_bytes

_LORA_RANKS = (8, 16, 32, 64, 128)
_LORA_TOKENS = (8, 32, 64)  # of slices: few enough for the fixed time to show, and more than a usual slice
_LORA_LAYERS = 4  # several, so that weights come from memory
_LORA_LEAST_MS = 2.0  # of one sample, so that the overhead of the clock and the call is negligible
_MOST_BUDGETS = 4.0  # beyond so many times the budget, only needed points are measured, once each
_LOAD_MS = 50.0  # the approximate duration of the longest timed copy
_LOADS = 4  # in one sample: the first copy into fresh memory takes many times as long


@dataclass(frozen=True, slots=True)
class _Effort:
    """The points of a measurement, and limits of its time and memory: by default of a full one."""

    ranks: tuple[int, ...] = (8, 16, 32, 64)  # of the adapters that are loaded
    adapters: int = 16  # most of each rank
    adapters_bytes: int = 1 << 30  # most bytes of all
    loading_s: float = 5.0  # most time for loading them; a slow link loads fewer
    base_batches: tuple[int, ...] = (1, 4, 8, 16, 32)
    prefill_tokens: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    long_prefill_tokens: tuple[int, ...] = (512, 1024)  # of GPUs, for which few tokens take as long as some hundred
    context_tokens: int = 128  # of decoding requests
    contexts: int = 32  # computed contexts; further requests share them
    most_token_ms: float = math.inf  # most time of one token alone; a slower model is not measured
    burst: int = 3  # iterations of one kind in a row
    least_rounds: int = 5
    most_rounds: int = 30
    budget_s: float = 35.0  # afterwards only `least_rounds` rounds start


_QUICK = _Effort(
    ranks=(8, 32),
    adapters=8,
    adapters_bytes=256 << 20,
    loading_s=0.3,
    base_batches=(1, 8, 16),
    prefill_tokens=(4, 16, 64, 128),
    long_prefill_tokens=(512,),
    context_tokens=16,
    contexts=1,
    most_token_ms=200.0,
    burst=2,
    least_rounds=3,
    most_rounds=7,
    budget_s=0.5,  # with the steps before and after it, a start takes 5 s
)


@dataclass(frozen=True, slots=True)
class _Measurements:
    """The measurements of every round."""

    lora: Mapping[tuple[profiles.Targets, int, int], Measurement]  # by modules, rank and tokens; the time of one layer
    loads: Mapping[int, Measurement]  # by bytes
    prefill: Mapping[tuple[int, int], Measurement]  # by tokens and rank
    decode: Mapping[tuple[int, ...], Measurement]  # by the requests' ranks

    def all(self) -> list[Measurement]:
        groups = (self.lora, self.loads, self.prefill, self.decode)
        measurements = chain.from_iterable(group.values() for group in groups)
        return sorted(measurements, key=lambda measurement: not measurement.is_needed)


def model_key(plan: DecoderPlan, dtype: str, threads: int | None = None, *, padded: bool = False) -> str:
    """Returns the key of a model in profiles: its shape, its weights' dtype, the threads if set, and the kernels."""

    attention, last = next(plan.attentions), plan.layers[0].linears[-1]
    shape = (
        f"{plan.family}-{len(plan.layers)}x{plan.hidden}-heads{attention.heads}-{attention.kv_heads}"
        f"-{attention.head_dim}-mlp{last.inputs}-vocab{plan.vocab_size}-{dtype}"
    )
    return shape + ("" if threads is None else f"-threads{threads}") + ("-padded" if padded else "")


def measure(
    backend: Backend,
    plan: DecoderPlan,
    *,
    quick: bool,
    progress: Callable[[float], None],
    measure_handoff: Callable[[], float | None] | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    accelerator: str = "",
    padded: bool = False,
) -> profiles.Profile:
    """Measures an idle backend and leaves no adapter on it.

    `progress` gets the share done. `measure_handoff` returns `Profile.handoff_ms`. `dtype`: of the base weights (None:
    the checkpoint's). `threads`: compute threads, if set. `accelerator`: name of the GPU, if one is used.
    `padded`: whether the kernels pad to the largest rank in a decode batch. Raises BackendFailed or ConfigError.
    """
    started_s = time.monotonic()
    effort = _QUICK if quick else _Effort()
    if accelerator:
        effort = replace(effort, prefill_tokens=(*effort.prefill_tokens, *effort.long_prefill_tokens))

    dtype = dtype or plan.dtype
    device = MeasuredBackend(backend)
    images = _host_images(device, plan, DTYPES[dtype], effort.ranks)
    with _bound(device, images, effort) as slots:
        measurements = _measurements(device, plan, images[-1], slots, effort, padded=padded)
        _run_rounds(measurements.all(), effort, started_s, progress)
        handoff_ms = measure_handoff() if measure_handoff is not None else None
    bytes_per_s, latency_ms = _link(measurements.loads)
    rates = [
        profiles.LoraRate.fitted(
            rank, targets, {tokens: measurements.lora[targets, rank, tokens].ms for tokens in _LORA_TOKENS}
        )
        for targets, rank in product(target_sets(plan), _LORA_RANKS)
    ]
    prefill = [
        profiles.PrefillPoint(*point, measurement.ms)
        for point, measurement in measurements.prefill.items()
        if measurement.times_ms
    ]
    decode = [
        profiles.DecodePoint(len(ranks), sum(ranks), max(ranks), measurement.ms)
        for ranks, measurement in measurements.decode.items()
        if measurement.times_ms
    ]
    return profiles.Profile(
        schema=profiles.SCHEMA,
        machine=profiles.machine_key(accelerator),
        model=model_key(plan, dtype, threads, padded=padded),
        made_unix_s=time.time(),
        quick=quick,
        link_bytes_per_s=bytes_per_s,
        link_latency_ms=latency_ms,
        handoff_ms=handoff_ms,
        lora=tuple(rates),
        prefill=profiles.Prefill.fitted(prefill),
        decode=profiles.Decode.fitted(decode, is_padded=padded),
    )


def measure_alone(
    backend: Backend, plan: DecoderPlan, dtype: str, measure_handoff: Callable[[], float | None]
) -> float | None:
    """Returns what `measure_handoff` returns with an adapter in slot 1 of an idle backend, and unloads that."""
    device = MeasuredBackend(backend)
    images = _host_images(device, plan, DTYPES[dtype], _QUICK.ranks[:1])
    with _bound(device, images, replace(_QUICK, adapters=1)):
        return measure_handoff()


def _measurements(
    device: MeasuredBackend,
    plan: DecoderPlan,
    image: HostAdapter,
    slots: Mapping[int, Sequence[int]],
    effort: _Effort,
    *,
    padded: bool,
) -> _Measurements:
    """Returns all measurements. `slots`: of loaded adapters, by rank; `image`: an adapter to time loads with."""
    requests = SyntheticRequests(
        device,
        plan.vocab_size,
        context_tokens=effort.context_tokens,
        most=max(*effort.base_batches, effort.adapters),
        contexts=effort.contexts,
        most_token_ms=effort.most_token_ms,
    )
    adapters = {0: BASE_ADAPTER_SLOT} | {rank: each[0] for rank, each in slots.items()}
    prompts = sorted({min(tokens, requests.longest) for tokens in effort.prefill_tokens})
    mixes = _mixes(
        [*slots],
        min([requests.most, *(len(each) for each in slots.values())]),
        sorted({min(batch, requests.most) for batch in effort.base_batches}),
    )
    if padded:  # rows of the base model are not padded, and requests · largest rank would not be their work
        mixes = [ranks for ranks in mixes if min(ranks) > 0 or max(ranks) == 0]
    # Each fit has three coefficients: these are the fewest points that determine them.
    needed = {(prompts[0], 0), *product(prompts[:2][-1:], (0, max(adapters))), *mixes[:2]}
    needed.add(next(ranks for ranks in reversed(mixes) if len(set(ranks)) == 1))
    return _Measurements(
        lora=_lora_measurements(plan, image.spec.dtype),
        loads=_load_measurements(device, plan, image, slot=1 + sum(len(each) for each in slots.values())),
        prefill={
            point: replace(requests.prefill(point[0], adapters[point[1]]), is_needed=point in needed)
            for point in product(prompts, adapters)
        },
        decode={
            ranks: replace(requests.decode(_adapters(ranks, slots), effort.burst), is_needed=ranks in needed)
            for ranks in mixes
        },
    )


def _mixes(ranks: Sequence[int], count: int, base_batches: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns batches as tuples of ranks: base only, one rank, and low ranks beside high ones, where padding to the
    highest would show. No rank occurs more than `count` times in one."""
    low, high, half = ranks[0], ranks[-1], max(count // 2, 1)
    mixes = [(0,) * batch for batch in base_batches]
    mixes += [(rank,) * batch for rank in ranks for batch in (1, half, count)]
    mixes += [(low,) * (count - 1) + (high,), (low,) * half + (high,) * (count - half)]
    mixes += [(0,) * (count - 1) + (high,), (0,) * half + (high,) * (count - half)]
    return list(dict.fromkeys(mixes))


def _adapters(ranks: Sequence[int], slots: Mapping[int, Sequence[int]]) -> list[int]:
    """Returns a slot of an adapter for each rank, without using one twice."""
    free = {rank: iter(each) for rank, each in slots.items()}
    return [next(free[rank]) if rank else BASE_ADAPTER_SLOT for rank in ranks]


def _run_rounds(
    measurements: Sequence[Measurement], effort: _Effort, started_s: float, progress: Callable[[float], None]
) -> None:
    """Times all points in rounds, every other one backwards.

    When time is short, the first round leaves out points that are not needed and, at the pace of their kind so far,
    would take too long; later rounds leave them out too.
    """
    done = 0
    pace_s: dict[str, float] = {}  # by kind: time of a token in its last sample
    for turn in range(effort.most_rounds):
        spent = (time.monotonic() - started_s) / effort.budget_s
        if (spent > 1.0 and turn >= effort.least_rounds) or (spent > _MOST_BUDGETS and turn > 0):
            break
        wanted = [measurement for measurement in measurements if measurement.times_ms or turn == 0]
        for measurement in wanted if turn % 2 == 0 else reversed(wanted):
            began_s = time.monotonic()
            ends_s = began_s + measurement.tokens * pace_s.get(measurement.kind, 0.0)
            if ends_s - started_s > _MOST_BUDGETS * effort.budget_s and (turn > 0 or not measurement.is_needed):
                continue
            measurement.times_ms.extend(measurement.sample())
            pace_s[measurement.kind] = (time.monotonic() - began_s) / max(1, measurement.tokens)
            done += 1
            rounds, spent = done / len(measurements), (time.monotonic() - started_s) / effort.budget_s
            progress(max(rounds / effort.most_rounds, min(spent, rounds / effort.least_rounds, 1.0)))
    progress(1.0)


# --- adapters ---


def _host_images(device: MeasuredBackend, plan: DecoderPlan, dtype: Dtype, ranks: Sequence[int]) -> list[HostAdapter]:
    """Makes one adapter of each rank in the host cache's memory. Ranks that do not fit are left out."""
    specs = [adapter_spec(plan, dtype, rank, len(plan.layers)) for rank in ranks]
    starts = list(accumulate((align_up(spec.num_bytes, ALIGN_BYTES) for spec in specs), initial=0))
    room = device.host_memory.nbytes
    if specs[0].num_bytes > room:
        needed = human_bytes(specs[0].num_bytes)
        raise ConfigError(
            f"--max-host-adapters-bytes {room} is too small to measure with: rank {ranks[0]} takes {needed}"
        )
    return [
        random_adapter(plan, spec, device.host_memory[start:])
        for spec, start in zip(specs, starts, strict=False)
        if start + spec.num_bytes <= room
    ]


@contextmanager
def _bound(device: MeasuredBackend, images: Sequence[HostAdapter], effort: _Effort) -> Iterator[dict[int, list[int]]]:
    """Loads as many adapters as fit in bytes, slots and time, and yields their {rank: slots}. Unloads them at the
    end."""
    total = sum(image.spec.num_bytes for image in images)
    fitting = min(effort.adapters, effort.adapters_bytes // total, (device.limits.adapter_slots - 2) // len(images))
    slots: dict[int, list[int]] = {image.spec.rank: [] for image in images}
    loaded = 0
    started_s = time.monotonic()
    try:
        while loaded == 0 or (loaded < fitting * len(images) and time.monotonic() - started_s < effort.loading_s):
            for image in images:
                loaded += 1
                device.load(image, loaded)
                slots[image.spec.rank].append(loaded)
        yield slots
    finally:
        for slot in range(1, loaded + 1):
            device.unload(slot)


def _load_measurements(
    device: MeasuredBackend, plan: DecoderPlan, image: HostAdapter, slot: int
) -> dict[int, Measurement]:
    """Returns measurements, by bytes, of copying an adapter's first layer and as many layers as take about 50 ms.

    No batch uses these images, because their layout is that of the whole adapter, cut off.
    """
    spec = image.spec

    def part(layers: int) -> HostAdapter:
        cut = adapter_spec(plan, spec.dtype, spec.rank, layers)
        return HostAdapter(cut, image.data[: cut.num_bytes])

    def load(adapter: HostAdapter) -> float:
        try:
            return device.load(adapter, slot)
        finally:
            device.unload(slot)

    def sample(adapter: HostAdapter) -> list[float]:
        return [load(adapter) for _ in range(_LOADS)]

    first_ms = load(part(1))
    layers = max(1, min(len(plan.layers), int(_LOAD_MS / first_ms)))
    return {part(count).spec.num_bytes: Measurement(partial(sample, part(count))) for count in (1, layers)}


def _link(loads: Mapping[int, Measurement]) -> tuple[float, float]:
    """Returns the link's bytes/s, and the ms that each copy takes besides."""
    times_ms = [measurement.ms for measurement in loads.values()]
    (ms_per_byte, latency_ms), _ = profiles.fit_times([[float(size) for size in loads], [1.0] * len(loads)], times_ms)
    if ms_per_byte == 0.0:  # noise exceeded the effect of the size
        return 1000 * max(loads) / max(times_ms), 0.0
    return 1000 / ms_per_byte, latency_ms


def _lora_measurements(plan: DecoderPlan, dtype: Dtype) -> dict[tuple[profiles.Targets, int, int], Measurement]:
    from caraserve.profiling.cpu_lora_rate import LayerLora  # compiles kernels: not when this file is imported

    layers = min(_LORA_LAYERS, len(plan.layers))
    specs = [adapter_spec(plan, dtype, rank, layers) for rank in _LORA_RANKS]
    adapters = [random_adapter(plan, spec, aligned_bytes(spec.num_bytes)) for spec in specs]
    return {
        (targets, adapter.spec.rank, tokens): _lora_measurement(
            LayerLora(plan, adapter, names, tokens).layer_ms, layers
        )
        for targets, names in target_sets(plan).items()
        for adapter in adapters
        for tokens in _LORA_TOKENS
    }


def _lora_measurement(layer_ms: Callable[[int], float], layers: int) -> Measurement:
    layer_ms(1)  # compiles
    repeats = max(1, round(_LORA_LEAST_MS / layers / layer_ms(1)))
    return Measurement(lambda: [layer_ms(repeats)])
