"""Stage `model`: iterations of a 7-billion-parameter shape with random weights, with and without adapters.

The floor of an iteration is the time in which the device copies as many bytes as it must read: all weights but the
embeddings, and the keys and values of all contexts.
"""

from collections.abc import Sequence
from dataclasses import asdict

from caraserve.bench.gpu.backends import DTYPE, MeasuredModel, measured_model
from caraserve.bench.gpu.limits import copy_bytes_per_s
from caraserve.bench.gpu.results import StageResult
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.core.machine_profile import LineFit
from caraserve.model.spec import SITES

_QKV = SITES[:3]
_RANKS = (8, 16, 32, 64)
_FLOOR_TARGETS = {1: 0.75, 64: 0.80}  # by batch
_LORA_TARGET, _LORA_LEAST_CONTEXT = 0.90, 1024
_KV_SHARE = 0.8  # of the memory pool; the rest is for adapters
_BASE_TARGET, _HOST_TARGET_US = 0.99, 300.0


def model(setup: CheckSetup) -> StageResult:
    """Measures decode and prefill iterations; results are checked in stage `correct`."""
    effort, result = setup.effort, StageResult()
    bytes_per_s = copy_bytes_per_s(setup, setup.accelerator(DTYPE))
    slots, context = max(effort.batches), max(effort.contexts)
    with measured_model(setup, slots, context, max(slots, len(_RANKS)) + 1) as subject:
        fitting = _fit_contexts(subject, slots, context)
        subject.fill(fitting, context)
        alone = subject.decode_ms(min(effort.contexts), [0] * fitting)
        slots_of = _load(subject, fitting)
        beside = subject.decode_ms(min(effort.contexts), [0] * fitting)
        result.figures["base_disabled_over_enabled"] = alone / beside
        result.at_least("base-only decode, adapters on the device ÷ none", alone / beside, _BASE_TARGET, ".3f")
        mixed = [slots_of[_RANKS[index % len(_RANKS)]][index // len(_RANKS)] for index in range(fitting)]
        _decode(setup, subject, mixed, bytes_per_s, result)
        _fit(setup, subject, slots_of, fitting, result)
        _host(setup, subject, mixed, result)
        _prefill(setup, subject, slots_of, result)
    return result


def _fit_contexts(subject: MeasuredModel, slots: int, context: int) -> int:
    """Grows the KV cache for up to `slots` requests of the longest context, beside adapters; returns how many fit."""
    limits = subject.backend.limits
    assert limits.shared is not None
    each = (context // limits.block_tokens + 1) * limits.shared.block_bytes
    most = max(1, min(slots, int(_KV_SHARE * limits.shared.num_bytes) // each))
    subject.session.grow_kv(most)
    return most


def _load(subject: MeasuredModel, count: int) -> dict[int, list[int]]:
    """Loads `count` adapters (at least one of each rank); returns {rank: slots}. Equal ranks share one host image."""
    slots: dict[int, list[int]] = {rank: [] for rank in _RANKS}
    images = {rank: subject.adapter(rank, _QKV) for rank in _RANKS}
    for index in range(max(count, len(_RANKS))):
        rank = _RANKS[index % len(_RANKS)]
        image = images[rank]
        assert image is not None, "the host tier is too small"
        subject.session.load(image, index + 1)
        slots[rank].append(index + 1)
    return slots


def _decode(
    setup: CheckSetup, subject: MeasuredModel, mixed: Sequence[int], bytes_per_s: float, result: StageResult
) -> None:
    """Measures decode iterations of every batch and context, without adapters and with another one for each request."""
    spec, points, effort = subject.spec, [], setup.effort
    weights = (spec.num_parameters - spec.vocab_size * spec.hidden) * DTYPE.itemsize
    for batch in (batch for batch in effort.batches if batch <= len(mixed)):
        for context in effort.contexts:
            base_ms = subject.decode_ms(context - 1, [0] * batch)
            lora_ms = subject.decode_ms(context - 1, mixed[:batch])
            floor_ms = 1000 * (weights + batch * context * spec.kv_bytes_per_token(DTYPE.itemsize)) / bytes_per_s
            share = floor_ms / base_ms
            points.append({"batch": batch, "context": context, "base_ms": base_ms, "lora_ms": lora_ms})
            points[-1]["share_of_floor"] = share
            name, value = (
                f"decode, batch {batch}, context {context}",
                f"{base_ms:.2f} ms, {share:.0%} of the floor's speed",
            )
            target = _FLOOR_TARGETS.get(batch)
            if target is None or context != sorted(effort.contexts)[len(effort.contexts) // 2]:
                result.add_line(name, value)
            else:
                result.add_line(name, value, f"≥ {target:.0%}", share >= target)
            if batch == max(effort.batches) and context >= _LORA_LEAST_CONTEXT:
                result.at_least(f"{name}: with {batch} adapters ÷ without", base_ms / lora_ms, _LORA_TARGET)
    result.figures["decode"] = points


def _fit(
    setup: CheckSetup, subject: MeasuredModel, slots_of: dict[int, list[int]], batch: int, result: StageResult
) -> None:
    """Fits `ms = α · Σ ranks + β` to decode iterations whose requests all have one rank."""
    least = min(map(len, slots_of.values()))
    count, context = min(batch, least), min(setup.effort.contexts) - 1
    times_ms = [subject.decode_ms(context, slots[:count]) for slots in slots_of.values()]
    fit = LineFit.fitted([float(count * rank) for rank in slots_of], times_ms)
    result.figures["decode_fit"] = {"batch": count, "ranks": list(slots_of), "ms": times_ms, **asdict(fit)}
    result.add_line(
        "decode ms = α Σ ranks + β", f"α {1000 * fit.alpha_ms:.3f} µs, β {fit.beta_ms:.2f}, R² {fit.r2:.3f}"
    )


def _host(setup: CheckSetup, subject: MeasuredModel, mixed: Sequence[int], result: StageResult) -> None:
    us = subject.host_us(min(setup.effort.contexts) - 1, mixed)
    result.figures["host_us"] = us
    result.at_most(f"host's CPU time an iteration at batch {len(mixed)}, µs", us, _HOST_TARGET_US, ".0f")


def _prefill(setup: CheckSetup, subject: MeasuredModel, slots_of: dict[int, list[int]], result: StageResult) -> None:
    """Measures the prefill of one prompt of every length, without and with an adapter."""
    points, adapter = [], slots_of[max(_RANKS)][0]
    for count in setup.effort.prompts:
        base_ms, lora_ms = subject.prefill_ms(count, 0), subject.prefill_ms(count, adapter)
        points.append({"tokens": count, "base_ms": base_ms, "lora_ms": lora_ms})
        value = f"{base_ms:.2f} ms, {2 * count * subject.spec.num_parameters / base_ms / 1e9:.0f} TFLOP/s"
        lora = f"rank {max(_RANKS)}: {lora_ms / base_ms:.2f} times as long"
        result.add_line(f"prefill of {count} tokens", f"{value}; {lora}")
    result.figures["prefill"] = points
    fit = LineFit.fitted([float(point["tokens"]) for point in points], [point["base_ms"] for point in points])
    result.figures["prefill_fit"] = asdict(fit)
