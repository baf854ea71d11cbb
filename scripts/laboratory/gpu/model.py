"""Stage `model`: iterations of a 7-billion-parameter shape with random weights, with and without adapters, and what
they cost the host.

The floor of an iteration is the time in which the device reads what it must, at its memory's highest speed: all
weights but the embeddings, and the keys and values of all contexts. Stage `limits` has that speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from caraserve.core.machine_profile import LineFit
from scripts.laboratory.gpu.backends import DTYPE
from scripts.laboratory.gpu.iterations import (
    RANKS,
    DecodePoint,
    PrefillPoint,
    decode_points,
    load_adapters,
    prefill_points,
)
from scripts.laboratory.gpu.limits import memory_bytes_per_s
from scripts.laboratory.gpu.measured_model import MeasuredModel, busy_python_thread, measured_model
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup

_FLOOR_TARGETS = {1: 0.75, 64: 0.80}  # by batch, at the middle context
_LORA_TARGET, _LORA_LEAST_CONTEXT = 0.90, 1024
_BASE_TARGET, _HOST_TARGET_US = 0.99, 600.0
_BUSY_TARGET = 1.10


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """Times of decode iterations whose requests all have one rank, and `ms = α · Σ ranks + β` through them."""

    batch: int
    ranks: tuple[int, ...]
    ms: tuple[float, ...]  # by rank
    line: LineFit


@dataclass(frozen=True, slots=True)
class HostCost:
    """A decode iteration of `batch` requests, each with an adapter."""

    batch: int
    cpu_us: dict[str, float]  # CPU time of the backend's threads, by name
    ms: float
    busy_ms: float  # the same beside a thread that always runs Python


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """All points and fits."""

    base_disabled_over_enabled: float  # base-only decode before adapters are on the device ÷ after
    decode: tuple[DecodePoint, ...]
    decode_fit: DecodeFit
    host: HostCost
    prefill: tuple[PrefillPoint, ...]
    prefill_fit: LineFit  # of base_ms by tokens


def model(setup: CheckSetup) -> StageResult[ModelFigures]:
    """Measures decode and prefill iterations; results are checked in stage `correct`."""
    effort, lines = setup.effort, Lines()
    bytes_per_s = memory_bytes_per_s(setup, setup.accelerator(DTYPE))
    slots, context = max(effort.batches), max(effort.contexts)
    with measured_model(setup, slots, context, max(slots, len(RANKS)) + 1) as subject:
        fitting = subject.grow_contexts(slots)
        subject.fill(range(fitting), context)
        alone = subject.decode_ms(min(effort.contexts), [0] * fitting)
        adapters = load_adapters(subject, fitting)
        beside = subject.decode_ms(min(effort.contexts), [0] * fitting)
        lines.at_least("base-only decode, adapters on the device ÷ none", alone / beside, _BASE_TARGET, ".3f")
        middle = sorted(effort.contexts)[len(effort.contexts) // 2]
        targets = {(batch, middle): share for batch, share in _FLOOR_TARGETS.items()}
        mixed = adapters[:fitting]
        decode = decode_points(subject, effort.batches, effort.contexts, mixed, bytes_per_s, targets, lines)
        _judge_lora(decode, lines)
        fit = _fit(subject, adapters, fitting, lines)
        host = _host(subject, mixed, lines)
        prefill = prefill_points(subject, effort.prompts, adapters[len(RANKS) - 1], lines)
    by_tokens = LineFit.fitted([float(point.tokens) for point in prefill], [point.base_ms for point in prefill])
    return StageResult(ModelFigures(alone / beside, tuple(decode), fit, host, tuple(prefill), by_tokens), lines.all)


def _judge_lora(points: Sequence[DecodePoint], lines: Lines) -> None:
    most = max(point.batch for point in points)
    for point in points:
        if point.batch == most and point.context >= _LORA_LEAST_CONTEXT:
            name = f"decode, batch {most}, context {point.context}: with {most} adapters ÷ without"
            lines.at_least(name, point.base_ms / point.lora_ms, _LORA_TARGET)


def _fit(subject: MeasuredModel, adapters: Sequence[int], batch: int, lines: Lines) -> DecodeFit:
    slots_of = [adapters[place :: len(RANKS)] for place in range(len(RANKS))]
    count, context = min(batch, *map(len, slots_of)), min(subject.setup.effort.contexts) - 1
    times_ms = tuple(subject.decode_ms(context, slots[:count]) for slots in slots_of)
    fit = LineFit.fitted([float(count * rank) for rank in RANKS], times_ms)
    lines.add("decode ms = α Σ ranks + β", f"α {1000 * fit.alpha_ms:.3f} µs, β {fit.beta_ms:.2f}, R² {fit.r2:.3f}")
    return DecodeFit(count, RANKS, times_ms, fit)


def _host(subject: MeasuredModel, mixed: Sequence[int], lines: Lines) -> HostCost:
    """Measures the host's share, and how much longer an iteration takes beside a busy Python thread."""
    context = min(subject.setup.effort.contexts) - 1
    cpu_us, ms = subject.host_us(context, mixed), subject.decode_ms(context, mixed)
    with busy_python_thread():
        busy_ms = subject.decode_ms(context, mixed)
    total_us = sum(cpu_us.values())
    lines.at_most(f"host's CPU time an iteration at batch {len(mixed)}, µs", total_us, _HOST_TARGET_US, ".0f")
    lines.add("… by thread", ", ".join(f"{name} {us:.0f}" for name, us in cpu_us.items()))
    lines.at_most("the same iteration beside a busy Python thread ÷ alone", busy_ms / ms, _BUSY_TARGET)
    return HostCost(len(mixed), cpu_us, ms, busy_ms)
