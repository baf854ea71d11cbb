"""Model families: each file turns the `config.json` of one family into a DecoderPlan.

To add a family, write a function `(config) -> DecoderPlan` in a file of its own and list it in `_FAMILIES`; code
outside the package calls `register`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from caraserve.errors import ModelLoadError
from caraserve.model.families import gemma, llama, mistral, qwen
from caraserve.model.not_a_model import why_no_model
from caraserve.model.plan import DecoderPlan

Config = Mapping[str, Any]
Planner = Callable[[Config], DecoderPlan]

# (model_type, first of `architectures`) → planner
_FAMILIES: dict[tuple[str, str], Planner] = {
    ("llama", "LlamaForCausalLM"): llama.plan,
    ("mistral", "MistralForCausalLM"): mistral.plan,
    ("gemma", "GemmaForCausalLM"): gemma.plan_gemma,
    ("gemma2", "Gemma2ForCausalLM"): gemma.plan_gemma2,
    ("gemma3_text", "Gemma3ForCausalLM"): gemma.plan_gemma3,
    ("qwen2", "Qwen2ForCausalLM"): qwen.plan_qwen2,
    ("qwen3", "Qwen3ForCausalLM"): qwen.plan_qwen3,
}


def register(model_type: str, architecture: str, planner: Planner) -> None:
    """Adds a family, named as in the configurations of its models. Raises ValueError if the name is taken."""
    if any(model_type == known or architecture == name for known, name in _FAMILIES):
        raise ValueError(f"family {model_type} or architecture {architecture} is registered already")
    _FAMILIES[model_type, architecture] = planner


def supported() -> tuple[tuple[str, str], ...]:
    """Returns (model_type, architecture) of every family."""
    return tuple(_FAMILIES)


def load_plan(folder: Path) -> DecoderPlan:
    """Returns the plan of the model in a folder. Raises ModelLoadError with the field that cannot be served."""
    return plan_of(read_config(folder))


def read_config(folder: Path) -> Config:
    """Reads `folder/config.json`. Raises ModelLoadError if it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        if problem := why_no_model(folder):
            raise ModelLoadError(problem)
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return config


def plan_of(config: Config) -> DecoderPlan:
    """Turns a Hugging Face configuration into a plan. Raises ModelLoadError for what this server cannot compute."""
    names = config.get("architectures") or []
    for (model_type, architecture), planner in _FAMILIES.items():
        if architecture in names or (not names and config.get("model_type") == model_type):
            return planner(config)
    raise ModelLoadError(
        f"config.json: architecture {names or config.get('model_type')!r} is not supported; "
        f"supported are {', '.join(architecture for _, architecture in _FAMILIES)}"
    )
