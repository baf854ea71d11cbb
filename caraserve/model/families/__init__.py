"""Model families: each file turns the `config.json` of one family into a DecoderPlan.

To add a family, write a function `(config) -> DecoderPlan` in a file of its own and list it in `_FAMILIES`; code
outside the package calls `register`.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from caraserve.errors import ModelLoadError
from caraserve.model.families import (
    cohere,
    exaone,
    gemma,
    glm,
    glm_moe,
    gpt2,
    gpt_oss,
    granite,
    granite_moe,
    hunyuan,
    internlm,
    llama,
    mistral,
    mixtral,
    nemotron,
    olmo,
    phi2,
    phi3,
    qwen,
    qwen_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from caraserve.model.not_a_model import why_no_model
from caraserve.model.plan import DecoderPlan
from caraserve.model.quantization import parse_quantization
from caraserve.model.safetensors_reader import TensorFileError, weight_files

Config = Mapping[str, Any]
Planner = Callable[[Config], DecoderPlan]

# (model_type, first of `architectures`) → planner
_FAMILIES: dict[tuple[str, str], Planner] = {
    ("llama", "LlamaForCausalLM"): llama.plan,
    ("mistral", "MistralForCausalLM"): mistral.plan_mistral,
    ("ministral", "MinistralForCausalLM"): mistral.plan_ministral,
    ("ministral3", "Ministral3ForCausalLM"): mistral.plan_ministral3,
    ("mistral3", "Mistral3ForConditionalGeneration"): mistral.plan_mistral3,
    ("gemma", "GemmaForCausalLM"): gemma.plan_gemma,
    ("gemma2", "Gemma2ForCausalLM"): gemma.plan_gemma2,
    ("gemma3_text", "Gemma3ForCausalLM"): gemma.plan_gemma3,
    ("gemma3", "Gemma3ForConditionalGeneration"): gemma.plan_gemma3_with_images,
    ("qwen2", "Qwen2ForCausalLM"): qwen.plan_qwen2,
    ("qwen3", "Qwen3ForCausalLM"): qwen.plan_qwen3,
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"): qwen.plan_qwen2_vl,
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"): qwen.plan_qwen2_vl,
    ("qwen3_vl", "Qwen3VLForConditionalGeneration"): qwen.plan_qwen3_vl,
    ("smollm3", "SmolLM3ForCausalLM"): smollm3.plan,
    ("phi3", "Phi3ForCausalLM"): phi3.plan,
    ("glm", "GlmForCausalLM"): glm.plan_glm,
    ("glm4", "Glm4ForCausalLM"): glm.plan_glm4,
    ("granite", "GraniteForCausalLM"): granite.plan_granite,
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM"): granite.plan_granite4,
    ("olmo2", "Olmo2ForCausalLM"): olmo.plan_olmo2,
    ("olmo3", "Olmo3ForCausalLM"): olmo.plan_olmo3,
    ("exaone4", "Exaone4ForCausalLM"): exaone.plan,
    ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"): hunyuan.plan,
    ("internlm2", "InternLM2ForCausalLM"): internlm.plan_internlm2,
    ("internlm3", "InternLM3ForCausalLM"): internlm.plan_internlm3,
    ("seed_oss", "SeedOssForCausalLM"): seed_oss.plan,
    ("cohere", "CohereForCausalLM"): cohere.plan_cohere,
    ("cohere2", "Cohere2ForCausalLM"): cohere.plan_cohere2,
    ("nemotron", "NemotronForCausalLM"): nemotron.plan,
    ("starcoder2", "Starcoder2ForCausalLM"): starcoder2.plan,
    ("stablelm", "StableLmForCausalLM"): stablelm.plan,
    ("phi", "PhiForCausalLM"): phi2.plan,
    ("gpt2", "GPT2LMHeadModel"): gpt2.plan,
    ("mixtral", "MixtralForCausalLM"): mixtral.plan,
    ("qwen2_moe", "Qwen2MoeForCausalLM"): qwen_moe.plan_qwen2_moe,
    ("qwen3_moe", "Qwen3MoeForCausalLM"): qwen_moe.plan_qwen3_moe,
    ("granitemoe", "GraniteMoeForCausalLM"): granite_moe.plan,
    ("glm4_moe", "Glm4MoeForCausalLM"): glm_moe.plan,
    ("gpt_oss", "GptOssForCausalLM"): gpt_oss.plan,
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
    plan = plan_of(read_config(folder))
    with suppress(TensorFileError):  # no weights, or none that can be read, which the loader reports
        stored = weight_files(folder)
        if plan.head is not None and not any(name in stored for name in plan.stored_names(plan.head)):
            return replace(plan, head=None)  # as transformers does, whatever the configuration says
    return plan


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
            return planner(config).with_formats(parse_quantization(config))
    raise ModelLoadError(
        f"config.json: architecture {names or config.get('model_type')!r} is not supported; "
        f"supported are {', '.join(architecture for _, architecture in _FAMILIES)}"
    )
