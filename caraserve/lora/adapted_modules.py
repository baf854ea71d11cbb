"""Which modules of the base model an adapter's tensors change: by their names, ranks and shapes. Reads no tensor.

Every tensor belongs to a module, or to a part of the model that text does not use, or is a copy of one of the base
model's; else the adapter is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from caraserve.core.lora_layout import Module
from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import AdapterTensors
from caraserve.lora.base_copies import BaseCopy, base_copy
from caraserve.lora.joined_modules import NamedModule, NamedUpdate, joined, other_names
from caraserve.lora.kinds import AdapterKind
from caraserve.lora.peft_config import PeftConfig, target_names
from caraserve.lora.peft_fields import refusal
from caraserve.lora.score_heads import is_of_head
from caraserve.lora.tensor_names import is_ignored, normalised, saved_tensor
from caraserve.lora.vocabulary import vocabulary_tensor
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.plan import DecoderPlan

_LAYER_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,5})(?=\.)")


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One adapted module, with its rank and scale."""

    names: tuple[str, ...]  # in the file, of the module or of its parts
    tensors: Mapping[str, str]  # {name in the module: name of the tensor}
    rank: int
    scale: float


@dataclass(slots=True)
class FoundTensors:
    """The tensors of an adapter's file by what they are."""

    modules: dict[str, dict[str, str]] = field(default_factory=dict)  # by the module's name in the file
    vocabulary: dict[str, dict[str, str]] = field(default_factory=dict)  # likewise, of the embedding and the head
    copies: list[BaseCopy] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)  # of score heads

    @property
    def notes(self) -> list[str]:
        """What is left out, for the log."""
        if not self.ignored:
            return []
        return [f"{len(self.ignored)} tensors of parts that text does not use are left out, as {self.ignored[0]}"]


def find_tensors(
    file: AdapterTensors, kind: AdapterKind, plan: DecoderPlan, base: BaseTensors | None = None
) -> FoundTensors:
    """Sorts all tensors by what they are. Raises AdapterRejected for one that is nothing known, and
    TensorFileError."""
    found, adapters = FoundTensors(), set[str]()
    known: set[str] = set(plan.adapter_modules)
    shared, found_shared = {f"base_model.{one}": one for one in kind.shared}, dict[str, str]()
    for name in file.names:
        if name in shared:
            found_shared[shared[name]] = name
            continue
        own = normalised(name)
        if is_of_head(own):
            found.heads.append(name)
            continue
        match = kind.tensor_name.fullmatch(own)
        if match is not None and match["module"] not in known and len(known) == len(plan.adapter_modules):
            known |= other_names(plan).keys()
        if match is None or match["module"] not in known:
            _sort_other(name, found, file, kind, plan, base)
            continue
        tensors = found.modules.setdefault(match["module"], {})
        tensor = match["tensor"] + (match.groupdict().get("suffix") or "")
        if tensor in tensors:
            raise AdapterRejected(f"tensor {name} and {tensors[tensor]} are the same module's")
        tensors[tensor] = name
        adapters.add(match["adapter"])
        if len(adapters) > 1:
            raise AdapterRejected(f"tensor {name} belongs to another adapter than those before it")
    for tensors in found.modules.values():
        tensors |= found_shared
    return found


def _sort_other(
    name: str,
    found: FoundTensors,
    file: AdapterTensors,
    kind: AdapterKind,
    plan: DecoderPlan,
    base: BaseTensors | None,
) -> None:
    """Sorts a tensor that is of no module."""
    own = normalised(name)
    if is_ignored(own, plan):
        found.ignored.append(name)
        return
    if (place := vocabulary_tensor(own, plan)) is not None:
        module, tensor = place
        if (other := found.vocabulary.setdefault(module, {}).setdefault(tensor, name)) != name:
            raise AdapterRejected(f"tensor {name} and {other} are the same module's")
        return
    saved = saved_tensor(name)
    if saved is not None and base is not None and (copy := base_copy(saved, file, base)) is not None:
        found.copies.append(copy)
        return
    match = kind.tensor_name.fullmatch(own)
    if match is not None and _is_past_the_last_layer(match["module"], plan):
        raise AdapterRejected(f"tensor {name}: the base model has only {len(plan.layers)} layers")
    known = ", ".join(target_names(plan))
    raise AdapterRejected(f"tensor {ascii(name)[:200]} is not {kind.what} of one of {known}")


def _is_past_the_last_layer(module: str, plan: DecoderPlan) -> bool:
    number = _LAYER_NUMBER.search(module)
    if number is None or int(number[0]) < len(plan.layers):
        return False
    start, end = module[: number.start()], module[number.end() :]
    return any(f"{start}{layer}{end}" in plan.adapter_modules for layer in range(len(plan.layers)))


def adapted_modules(
    file: AdapterTensors, found: FoundTensors, config: PeftConfig, plan: DecoderPlan
) -> tuple[AdapterTensors, dict[Module, AdaptedModule]]:
    """Returns the adapted modules, and the tensors of which they consist. Raises AdapterRejected for tensors that are
    missing, not targeted or of another shape, and TensorFileError."""
    if config.layers is not None and max(config.layers) >= len(plan.layers):
        raise refusal("layers_to_transform", f"names layers that a model with {len(plan.layers)} does not have")
    needs_others = not found.modules.keys() <= plan.adapter_modules.keys() or not config.is_known_to(plan)
    others = other_names(plan) if needs_others else {}
    direct: dict[Module, AdaptedModule] = {}
    updates: list[NamedUpdate] = []
    for name, tensors in found.modules.items():
        if (module := plan.adapter_modules.get(name)) is None:
            updates.append(_update(file, name, tensors, config, others[name]))
            continue
        linear = plan.layers[module[0]].linears[module[1]]
        one = _checked(file, name, tensors, config, module[0])
        if module in direct:
            needed = config.kind.sources["A"][0]
            first, other = tensors[needed], direct[module].tensors[needed]
            raise AdapterRejected(f"tensor {first} and {other} are the same module's")
        _check_shapes(file, tensors, config.kind.shapes(one.rank, linear), one.rank, config.kind.shared)
        direct[module] = one
    modules = dict(direct)
    changed = joined(updates, plan)
    for module, made in changed.items():
        if module in direct:
            raise AdapterRejected(f"{direct[module].names[0]} and {made.names[0]} are the same module's")
        modules[module] = AdaptedModule(made.names, made.tensors, made.rank, made.scale)
    if changed:
        file = file.with_views({name: view for made in changed.values() for name, view in made.views.items()})
    if not (modules or found.vocabulary):
        raise AdapterRejected(f"{file.name} has no LoRA tensors")
    _check_required(found, direct, modules, config, plan, others, file.name)
    return file, modules


def _checked(
    file: AdapterTensors, name: str, tensors: Mapping[str, str], config: PeftConfig, layer: int
) -> AdaptedModule:
    """Returns a module of the file that has all tensors and is targeted."""
    needed = [one for names in config.kind.sources.values() for one in names]
    if missing := [one for one in needed if one not in tensors]:
        if missing[0] in config.kind.shared:
            raise AdapterRejected(f"{file.name} has no {missing[0]}, which all modules share")
        raise AdapterRejected(f"tensor {next(iter(tensors.values()))} has no {missing[0]} beside it")
    if not config.covers(layer, name):
        raise AdapterRejected(f"tensor {tensors[needed[0]]}: adapter_config.json does not target this module")
    return AdaptedModule((name,), tensors, config.kind.rank(name), config.kind.scale(name))


def _update(
    file: AdapterTensors, name: str, tensors: Mapping[str, str], config: PeftConfig, module: NamedModule
) -> NamedUpdate:
    """Returns what changes a module that is joined or split otherwise in the base model."""
    one = _checked(file, name, tensors, config, module.targets[0].module[0])
    if tensors.keys() != {"lora_A", "lora_B"} or config.kind.is_computed:
        raise AdapterRejected(f"{name} is joined or split otherwise in the base model; of such, only LoRA is served")
    shapes = {"lora_A": (one.rank, module.inputs), "lora_B": (module.outputs, one.rank)}
    _check_shapes(file, tensors, shapes, one.rank, {})
    return NamedUpdate(name, tensors["lora_A"], tensors["lora_B"], one.rank, one.scale, module)


def _check_shapes(
    file: AdapterTensors,
    tensors: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    shared: Mapping[str, int],
) -> None:
    """`shared`: by tensor, the axis of which a module may use a part."""
    for name, expected in shapes.items():
        shape, axis = file.shape(tensors[name]), shared.get(name)
        fits = tuple(size if index != axis else min(size, expected[axis]) for index, size in enumerate(shape))
        if fits != expected:
            raise AdapterRejected(
                f"tensor {tensors[name]} has shape {list(shape)}; rank {rank} on this base model needs {list(expected)}"
            )


def _check_required(
    found: FoundTensors,
    direct: Mapping[Module, AdaptedModule],
    modules: Mapping[Module, AdaptedModule],
    config: PeftConfig,
    plan: DecoderPlan,
    others: Mapping[str, NamedModule],
    file: str,
) -> None:
    """Raises AdapterRejected for a module that is targeted by name and has no tensors."""
    lost = [name for name, module in plan.adapter_modules.items() if module not in modules]
    for name, other in others.items():
        is_part = other.targets[0].at is not None
        places = {target.module for target in other.targets}
        if name not in found.modules and not places <= (direct if is_part else modules).keys():
            lost.append(name)
    for name in lost:
        layer = (plan.adapter_modules.get(name) or others[name].targets[0].module)[0]
        if config.requires(layer, name):
            raise refusal("target_modules", f"covers {name}, but {file} has no tensors for it")
