"""Reads an adapter's `adapter_config.json`, and refuses what is not supported.

The rule: a field is applied exactly, or changes nothing in inference, or the adapter is refused with the field's name.
Nothing from the file is executed here. The tensors say which modules were adapted; a regular expression in
`target_modules` or `exclude_modules` must agree with them, and is matched by a process that can be killed
(`target_patterns.py`). Other patterns are taken only where they are plain names.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caraserve.core.adapter_facts import MAX_BASE_NAME
from caraserve.core.adapter_rules import MAX_INVOCATION_TOKENS, are_invocation_tokens
from caraserve.errors import AdapterRejected
from caraserve.lora.folder_bytes import read_bytes
from caraserve.lora.joined_modules import other_names
from caraserve.lora.kinds import AdapterKind, kind_of
from caraserve.lora.peft_fields import CONFIG_NAME, Fields, name_ends, refusal, shown
from caraserve.lora.score_heads import HEAD_FIELDS, HEADS, HeadSettings, read_settings
from caraserve.lora.target_patterns import matched
from caraserve.model.plan import DecoderPlan
from caraserve.model.vocabulary import vocabulary_targets

_MAX_CONFIG_BYTES = 1 << 20
_SHOWN = 5  # names in a message

# Fields that say where an adapter came from or how it was trained; they change nothing in inference.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "task_type"),
    *("peft_version", "runtime_config", "ensure_weight_tying", "velora_config"),
    "fan_in_fan_out",  # of the base's weights; A and B have the same shapes with either value
    # how A and B were initialised; where that changes the base weights too, init_lora_weights is refused
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size"),  # names and sizes that only other, refused fields would use
}
# Fields that other programs add, which change nothing either.
_FOREIGN = {"task", "unsloth_version", "unsloth_fixed", "base_model_class", "parent_library"}
# Fields that are refused in words of their own.
_REFUSED = {"layer_replication": "builds another base model; merge the adapter into that base"}
# Fields of every kind, that are read below and applied or refused there.
_UNDERSTOOD = {"peft_type", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
_INVOCATION = "alora_invocation_tokens"
TRAINED_TOKENS = "trainable_token_indices"  # whose rows of the embedding were trained
_PARAMETERS = "target_parameters"  # where peft writes the router of an MoE, which transformers has no Linear for
_WEIGHT = ".weight"
_OF_MODULES = ("rank_pattern", "alpha_pattern", "layers_to_transform")  # which peft matches otherwise for parameters
_UNDERSTOOD |= {"modules_to_save", _INVOCATION, TRAINED_TOKENS, _PARAMETERS}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of the configuration that decide which modules an adapter changes, and how."""

    kind: AdapterKind
    targets: frozenset[str] | None  # names or dotted ends of names; None: a pattern
    excluded: frozenset[str] | None
    target_pattern: str | None  # a regular expression in place of names
    excluded_pattern: str | None
    layers: frozenset[int] | None  # None: every layer
    saved: tuple[str, ...]  # ends of the names of trained modules, whose tensors are in the file
    invocation: tuple[int, ...]  # of an activated LoRA: the tokens from which on it is active
    tokens: Any  # whose rows were trained: a list, or lists by module; None: none; not checked
    notes: tuple[str, ...]  # what of the configuration is left out, for the log
    trained_on: str  # the base model's name; empty if it is not given
    head: HeadSettings

    def covers(self, layer: int, module: str) -> bool:
        """Returns whether the configuration targets a module that has tensors."""
        ends = name_ends(module)
        if self.excluded is not None and not self.excluded.isdisjoint(ends):
            return False
        if self.targets is not None and module in self.targets:
            return True  # peft applies layers_to_transform to ends of names only
        named = self.targets is None or not self.targets.isdisjoint(ends)
        return named and (self.layers is None or layer in self.layers)

    def is_known_to(self, plan: DecoderPlan) -> bool:
        """Returns whether all names that are targeted are those of modules in the base model."""
        known = target_names(plan)
        return self.targets is None or all(name.split(".")[-1] in known for name in self.targets)

    def check_patterns(self, modules: tuple[str, ...]) -> None:
        """Raises AdapterRejected unless the regular expressions target all modules that have tensors, or ServerBusy if
        they cannot be matched now. Waits for a process."""
        targeted = self._matched("target_modules", self.target_pattern, modules)
        if targeted is not None and not targeted:
            raise refusal("target_modules", f"is {shown(self.target_pattern)}, which matches no module with tensors")
        excluded = self._matched("exclude_modules", self.excluded_pattern, modules) or frozenset()
        for module in modules:
            if module in excluded or (targeted is not None and module not in targeted):
                raise AdapterRejected(f"{module} has tensors, and {CONFIG_NAME} does not target this module")

    def _matched(self, field: str, pattern: str | None, modules: tuple[str, ...]) -> frozenset[str] | None:
        try:
            return None if pattern is None else matched(pattern, modules)
        except ValueError as error:
            raise refusal(field, f"is {shown(pattern)}: {error}") from None

    def requires(self, layer: int, module: str) -> bool:
        """Returns whether a module must have tensors: it is targeted by name, and no regular expression may exclude
        it."""
        return self.targets is not None and self.excluded is not None and self.covers(layer, module)


def target_names(plan: DecoderPlan) -> tuple[str, ...]:
    """Returns the names by which adapters target the base model's modules, its embedding and its head."""
    return *plan.targets, *vocabulary_targets(plan).values()


def parse_config(fields: Fields, plan: DecoderPlan) -> PeftConfig:
    """Reads the fields of a configuration. Raises AdapterRejected naming the field."""
    kind = kind_of(fields)
    _refuse_unknown(fields, kind)
    _check_layers_pattern(fields.get("layers_pattern"), plan)
    head = read_settings(fields)
    notes = [f"{CONFIG_NAME}: {field} is left out" for field in sorted(_FOREIGN & fields.keys()) if fields[field]]
    foreign = _foreign_targets(fields.get("target_modules"), plan)
    if foreign:
        some = ", ".join(shown(name) for name in foreign[:_SHOWN])
        notes.append(f"{CONFIG_NAME}: target_modules has {some}, which the base model lacks")
    return PeftConfig(
        kind=kind(fields, plan),
        targets=_targets(fields.get("target_modules"), foreign, _parameters(fields, kind, plan), plan),
        excluded=_excluded(fields.get("exclude_modules")),
        target_pattern=_pattern(fields.get("target_modules")),
        excluded_pattern=_pattern(fields.get("exclude_modules")),
        layers=_layers(fields.get("layers_to_transform")),
        saved=tuple(name for name in _saved(fields.get("modules_to_save")) if name not in HEADS),
        invocation=_invocation(fields.get(_INVOCATION), kind, plan),
        tokens=fields.get(TRAINED_TOKENS),
        notes=tuple(notes),
        trained_on=_name(fields.get("base_model_name_or_path")),
        head=head,
    )


def load_fields(path: Path) -> dict[str, Any]:
    """Reads a file with a JSON object. Raises AdapterRejected."""
    try:
        fields = json.loads(read_bytes(path, _MAX_CONFIG_BYTES))
    except (ValueError, RecursionError):
        raise AdapterRejected(f"{path.name} is not valid JSON") from None
    if not isinstance(fields, dict):
        raise AdapterRejected(f"{path.name} must hold a JSON object")
    return fields


def _refuse_unknown(fields: Fields, kind: type[AdapterKind]) -> None:
    known = _HARMLESS | _FOREIGN | _UNDERSTOOD | HEAD_FIELDS | kind.fields
    for field, value in fields.items():
        if value and field in _REFUSED:
            raise refusal(field, _REFUSED[field])
        if value and field not in known:
            name = field if field.isascii() and field.isidentifier() else shown(field)
            raise refusal(name[:80], f"is {shown(value)}; adapters that use it are not supported")


def _check_layers_pattern(value: Any, plan: DecoderPlan) -> None:
    """Refuses all names but those of the list of layers, as in peft: `layers` or `model.layers`."""
    names = value if isinstance(value, list) else [value]
    if not value:
        return
    lists = {re.split(r"\.[0-9]+\.", module)[0] for module in plan.adapter_modules}
    ends = {one.rpartition(".")[2] for one in lists}
    if not any(isinstance(name, str) and name in lists | ends for name in names):
        known = " or ".join(repr(end) for end in sorted(ends))
        raise refusal("layers_pattern", f"is {shown(value)}; the base model's layers are at {known}")


def _invocation(value: Any, kind: type[AdapterKind], plan: DecoderPlan) -> tuple[int, ...]:
    if value is None:
        return ()
    if not are_invocation_tokens(value):
        raise refusal(_INVOCATION, f"is {shown(value)}; a list of 1 to {MAX_INVOCATION_TOKENS} token ids is needed")
    if (kind.peft_type, kind.switch) != ("LORA", None):
        raise refusal(_INVOCATION, "is set; only plain LoRA can be activated")
    if max(value) >= plan.vocab_size:
        raise refusal(_INVOCATION, f"has {max(value)}; the base model has the tokens 0 to {plan.vocab_size - 1}")
    return tuple(value)


def _pattern(value: Any) -> str | None:
    return value if isinstance(value, str) and value and value != "all-linear" else None


def _parameters(fields: Fields, kind: type[AdapterKind], plan: DecoderPlan) -> frozenset[str]:
    """Returns the modules whose weights are targeted as parameters: of a matrix, A and B are those of its module."""
    value = fields.get(_PARAMETERS)
    if not value:
        return frozenset()
    names = value if _are_names(value) else []
    modules = frozenset(name.removesuffix(_WEIGHT) for name in names if name.endswith(_WEIGHT))
    known = len(modules) == len(names) > 0 and all(name.split(".")[-1] in plan.targets for name in modules)
    is_plain = (kind.peft_type, kind.switch) == ("LORA", None) and isinstance(fields.get("target_modules"), list)
    if not (known and is_plain) or any(fields.get(field) for field in _OF_MODULES):
        raise refusal(_PARAMETERS, f"is {shown(value)}; adapters that use it are not supported")
    return modules


def _targets(
    value: Any, foreign: Sequence[str], parameters: frozenset[str], plan: DecoderPlan
) -> frozenset[str] | None:
    """`foreign`: the names in the list that no module of the base model has."""
    if parameters and not value:
        return parameters
    if value == "all-linear":
        return frozenset(plan.targets)
    if isinstance(value, str) and value:
        return None
    if not value or not _are_names(value):
        raise refusal("target_modules", "must be a list of module names, or a pattern")
    if len(foreign) == len(value):
        raise refusal(
            "target_modules", f"has {shown(foreign[0])}; supported modules are {', '.join(target_names(plan))}"
        )
    return frozenset(value) | parameters


def _foreign_targets(value: Any, plan: DecoderPlan) -> list[str]:
    """Returns the names in a list of targets that no module of the base model has."""
    ours = target_names(plan)
    if not _are_names(value) or all(name.split(".")[-1] in ours for name in value):
        return []
    known = {*ours, *(name.rpartition(".")[2] for name in other_names(plan))}
    return [name for name in value if name.split(".")[-1] not in known]


def _excluded(value: Any) -> frozenset[str] | None:
    if isinstance(value, str) and value:
        return None
    if value and not _are_names(value):
        raise refusal("exclude_modules", "must be a list of module names, or a pattern")
    return frozenset(value or ())


def _name(value: Any) -> str:
    """Returns a name that no check depends on; of other values, nothing."""
    text = value.strip()[:MAX_BASE_NAME] if isinstance(value, str) else ""
    return text if text.isprintable() else ascii(text)[1:-1][:MAX_BASE_NAME]


def _saved(value: Any) -> tuple[str, ...]:
    if value and not _are_names(value):
        raise refusal("modules_to_save", f"is {shown(value)}; a list of module names is needed")
    return tuple(value or ())


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in values):
        raise refusal("layers_to_transform", f"is {shown(value)}; layer numbers are needed")
    return frozenset(values)
