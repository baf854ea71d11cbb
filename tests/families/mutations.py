"""Changes of one field of a plan, in all places that have it: the comparison with transformers must see each."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import Attention, Block, DecoderPlan, DeltaNet, LayerPlan, Mlp, Moe, Norm, Rope
from tests.plans.executor import CONTEXT

Change = Callable[[Any], Any]  # None: there is nothing to change in this instance

MUTATIONS: dict[str, tuple[type, Change]] = {
    "eps": (Norm, lambda norm: replace(norm, eps=norm.eps + 0.02)),
    "kind of norm": (Norm, lambda norm: replace(norm, kind="rms" if norm.kind == "layer" else "layer")),
    "offset of norm": (Norm, lambda norm: replace(norm, offset=1 - norm.offset)),
    "bias of norm": (Norm, lambda norm: replace(norm, bias=None) if norm.bias else None),
    "order of norm": (Norm, lambda norm: replace(norm, order=None) if norm.order else None),
    "frequencies": (
        Rope,
        lambda rope: replace(
            rope,
            frequencies=tuple(1.01 * each for each in rope.frequencies),
            long_frequencies=tuple(1.01 * each for each in rope.long_frequencies),
        ),
    ),
    "factor of rope": (
        Attention,
        lambda body: (
            None  # norms after the rotation divide by it
            if body.rope is None or body.norm_after_rope
            else replace(body, rope=replace(body.rope, factor=1.02 * body.rope.factor))
        ),
    ),
    "growth of q": (Rope, lambda rope: replace(rope, q_growth=None if rope.q_growth else (0.1, 16))),
    "length of short requests": (
        Rope,
        lambda rope: (
            replace(rope, longest_short=0 if rope.longest_short >= CONTEXT else CONTEXT)
            if rope.long_frequencies
            else None
        ),
    ),
    "rope": (Attention, lambda body: replace(body, rope=None) if body.rope else None),
    "scale": (Attention, lambda body: replace(body, scale=1.02 * body.scale)),
    "smaller window": (Attention, lambda body: replace(body, window=(body.window or 40) - 1)),
    "larger window": (Attention, lambda body: replace(body, window=body.window + 1) if body.window else None),
    "cap": (Attention, lambda body: replace(body, cap=1.1 * body.cap if body.cap else 5.0)),
    "norm of q": (Attention, lambda body: replace(body, q_norm=None) if body.q_norm else None),
    "norm of k": (Attention, lambda body: replace(body, k_norm=None) if body.k_norm else None),
    "norms after rope": (
        Attention,
        lambda body: replace(body, norm_after_rope=not body.norm_after_rope) if body.q_norm and body.rope else None,
    ),
    "sinks": (Attention, lambda body: replace(body, sinks=None) if body.sinks else None),
    "k and v swapped": (Attention, lambda body: _swapped(body, "k", "v")),
    "gate and up swapped": (Mlp, lambda body: _swapped(body, "gate", "up")),
    "activation": (Mlp, lambda body: replace(body, activation="gelu" if body.activation != "gelu" else "silu")),
    "bias of linear": (LinearPlan, lambda linear: replace(linear, bias=False) if linear.bias else None),
    "experts": (Moe, lambda body: replace(body, top_k=body.top_k - 1)),
    "scores": (Moe, lambda body: replace(body, scores="softmax" if body.scores == "sigmoid" else "sigmoid")),
    "normalise": (Moe, lambda body: replace(body, normalise=not body.normalise)),
    "scale of experts": (Moe, lambda body: replace(body, scale=1.02 * body.scale)),
    "correction": (Moe, lambda body: replace(body, correction=None) if body.correction else None),
    "groups": (Moe, lambda body: replace(body, groups=None) if body.groups else None),
    "scores of groups": (
        Moe,
        lambda body: replace(body, groups=(*body.groups[:2], "max")) if body.groups else None,
    ),
    "activation of experts": (Moe, lambda body: replace(body, activation="gelu")),
    "gate and up of experts swapped": (Moe, lambda body: replace(body, gate=body.up, up=body.gate)),
    "q and k of delta nets swapped": (DeltaNet, lambda body: _swapped(body, "q", "k")),
    "decay and rate of delta nets swapped": (DeltaNet, lambda body: _swapped(body, "a", "b")),
    "biases of delta nets swapped": (
        DeltaNet,
        lambda body: replace(body, log_decay=body.step_bias, step_bias=body.log_decay),
    ),
    "norm before a block": (Block, lambda block: replace(block, pre=None) if block.pre else None),
    "norm after a block": (Block, lambda block: replace(block, post=None) if block.post else None),
    "multiplier": (Block, lambda block: replace(block, multiplier=1.02 * block.multiplier)),
    "embedding scale": (DecoderPlan, lambda plan: replace(plan, embed_scale=1.02 * plan.embed_scale)),
    "logit scale": (DecoderPlan, lambda plan: replace(plan, logit_scale=1.02 * plan.logit_scale)),
    "logit cap": (DecoderPlan, lambda plan: replace(plan, logit_cap=1.1 * plan.logit_cap if plan.logit_cap else 9.0)),
    "head": (DecoderPlan, lambda plan: replace(plan, head=None) if plan.head else None),
    "head bias": (DecoderPlan, lambda plan: replace(plan, head_bias=None) if plan.head_bias else None),
    "unit rows of the head": (DecoderPlan, lambda plan: replace(plan, has_unit_head_rows=not plan.has_unit_head_rows)),
    "positions": (DecoderPlan, lambda plan: replace(plan, positions=None) if plan.positions else None),
}


def mutants(plan: DecoderPlan) -> Iterator[tuple[str, DecoderPlan]]:
    """Yields the plan with each change for which it has a place."""
    for name, (kind, change) in MUTATIONS.items():
        changed = _mapped(plan, kind, change)
        if changed is not None:
            yield name, changed


def _mapped(value: Any, kind: type, change: Change) -> Any:
    """Returns a value with all instances of `kind` in it changed; None if there is none to change."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        mapped = [_mapped(each, kind, change) for each in value]
        if all(each is None for each in mapped):
            return None
        return tuple(old if new is None else new for old, new in zip(value, mapped, strict=True))
    if not is_dataclass(value) or isinstance(value, type):
        return None
    found = {field.name: _mapped(getattr(value, field.name), kind, change) for field in fields(value)}
    changes = {name: new for name, new in found.items() if new is not None}
    if not changes:
        return None
    return LayerPlan(changes["blocks"]) if isinstance(value, LayerPlan) else replace(value, **changes)


def _swapped(body: Any, one: str, other: str) -> Any:
    """Returns a body whose parts of two roles have exchanged them; None if it lacks one of them."""
    roles = {part.role for linear in body.linears for part in linear.parts}
    if not {one, other} <= roles:
        return None
    names = {one: other, other: one}
    linears = tuple(
        replace(linear, parts=tuple(replace(part, role=names.get(part.role, part.role)) for part in linear.parts))
        for linear in body.linears
    )
    return replace(body, linears=linears)
