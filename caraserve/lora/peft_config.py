"""Reads an adapter's `adapter_config.json`, and refuses what is not supported.

The rule: a field is applied exactly, or changes nothing in inference, or the adapter is refused with the field's name.
Nothing from the file is executed here. The tensors say which modules were adapted; a regular expression in
`target_modules` or `exclude_modules` must agree with them, and is matched by a process that can be killed
(`target_patterns.py`). Other patterns are taken only where they are plain names.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caraserve.core.lora_layout import MAX_RANK
from caraserve.errors import AdapterRejected
from caraserve.lora.peft_names import PatternTable, Value, name_ends
from caraserve.lora.target_patterns import matched
from caraserve.model.safetensors_reader import TensorFileError, open_regular
from caraserve.model.spec import SITES

CONFIG_NAME = "adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_ALPHA = 1e9

# Fields that say where an adapter came from or how it was trained; they change nothing in inference.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "task_type"),
    *("peft_version", "runtime_config", "ensure_weight_tying"),
    # how A and B were initialised; where that changes the base weights too, init_lora_weights is refused
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size"),  # names and sizes that only other, refused fields would use
}
# Fields that are read below, and applied or refused there.
_UNDERSTOOD = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
# Ways of initialising that only choose A's and B's first values. Others change the base weights too.
_PLAIN_INITS = ("gaussian", "orthogonal", "eva")
# Names of the list of layers, as peft's default and `layers_pattern` give it.
_LAYER_LISTS = {"layers", "model.layers"}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of the configuration that decide which modules an adapter changes, and how."""

    ranks: PatternTable[int]
    alphas: PatternTable[float]
    rslora: bool
    targets: frozenset[str] | None  # names or dotted ends of names; None: a pattern
    excluded: frozenset[str] | None
    target_pattern: str | None  # a regular expression in place of names
    excluded_pattern: str | None
    layers: frozenset[int] | None  # None: every layer

    def scale_of(self, module: str, rank: int) -> float:
        """Returns alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
        return self.alphas.of(module) / (math.sqrt(rank) if self.rslora else rank)

    def covers(self, layer: int, module: str) -> bool:
        """Returns whether the configuration targets a module that has tensors."""
        ends = name_ends(module)
        if self.excluded is not None and not self.excluded.isdisjoint(ends):
            return False
        if self.targets is not None and module in self.targets:
            return True  # peft applies layers_to_transform to ends of names only
        named = self.targets is None or not self.targets.isdisjoint(ends)
        return named and (self.layers is None or layer in self.layers)

    def check_patterns(self, modules: tuple[str, ...]) -> None:
        """Raises AdapterRejected unless the regular expressions target all modules that have tensors, or ServerBusy if
        they cannot be matched now. Waits for a process."""
        targeted = self._matched("target_modules", self.target_pattern, modules)
        if targeted is not None and not targeted:
            raise refusal("target_modules", f"is {_shown(self.target_pattern)}, which matches no module with tensors")
        excluded = self._matched("exclude_modules", self.excluded_pattern, modules) or frozenset()
        for module in modules:
            if module in excluded or (targeted is not None and module not in targeted):
                raise AdapterRejected(f"{module} has tensors, and {CONFIG_NAME} does not target this module")

    def _matched(self, field: str, pattern: str | None, modules: tuple[str, ...]) -> frozenset[str] | None:
        try:
            return None if pattern is None else matched(pattern, modules)
        except ValueError as error:
            raise refusal(field, f"is {_shown(pattern)}: {error}") from None

    def requires(self, layer: int, module: str) -> bool:
        """Returns whether a module must have tensors: it is targeted by name, and no regular expression may exclude
        it."""
        return self.targets is not None and self.excluded is not None and self.covers(layer, module)


def read_config(folder: Path) -> PeftConfig:
    """Reads `adapter_config.json`. Raises AdapterRejected naming the field."""
    fields = _load(folder / CONFIG_NAME)
    if fields.get("peft_type") != "LORA":
        raise refusal("peft_type", f"is {_shown(fields.get('peft_type'))}; only LORA is supported")
    _refuse_unsupported(fields)
    _check_layers_pattern(fields.get("layers_pattern"))
    return PeftConfig(
        ranks=_table(fields, "rank_pattern", "r", _rank),
        alphas=_table(fields, "alpha_pattern", "lora_alpha", _alpha),
        rslora=_flag(fields, "use_rslora"),
        targets=_targets(fields.get("target_modules")),
        excluded=_excluded(fields.get("exclude_modules")),
        target_pattern=_pattern(fields.get("target_modules")),
        excluded_pattern=_pattern(fields.get("exclude_modules")),
        layers=_layers(fields.get("layers_to_transform")),
    )


def refusal(field: str, what: str) -> AdapterRejected:
    """Returns the error that refuses an adapter because of one field."""
    return AdapterRejected(f"{CONFIG_NAME}: {field} {what}")


def _shown(value: Any) -> str:
    """Returns a value of the file for a message: at most 80 characters, all ASCII."""
    return ascii(value)[:80]


def _load(path: Path) -> dict[str, Any]:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
    except TensorFileError as error:
        raise AdapterRejected(str(error)) from None
    except OSError as error:
        raise AdapterRejected(f"{CONFIG_NAME} cannot be read: {error.strerror}") from None
    if len(text) > _MAX_CONFIG_BYTES:
        raise AdapterRejected(f"{CONFIG_NAME} is larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise AdapterRejected(f"{CONFIG_NAME} is not valid JSON") from None
    if not isinstance(fields, dict):
        raise AdapterRejected(f"{CONFIG_NAME} must hold a JSON object")
    return fields


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    if fields.get("bias", "none") != "none":
        raise refusal("bias", f"is {_shown(fields['bias'])}; only 'none' is supported")
    init = fields.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in _PLAIN_INITS)):
        raise refusal(
            "init_lora_weights", f"is {_shown(init)}, which may change the base weights; convert it to plain LoRA first"
        )
    for field, value in fields.items():
        if value and field not in _HARMLESS and field not in _UNDERSTOOD:
            name = field if field.isascii() and field.isidentifier() else _shown(field)
            raise refusal(name[:80], f"is {_shown(value)}; adapters that use it are not supported")


def _check_layers_pattern(value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if value and not any(isinstance(name, str) and name in _LAYER_LISTS for name in names):
        raise refusal("layers_pattern", f"is {_shown(value)}; the base model's layers are at 'layers'")


def _rank(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise refusal(field, f"is {_shown(value)}; a rank is an integer from 1 to {MAX_RANK}")
    return value


def _alpha(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MAX_ALPHA:
        raise refusal(field, f"is {_shown(value)}; a number below {_MAX_ALPHA:.0e} is needed")
    return float(value)


def _table(
    fields: Mapping[str, Any], field: str, default_field: str, read: Callable[[str, Any], Value]
) -> PatternTable[Value]:
    patterns = fields.get(field) or {}
    if not isinstance(patterns, dict):
        raise refusal(field, "must be an object")
    default = read(default_field, fields.get(default_field))
    try:
        return PatternTable(default, [(pattern, read(field, value)) for pattern, value in patterns.items()])
    except ValueError as error:
        raise refusal(field, f"has {_shown(error.args[0])}; only ends of module names are supported") from None


def _flag(fields: Mapping[str, Any], field: str) -> bool:
    value = fields.get(field) or False
    if not isinstance(value, bool):
        raise refusal(field, f"is {_shown(value)}; true or false is needed")
    return value


def _pattern(value: Any) -> str | None:
    return value if isinstance(value, str) and value and value != "all-linear" else None


def _targets(value: Any) -> frozenset[str] | None:
    if value == "all-linear":
        return frozenset(SITES)
    if isinstance(value, str) and value:
        return None
    if not value or not _are_names(value):
        raise refusal("target_modules", "must be a list of module names, or a pattern")
    for name in value:
        if name.split(".")[-1] not in SITES:
            raise refusal("target_modules", f"has {_shown(name)}; supported modules are {', '.join(SITES)}")
    return frozenset(value)


def _excluded(value: Any) -> frozenset[str] | None:
    if isinstance(value, str) and value:
        return None
    if value and not _are_names(value):
        raise refusal("exclude_modules", "must be a list of module names, or a pattern")
    return frozenset(value or ())


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in values):
        raise refusal("layers_to_transform", f"is {_shown(value)}; layer numbers are needed")
    return frozenset(values)
