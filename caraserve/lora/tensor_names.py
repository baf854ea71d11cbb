"""What the names of an adapter's tensors say, apart from those of its kind: wrappers around modules, parts of the model
that text does not use, and copies of the base model's tensors. No I/O."""

import re
from dataclasses import dataclass

from caraserve.model.plan import DecoderPlan

# Words that programs put into the names of modules that they wrap: torch.compile, FSDP, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PREFIX = "base_model.model."
# peft saves `X.weight` of a module in modules_to_save; dumps of whole states have the original beside it.
_COPY = re.compile(
    r"(?P<module>.+?)\.(?:(?P<original>(?:token_adapter\.)?base_layer|original_module)\.|modules_to_save\.[A-Za-z0-9_-]+\.)?"
    r"(?P<tensor>weight|bias)"
)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in an adapter's file that stands for one of the base model."""

    stored: str  # name in the adapter's file
    name: str  # of the base's tensor, as adapters name it
    is_original: bool  # whether it must be the base's; else it replaces it


def normalised(name: str) -> str:
    """Returns a tensor's name without wrappers and PEFT's prefix."""
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS).removeprefix(_PREFIX)


def is_ignored(name: str, plan: DecoderPlan) -> bool:
    """Returns whether a normalised name is of a part that a text model does not use, as a vision tower."""
    return any(name.startswith(f"{prefix.rstrip('.')}.") for prefix in plan.ignored_prefixes)


def saved_tensor(stored: str) -> SavedTensor | None:
    """Returns which tensor of the base model a name stands for, None if it names none."""
    match = _COPY.fullmatch(normalised(stored))
    if match is None or ".lora_" in stored:
        return None
    return SavedTensor(stored, f"{match['module']}.{match['tensor']}", match["original"] is not None)


def peft_name(module: str, tensor: str) -> str:
    """Returns the name under which PEFT saves a tensor of a module, as `lora_A.weight`."""
    return f"{_PREFIX}{module}.{tensor}"
