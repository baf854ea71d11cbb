"""What an adapter's `adapter_config.json` says, and everything in it that we refuse. Level 2.

The rule: a field is understood and applied exactly, or changes nothing, or the adapter is refused with its name.
Nothing from the file is executed: a `target_modules` regular expression is not run at all, because the tensors say
which modules were adapted, and patterns are taken only where they are plain names.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caraserve.errors import AdapterRejected
from caraserve.model.layout import MAX_RANK
from caraserve.model.spec import SITES

CONFIG_NAME = "adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 20

# Fields that say where an adapter came from or how it was trained; they change nothing in inference.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "task_type"),
    *("peft_version", "runtime_config", "loftq_config", "eva_config", "ensure_weight_tying", "peft_type"),
    *("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "bias"),
    *("layers_to_transform", "layers_pattern", "init_lora_weights", "exclude_modules", "fan_in_fan_out"),
    *("megatron_core", "qalora_group_size"),  # names and sizes that only other, refused fields would use
}
# Ways of initialising that change the base weights too; the rest only choose A's and B's first values.
_CHANGES_BASE = {"pissa", "olora", "corda", "loftq"}
_PLAIN_PATTERN = re.compile(r"\^?(?:\.\*\\?\.)?[A-Za-z0-9_]+(?:\\?\.[A-Za-z0-9_]+)*\$?")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that decide an adapter's arithmetic and coverage."""

    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...] | None  # names or dotted suffixes; None: a regular expression or all-linear
    layers: frozenset[int] | None  # None: every layer
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """The rank that a module's full name gets."""
        return self.ranks.get(_matching(self.ranks, module), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
        alpha = self.alphas.get(_matching(self.alphas, module), self.alpha)
        return float(alpha / rank**0.5 if self.rslora else alpha / rank)

    def covers(self, layer: int, module: str) -> bool:
        """Whether the configuration says that this module is adapted; a regular expression is believed."""
        if self.layers is not None and layer not in self.layers:
            return False
        return self.targets is None or any(module == name or module.endswith(f".{name}") for name in self.targets)


def _matching(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that names `module` or its end, as peft matches them; "" when none does."""
    for pattern in patterns:
        name = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".").removeprefix(".*.")
        anchored = pattern.startswith("^") and not pattern.startswith("^.*")
        if module == name or (not anchored and module.endswith(f".{name}")):
            return pattern
    return ""


def read_config(folder: Path) -> tuple[PeftConfig, bytes]:
    """The configuration, and a canonical form of what matters in it for the adapter's identity.

    Raises AdapterRejected naming the field.
    """
    fields = _load(folder / CONFIG_NAME)
    if fields.get("peft_type") != "LORA":
        raise refusal("peft_type", f"is {fields.get('peft_type')!r}; only LORA is supported")
    _refuse_unsupported(fields)
    config = PeftConfig(
        rank=_rank("r", fields.get("r")),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha")),
        rslora=_flag(fields, "use_rslora"),
        targets=_targets(fields.get("target_modules")),
        layers=_layers(fields.get("layers_to_transform")),
        ranks={_pattern("rank_pattern", k): _rank(f"rank_pattern.{k}", v) for k, v in _table(fields, "rank_pattern")},
        alphas={
            _pattern("alpha_pattern", k): _alpha(f"alpha_pattern.{k}", v) for k, v in _table(fields, "alpha_pattern")
        },
    )
    identity = (config.rank, config.alpha, config.rslora, sorted(config.ranks.items()), sorted(config.alphas.items()))
    return config, json.dumps(identity).encode()


def refusal(field: str, what: str) -> AdapterRejected:
    """The refusal of one field."""
    return AdapterRejected(f"{CONFIG_NAME}: {field} {what}")


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterRejected(f"{path.parent.name} has no readable {CONFIG_NAME}: {error.strerror}") from None
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
        raise refusal("bias", f"is {fields['bias']!r}; only 'none' is supported")
    init = fields.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().split("_niter_")[0] in _CHANGES_BASE:
        raise refusal(
            "init_lora_weights", f"is {init!r}, which changes the base weights; convert it to plain LoRA first"
        )
    if fields.get("fan_in_fan_out"):
        raise refusal("fan_in_fan_out", "is true; only false is supported")
    for field, value in fields.items():
        if field not in _HARMLESS and value:
            raise refusal(str(field), f"is {str(value)[:80]!r}; adapters that use it are not supported")


def _rank(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise refusal(field, f"is {str(value)[:40]}; a rank is an integer from 1 to {MAX_RANK}")
    return value


def _alpha(field: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise refusal(field, f"is {str(value)[:40]}; a finite number is needed")
    return float(value)


def _flag(fields: Mapping[str, Any], field: str) -> bool:
    value = fields.get(field) or False
    if not isinstance(value, bool):
        raise refusal(field, f"is {str(value)[:40]!r}; true or false is needed")
    return value


def _targets(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str) and value:
        return None if value not in SITES else (value,)
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise refusal("target_modules", "must be a list of module names, or a pattern")
    for name in value:
        if name.split(".")[-1] not in SITES:
            raise refusal("target_modules", f"has {name[:80]!r}; supported modules are {', '.join(SITES)}")
    return tuple(value)


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in values):
        raise refusal("layers_to_transform", f"is {str(value)[:80]}; layer numbers are needed")
    return frozenset(values)


def _table(fields: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    value = fields.get(field) or {}
    if not isinstance(value, dict):
        raise refusal(field, "must be an object")
    return list(value.items())


def _pattern(field: str, pattern: str) -> str:
    if not _PLAIN_PATTERN.fullmatch(pattern):
        raise refusal(field, f"has {pattern[:80]!r}; only module names, dotted or not, are supported")
    return pattern
