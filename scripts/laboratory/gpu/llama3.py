"""Stage `llama3`: iterations of a Llama-3-8B shape, whose query heads share keys and values, up to a context of 32K."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.laboratory.gpu.backends import DTYPE
from scripts.laboratory.gpu.iterations import (
    RANKS,
    DecodePoint,
    PrefillPoint,
    decode_points,
    floor_ms,
    load_adapters,
    prefill_points,
)
from scripts.laboratory.gpu.limits import memory_bytes_per_s
from scripts.laboratory.gpu.measured_model import MeasuredModel, measured_model
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup

_FLOOR_TARGETS = {1: 0.75, 64: 0.80}  # by batch, at the longest of the short contexts
_ADDED_RANK = 16
_LONG_TARGET = 0.70  # of the floor's speed, one request with the longest context


@dataclass(frozen=True, slots=True)
class LongContext:
    """A prompt of `tokens` tokens, prefilled in chunks, and decode iterations at that context."""

    tokens: int
    chunk_ms: tuple[float, ...]
    decode_ms: dict[int, float]  # by batch


@dataclass(frozen=True, slots=True)
class AddedLora:
    """Decode iterations of `batch` requests: on the base model, and with adapters of every module."""

    batch: int
    adapters: int
    rank: int
    base_ms: float
    lora_ms: float


@dataclass(frozen=True, slots=True)
class Llama3Figures:
    """Points with short contexts, what LoRA of a small rank adds, and the long context."""

    decode: tuple[DecodePoint, ...]
    added_lora: tuple[AddedLora, ...]
    prefill: tuple[PrefillPoint, ...]
    long: LongContext


def llama3(setup: CheckSetup) -> StageResult[Llama3Figures]:
    """Measures decode and prefill with one backend, whose longest context is the long one."""
    effort, lines = setup.effort, Lines()
    bytes_per_s = memory_bytes_per_s(setup, setup.accelerator(DTYPE))
    slots, context = max(effort.batches), max(effort.gqa_contexts)
    adapter_slots = max(slots, len(RANKS)) + effort.added_adapters + 1
    with measured_model(setup, slots, effort.long_context, adapter_slots, shape=effort.gqa_shape) as subject:
        long = _long(setup, subject, bytes_per_s, lines)
        short = MeasuredModel(setup, subject.backend, subject.plan, context)
        fitting = short.grow_contexts(slots)
        short.fill(range(fitting), context)
        adapters = load_adapters(short, fitting)
        targets = {(batch, context): share for batch, share in _FLOOR_TARGETS.items()}
        batches = sorted({min(effort.batches), max(effort.batches)})
        decode = decode_points(short, batches, effort.gqa_contexts, adapters[:fitting], bytes_per_s, targets, lines)
        added = _added_lora(short, batches, context, max(adapters) + 1, lines)
        prefill = prefill_points(short, effort.prompts[-1:], adapters[len(RANKS) - 1], lines)
    return StageResult(Llama3Figures(tuple(decode), added, tuple(prefill), long), lines.all)


def _added_lora(
    subject: MeasuredModel, batches: Sequence[int], context: int, first_slot: int, lines: Lines
) -> tuple[AddedLora, ...]:
    """Measures requests on the base model and on adapters of a small rank in turn, which are loaded into the slots from
    `first_slot` on. There the time of launches weighs most."""
    image, most = subject.adapter(_ADDED_RANK, "all"), subject.setup.effort.added_adapters
    assert image is not None, "the host tier is too small"
    slots = range(first_slot, first_slot + most)
    for slot in slots:
        subject.session.load(image, slot)
    points = list[AddedLora]()
    for batch in batches:
        count = min(batch, most)
        base_ms = subject.decode_ms(context - 1, [0] * batch)
        lora_ms = subject.decode_ms(context - 1, [slots[row % count] for row in range(batch)])
        points.append(AddedLora(batch, count, _ADDED_RANK, base_ms, lora_ms))
        name = f"decode, batch {batch}, {count} adapters of rank {_ADDED_RANK} on all modules"
        lines.add(name, f"{base_ms:.2f} + {lora_ms - base_ms:.2f} ms, {base_ms / lora_ms:.2f} of the base's speed")
    return tuple(points)


def _long(setup: CheckSetup, subject: MeasuredModel, bytes_per_s: float, lines: Lines) -> LongContext:
    """Measures one request with the longest context, and more of them while there is time."""
    context, chunk = setup.effort.long_context, subject.backend.limits.max_step_tokens
    fitting = subject.grow_contexts(max(setup.effort.long_batches))
    chunk_ms = subject.fill([0], context)
    lines.add(f"prefill of {context} tokens, in chunks of {chunk}", f"{sum(chunk_ms):.0f} ms")
    lines.add("its last chunk", f"{_last_chunk_flops(subject, context, chunk) / chunk_ms[-1] / 1e9:.0f} TFLOP/s")
    decode_ms = dict[int, float]()
    filled = 1
    for batch in (batch for batch in setup.effort.long_batches if batch <= fitting):
        if decode_ms and setup.left_s < setup.budget_s / 2:
            break
        subject.fill(range(filled, batch), context)
        filled = max(filled, batch)
        decode_ms[batch] = subject.decode_ms(context - 1, [0] * batch)
        share = floor_ms(subject.plan, batch * context, bytes_per_s) / decode_ms[batch]
        name, value = (
            f"decode, batch {batch}, context {context}",
            f"{decode_ms[batch]:.2f} ms, {share:.0%} of the floor",
        )
        if batch == 1:
            lines.add(name, value, f"≥ {_LONG_TARGET:.0%}", share >= _LONG_TARGET)
        else:
            lines.add(name, value)
    return LongContext(context, tuple(chunk_ms), decode_ms)


def _last_chunk_flops(subject: MeasuredModel, context: int, chunk: int) -> float:
    """Returns the operations of products by weights and of attention, in the last chunk of a prompt."""
    plan, count = subject.plan, (context - 1) % chunk + 1
    seen = context - count / 2  # positions that a token of the chunk attends to, on average
    attention = sum(one.heads * one.head_dim for one in plan.attentions)
    return 2.0 * count * plan.num_parameters + 4.0 * attention * count * seen
