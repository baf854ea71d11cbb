"""Points of decode and prefill of a measured model, beside what the device's memory and products allow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from caraserve.model.plan import DecoderPlan
from scripts.laboratory.gpu.backends import DTYPE
from scripts.laboratory.gpu.measured_model import MeasuredModel
from scripts.laboratory.gpu.results import Lines

RANKS = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Decode iterations of `batch` requests, all at `context`: without adapters, and with another one in each."""

    batch: int
    context: int
    base_ms: float
    lora_ms: float
    share_of_floor: float  # floor ÷ base_ms


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """The prefill of one prompt, without and with an adapter."""

    tokens: int
    base_ms: float
    lora_ms: float


def floor_ms(plan: DecoderPlan, tokens: int, bytes_per_s: float) -> float:
    """Returns the time in which the device reads what an iteration must: all weights but the embeddings, and the keys
    and values of `tokens` tokens."""
    weights = (plan.num_parameters - plan.vocab_size * plan.hidden) * DTYPE.itemsize
    return 1000 * (weights + tokens * plan.kv_bytes_per_token(DTYPE.itemsize)) / bytes_per_s


def load_adapters(subject: MeasuredModel, count: int) -> list[int]:
    """Loads `count` adapters of q, k and v, at least one of each of RANKS in turn; returns their slots. Equal ranks
    share one host image."""
    images = [subject.adapter(rank, "qkv") for rank in RANKS]
    slots = list(range(1, max(count, len(RANKS)) + 1))
    for slot in slots:
        image = images[(slot - 1) % len(RANKS)]
        assert image is not None, "the host tier is too small"
        subject.session.load(image, slot)
    return slots


def decode_points(
    subject: MeasuredModel,
    batches: Sequence[int],
    contexts: Sequence[int],
    adapters: Sequence[int],
    bytes_per_s: float,
    targets: Mapping[tuple[int, int], float],
    lines: Lines,
) -> list[DecodePoint]:
    """Measures batches of up to `len(adapters)` requests at every context, while there is time. `targets`: least share
    of the floor's speed, by (batch, context)."""
    points = list[DecodePoint]()
    for batch in (batch for batch in batches if batch <= len(adapters)):
        for context in contexts:
            if points and subject.setup.left_s < 0:
                break
            base_ms = subject.decode_ms(context - 1, [0] * batch)
            lora_ms = subject.decode_ms(context - 1, adapters[:batch])
            share = floor_ms(subject.plan, batch * context, bytes_per_s) / base_ms
            points.append(DecodePoint(batch, context, base_ms, lora_ms, share))
            name, value = f"decode, batch {batch}, context {context}", f"{base_ms:.2f} ms, {share:.0%} of the floor"
            target = targets.get((batch, context))
            if target is None:
                lines.add(name, value)
            else:
                lines.add(name, value, f"≥ {target:.0%}", share >= target)
    return points


def prefill_points(subject: MeasuredModel, lengths: Sequence[int], adapter: int, lines: Lines) -> list[PrefillPoint]:
    """Measures the prefill of one prompt of every length, without and with the adapter in slot `adapter`."""
    points = []
    for count in lengths:
        base_ms, lora_ms = subject.prefill_ms(count, 0), subject.prefill_ms(count, adapter)
        points.append(PrefillPoint(count, base_ms, lora_ms))
        value = f"{base_ms:.2f} ms, {2 * count * subject.plan.num_parameters / base_ms / 1e9:.0f} TFLOP/s"
        lines.add(f"prefill of {count} tokens", f"{value}; with an adapter {lora_ms / base_ms:.2f} times as long")
    return points
