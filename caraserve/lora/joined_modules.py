"""Adapters whose modules are joined or split otherwise than the base model's: `q_proj`, `k_proj` and `v_proj` for a
base with `qkv_proj`, or the reverse. Both are exact.

Split names on a joined module become one adapter of the summed rank: A are stacked, B is block-diagonal. A joined name
on split modules shares A, and B is cut by rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from caraserve.core.lora_layout import MAX_RANK, Module
from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import Piece, View
from caraserve.lora.tensor_names import peft_name
from caraserve.model.linear_plan import LinearPlan, Rows, accumulated
from caraserve.model.plan import DecoderPlan

# Names of joined modules whose outputs are those of split ones, one after another.
_JOINED = {
    "qkv_proj": ("q", "k", "v"),
    "W_pack": ("q", "k", "v"),
    "gate_up_proj": ("gate", "up"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """Outputs of a base module, and those of a named module that they are."""

    module: Module
    rows: range  # of the named module
    at: Rows | None  # of the base module; None: all


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module that adapters name and that the base model has as a part of another, or as several."""

    inputs: int
    outputs: int
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class NamedUpdate:
    """A and B of a named module."""

    name: str
    a: str  # tensors in the file
    b: str
    rank: int
    scale: float
    module: NamedModule


@dataclass(frozen=True, slots=True)
class JoinedModule:
    """A base module that named ones change, with how its A and B are made."""

    names: tuple[str, ...]  # of the named ones
    tensors: Mapping[str, str]  # {name in the module: name of the view}
    rank: int
    scale: float
    views: Mapping[str, View]


def other_names(plan: DecoderPlan) -> dict[str, NamedModule]:
    """Returns the names that adapters may have for modules that are joined or split otherwise in the base model."""
    names: dict[str, NamedModule] = {}
    for name, (layer, index) in plan.adapter_modules.items():
        linears = plan.layers[layer].linears
        linear, (parent, _, word) = linears[index], name.rpartition(".")
        if len(linear.parts) > 1:
            net = plan.delta_nets.get(layer)
            is_joined = tuple(part.role for part in linear.parts) in _JOINED.values()
            if is_joined and (net is None or linear not in net.linears):  # no model has parts of others by themselves
                for one, found in _parts(linear, word, (layer, index)):
                    names.setdefault(f"{parent}.{one}", found)
            continue
        for joined_name, roles in _JOINED.items():
            if linear.parts[0].role == roles[0]:
                beside = [(layer, other) for other, one in enumerate(linears) if _parent(one) == _parent(linear)]
                if (several := _several(plan, beside, roles)) is not None:
                    names.setdefault(f"{parent}.{joined_name}", several)
    return {name: found for name, found in names.items() if name not in plan.adapter_modules}


def _parent(linear: LinearPlan) -> str:
    return linear.name_in_adapters.rpartition(".")[0]


def _parts(linear: LinearPlan, word: str, module: Module) -> Iterator[tuple[str, NamedModule]]:
    """Yields the names of a joined module's parts. The rows of a part are in ascending order in a module of its own."""
    roles = [part.role for part in linear.parts]
    joined = next((one for one in ("".join(roles), "_".join(roles)) if one in word), None)
    for part in linear.parts:
        target = Target(module, range(part.outputs), tuple(sorted(part.rows)))
        found = NamedModule(linear.inputs, part.outputs, (target,))
        yield f"{part.role}_proj", found
        if joined is not None:
            yield word.replace(joined, part.role), found


def _several(plan: DecoderPlan, beside: Sequence[Module], roles: Sequence[str]) -> NamedModule | None:
    """Returns the module that joins those with these roles, if each has only one."""
    by_role: dict[str, Module] = {}
    for layer, index in beside:
        parts = plan.layers[layer].linears[index].parts
        if len(parts) == 1:
            by_role[parts[0].role] = (layer, index)
    if not by_role.keys() >= set(roles):
        return None
    modules = [by_role[role] for role in roles]
    linears = [plan.layers[layer].linears[index] for layer, index in modules]
    *starts, outputs = accumulated(linear.outputs for linear in linears)
    targets = tuple(
        Target(module, range(start, start + linear.outputs), None)
        for module, linear, start in zip(modules, linears, starts, strict=True)
    )
    return NamedModule(linears[0].inputs, outputs, targets)


def joined(updates: Sequence[NamedUpdate], plan: DecoderPlan) -> dict[Module, JoinedModule]:
    """Returns the base modules that named ones change. Raises AdapterRejected for two that change the same outputs."""
    changes: dict[Module, list[tuple[NamedUpdate, Target]]] = {}
    for update in updates:
        for target in update.module.targets:
            others = changes.setdefault(target.module, [])
            for other, there in others:
                if target.at is None or there.at is None or not set(target.at).isdisjoint(there.at):
                    raise AdapterRejected(f"tensor {update.a} and {other.a} are the same module's")
            others.append((update, target))
    for parts in changes.values():
        parts.sort(key=lambda part: min(part[1].at or (0,)))  # the image does not depend on the file's order
    return {module: _joined(module, parts, plan) for module, parts in changes.items()}


def _joined(module: Module, parts: Sequence[tuple[NamedUpdate, Target]], plan: DecoderPlan) -> JoinedModule:
    linear = plan.layers[module[0]].linears[module[1]]
    name = linear.name_in_adapters
    scale = next((update.scale for update, _ in parts if update.scale), 0.0)
    *columns, rank = accumulated(update.rank for update, _ in parts)
    if rank > MAX_RANK:
        raise AdapterRejected(
            f"{name}: the ranks of its {len(parts)} parts add up to {rank}; {MAX_RANK} at most are served"
        )
    a = [Piece(update.a, at=range(at, at + update.rank)) for (update, _), at in zip(parts, columns, strict=True)]
    b = [
        Piece(update.b, rows=target.rows, at=target.at, column=at, factor=update.scale / scale if scale else 1.0)
        for (update, target), at in zip(parts, columns, strict=True)
    ]
    tensors = {tensor: peft_name(name, f"{tensor}.weight") for tensor in ("lora_A", "lora_B")}
    views = {
        tensors["lora_A"]: View((rank, linear.inputs), tuple(a)),
        tensors["lora_B"]: View((linear.outputs, rank), tuple(b)),
    }
    return JoinedModule(tuple(update.name for update, _ in parts), tensors, rank, scale, views)
