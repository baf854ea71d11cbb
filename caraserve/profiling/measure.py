"""Measures a `Profile` of a running backend: which points, in which order, how often.

Everything that is timed is asked in turn, round after round, and medians are taken over the rounds: a slow spell of a
shared machine then lands on all points alike.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, product

from caraserve.core.backend import Backend
from caraserve.core.batch import BASE_ADAPTER_SLOT
from caraserve.core.lora_layout import ALIGN_BYTES, HostAdapter, aligned_bytes
from caraserve.core.machine_profile import (
    SCHEMA,
    Decode,
    DecodePoint,
    LoraRate,
    Prefill,
    PrefillPoint,
    Profile,
    Targets,
    fit_times,
    machine_key,
)
from caraserve.errors import ConfigError
from caraserve.model.dtype import DTYPES, Dtype
from caraserve.model.spec import SITES, ModelSpec
from caraserve.profiling.microbench import MeasuredBackend, Measurement, SyntheticRequests, adapter_spec, random_adapter
from caraserve.util.units import align_up, human_bytes

_LORA_RANKS = (8, 16, 32, 64, 128)
_LORA_SITES: Mapping[Targets, Sequence[str]] = {"qkv": SITES[:3], "all": SITES}
_LORA_TOKENS, _LORA_LAYERS = 64, 4  # a worker's usual share; layers in turn, so that weights come from memory
_LORA_LEAST_MS = 2.0  # of one sample: the clock and the call around it do not show
_OVERDRAFT = 4.0  # budgets after which only what a profile cannot do without is asked, and that once
_LOAD_MS = 50.0  # about the longest copy that is timed
_LOADS = 4  # in one sample: the first into memory that is new to the system takes many times as long


@dataclass(frozen=True, slots=True)
class _Effort:
    """How much is measured."""

    ranks: tuple[int, ...]  # of adapters on the device
    adapters: int  # of each rank, at most
    adapters_bytes: int  # of all of them, at most
    loading_s: float  # that bringing them there may take; a slow link brings fewer
    base_batches: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    context_tokens: int  # of requests that decode
    contexts: int  # of them that are computed, for as many requests; others share them
    most_token_ms: float  # of one token alone; what takes longer is not measured
    burst: int  # iterations of one kind in a row
    least_rounds: int
    most_rounds: int
    budget_s: float  # after that only the least rounds start, and after several times that nothing new does


_QUICK = _Effort(
    ranks=(8, 32),
    adapters=8,
    adapters_bytes=256 << 20,
    loading_s=0.3,
    base_batches=(1, 8, 16),
    prefill_tokens=(4, 16, 64, 128),
    context_tokens=16,
    contexts=1,
    most_token_ms=200.0,
    burst=2,
    least_rounds=3,
    most_rounds=7,
    budget_s=0.5,  # with what comes before and after it, 5 s before a server is ready
)
_FULL = _Effort(
    ranks=(8, 16, 32, 64),
    adapters=16,
    adapters_bytes=1 << 30,
    loading_s=5.0,
    base_batches=(1, 4, 8, 16, 32),
    prefill_tokens=(8, 16, 32, 64, 128, 256),
    context_tokens=128,
    contexts=32,
    most_token_ms=math.inf,
    burst=3,
    least_rounds=5,
    most_rounds=30,
    budget_s=35.0,
)


@dataclass(frozen=True, slots=True)
class _Probes:
    """All that is asked in every round."""

    lora: Mapping[tuple[Targets, int], Measurement]  # by modules and rank; the time of one layer
    loads: Mapping[int, Measurement]  # by bytes
    prefill: Mapping[tuple[int, int], Measurement]  # by tokens and rank
    decode: Mapping[tuple[int, ...], Measurement]  # by the requests' ranks

    def all(self) -> list[Measurement]:
        groups = (self.lora, self.loads, self.prefill, self.decode)
        probes = chain.from_iterable(group.values() for group in groups)
        return sorted(probes, key=lambda probe: not probe.is_needed)


def model_key(model: ModelSpec, dtype: str, threads: int | None = None) -> str:
    """What a profile depends on besides the machine: the model's shape, its weights' dtype, threads if chosen."""
    shape = (
        f"{model.family}-{model.layers}x{model.hidden}-heads{model.heads}-{model.kv_heads}-{model.head_dim}"
        f"-mlp{model.intermediate}-vocab{model.vocab_size}-{dtype}"
    )
    return shape if threads is None else f"{shape}-threads{threads}"


def measure(
    backend: Backend,
    model: ModelSpec,
    *,
    quick: bool,
    progress: Callable[[float], None],
    measure_handoff: Callable[[], float | None] | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    accelerator: str = "",
) -> Profile:
    """Measures an idle backend and leaves no adapter on it.

    `progress` is told the share done; `measure_handoff` returns `Profile.handoff_ms`. `dtype` of the base weights is
    the checkpoint's unless given; `threads` those chosen for computing, if they were; `accelerator` the name of the
    device, if it is none of the CPU's. Raises BackendFailed or ConfigError.
    """
    started_s = time.monotonic()
    effort = _QUICK if quick else _FULL
    dtype = dtype or model.dtype
    device = MeasuredBackend(backend)
    images = _host_images(device, model, DTYPES[dtype], effort.ranks)
    with _bound(device, images, effort) as slots:
        probes = _probes(device, model, images[-1], slots, effort)
        _ask(probes.all(), effort, started_s, progress)
        handoff_ms = measure_handoff() if measure_handoff is not None else None
    bytes_per_s, latency_ms = _link(probes.loads)
    rates = [(targets, rank, 1000 * _LORA_TOKENS / probe.ms) for (targets, rank), probe in probes.lora.items()]
    prefill = [PrefillPoint(*point, probe.ms) for point, probe in probes.prefill.items() if probe.times_ms]
    decode = [
        DecodePoint(len(ranks), sum(ranks), max(ranks), probe.ms)
        for ranks, probe in probes.decode.items()
        if probe.times_ms
    ]
    return Profile(
        schema=SCHEMA,
        machine=machine_key(accelerator),
        model=model_key(model, dtype, threads),
        made_unix_s=time.time(),
        quick=quick,
        link_bytes_per_s=bytes_per_s,
        link_latency_ms=latency_ms,
        handoff_ms=handoff_ms,
        lora=tuple(LoraRate(rank, targets, tokens_per_s) for targets, rank, tokens_per_s in rates),
        prefill=Prefill.fitted(prefill),
        decode=Decode.fitted(decode),
    )


def _probes(
    device: MeasuredBackend, model: ModelSpec, image: HostAdapter, slots: Mapping[int, Sequence[int]], effort: _Effort
) -> _Probes:
    """`slots`: of adapters on the device, by rank; `image`: one to load again and again."""
    requests = SyntheticRequests(
        device,
        model.vocab_size,
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
    # The fits have three coefficients each: of these, one point to tell each from the others.
    needed = {(prompts[0], 0), *product(prompts[:2][-1:], (0, max(adapters))), *mixes[:2]}
    needed.add(next(ranks for ranks in reversed(mixes) if len(set(ranks)) == 1))
    return _Probes(
        lora=_lora_probes(model, image.spec.dtype),
        loads=_load_probes(device, model, image, slot=1 + sum(len(each) for each in slots.values())),
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
    """The ranks of batches: base only; one rank; low ones beside high ones, where padding to the highest would show.
    No rank is there more than `count` times."""
    low, high, half = ranks[0], ranks[-1], max(count // 2, 1)
    mixes = [(0,) * batch for batch in base_batches]
    mixes += [(rank,) * batch for rank in ranks for batch in (1, half, count)]
    mixes += [(low,) * (count - 1) + (high,), (low,) * half + (high,) * (count - half)]
    mixes += [(0,) * (count - 1) + (high,), (0,) * half + (high,) * (count - half)]
    return list(dict.fromkeys(mixes))


def _adapters(ranks: Sequence[int], slots: Mapping[int, Sequence[int]]) -> list[int]:
    """A slot for each rank, no adapter twice."""
    free = {rank: iter(each) for rank, each in slots.items()}
    return [next(free[rank]) if rank else BASE_ADAPTER_SLOT for rank in ranks]


def _ask(probes: Sequence[Measurement], effort: _Effort, started_s: float, progress: Callable[[float], None]) -> None:
    """Rounds over all probes, every other one backwards. When time is short, the first round leaves out those that are
    not needed and, by the pace of their kind so far, would take too long; later ones do without them too."""
    done = 0
    pace_s: dict[str, float] = {}  # kind → of each token, in the last sample
    for turn in range(effort.most_rounds):
        spent = (time.monotonic() - started_s) / effort.budget_s
        if (spent > 1.0 and turn >= effort.least_rounds) or (spent > _OVERDRAFT and turn > 0):
            break
        asked = [probe for probe in probes if probe.times_ms or turn == 0]
        for probe in asked if turn % 2 == 0 else reversed(asked):
            begun_s = time.monotonic()
            ends_s = begun_s + probe.tokens * pace_s.get(probe.kind, 0.0)
            if ends_s - started_s > _OVERDRAFT * effort.budget_s and (turn > 0 or not probe.is_needed):
                continue
            probe.times_ms.extend(probe.sample())
            pace_s[probe.kind] = (time.monotonic() - begun_s) / max(1, probe.tokens)
            done += 1
            rounds, spent = done / len(probes), (time.monotonic() - started_s) / effort.budget_s
            progress(max(rounds / effort.most_rounds, min(spent, rounds / effort.least_rounds, 1.0)))
    progress(1.0)


# --- adapters ---


def _host_images(device: MeasuredBackend, model: ModelSpec, dtype: Dtype, ranks: Sequence[int]) -> list[HostAdapter]:
    """One adapter of each rank, side by side in the host tier; ranks for which there is no room are left out."""
    specs = [adapter_spec(model, dtype, rank, model.layers) for rank in ranks]
    starts = list(accumulate((align_up(spec.num_bytes, ALIGN_BYTES) for spec in specs), initial=0))
    room = device.host_memory.nbytes
    if specs[0].num_bytes > room:
        needed = human_bytes(specs[0].num_bytes)
        raise ConfigError(
            f"--max-host-adapters-bytes {room} is too small to measure with: rank {ranks[0]} takes {needed}"
        )
    return [
        random_adapter(model, spec, device.host_memory[start:])
        for spec, start in zip(specs, starts, strict=False)
        if start + spec.num_bytes <= room
    ]


@contextmanager
def _bound(device: MeasuredBackend, images: Sequence[HostAdapter], effort: _Effort) -> Iterator[dict[int, list[int]]]:
    """Adapters on the device while inside: {rank: slots}, as many of each rank as fit in bytes, slots and time."""
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


def _load_probes(device: MeasuredBackend, model: ModelSpec, image: HostAdapter, slot: int) -> dict[int, Measurement]:
    """Copies of an adapter's first layer alone and of as many as take a while: {bytes: probe}. No plan ever runs them:
    their layout is the whole adapter's, cut off."""
    spec = image.spec

    def part(layers: int) -> HostAdapter:
        cut = adapter_spec(model, spec.dtype, spec.rank, layers)
        return HostAdapter(cut, image.data[: cut.num_bytes])

    def load(adapter: HostAdapter) -> float:
        try:
            return device.load(adapter, slot)
        finally:
            device.unload(slot)

    def sample(adapter: HostAdapter) -> list[float]:
        return [load(adapter) for _ in range(_LOADS)]

    first_ms = load(part(1))
    layers = max(1, min(model.layers, int(_LOAD_MS / first_ms)))
    return {part(count).spec.num_bytes: Measurement(partial(sample, part(count))) for count in (1, layers)}


def _link(loads: Mapping[int, Measurement]) -> tuple[float, float]:
    """Bytes/s, and ms of each copy whatever its size."""
    times_ms = [probe.ms for probe in loads.values()]
    (ms_per_byte, latency_ms), _ = fit_times([[float(size) for size in loads], [1.0] * len(loads)], times_ms)
    if ms_per_byte == 0.0:  # noise hid what the bytes cost
        return 1000 * max(loads) / max(times_ms), 0.0
    return 1000 / ms_per_byte, latency_ms


def _lora_probes(model: ModelSpec, dtype: Dtype) -> dict[tuple[Targets, int], Measurement]:
    from caraserve.profiling.cpu_lora_rate import LayerLora  # compiles kernels: not when this file is imported

    layers = min(_LORA_LAYERS, model.layers)
    specs = [adapter_spec(model, dtype, rank, layers) for rank in _LORA_RANKS]
    adapters = [random_adapter(model, spec, aligned_bytes(spec.num_bytes)) for spec in specs]
    return {
        (targets, adapter.spec.rank): _lora_probe(LayerLora(model, adapter, sites, _LORA_TOKENS).layer_ms, layers)
        for targets, sites in _LORA_SITES.items()
        for adapter in adapters
    }


def _lora_probe(layer_ms: Callable[[int], float], layers: int) -> Measurement:
    layer_ms(1)  # compiles
    repeats = max(1, round(_LORA_LEAST_MS / layers / layer_ms(1)))
    return Measurement(lambda: [layer_ms(repeats)])
