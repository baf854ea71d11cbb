"""Model families: each file turns the `config.json` of one family into a DecoderPlan.

To add a family, write a function `(config) -> DecoderPlan` in a file of its own and list it in `_families`; code
outside the package calls `register`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from caraserve.errors import ModelLoadError
from caraserve.model.families import (
    cohere,
    ernie,
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
    qwen3_5,
    qwen_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from caraserve.model.gguf.plan import plan_for
from caraserve.model.gguf.reader import gguf_config, opened_model
from caraserve.model.not_a_model import why_no_model
from caraserve.model.opened_file import TensorFileError
from caraserve.model.plan import DecoderPlan
from caraserve.model.plan_formats import with_formats, with_stored
from caraserve.model.quantization import parse_quantization
from caraserve.model.safetensors_reader import weight_files

Config = Mapping[str, Any]
Planner = Callable[[Config], DecoderPlan]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model, as configurations name it. `title`: as people do."""

    title: str
    model_type: str
    architecture: str  # first of `architectures`
    plan: Planner


_families = [
    Family("Llama 2 and 3, Falcon 3", "llama", "LlamaForCausalLM", llama.plan),
    Family("Mistral", "mistral", "MistralForCausalLM", mistral.plan_mistral),
    Family("Ministral", "ministral", "MinistralForCausalLM", mistral.plan_ministral),
    Family("Ministral 3", "ministral3", "Ministral3ForCausalLM", mistral.plan_ministral3),
    Family("Mistral Small 3.1", "mistral3", "Mistral3ForConditionalGeneration", mistral.plan_mistral3),
    Family("Gemma", "gemma", "GemmaForCausalLM", gemma.plan_gemma),
    Family("Gemma 2", "gemma2", "Gemma2ForCausalLM", gemma.plan_gemma2),
    Family("Gemma 3", "gemma3_text", "Gemma3ForCausalLM", gemma.plan_gemma3),
    Family("Gemma 3 with images", "gemma3", "Gemma3ForConditionalGeneration", gemma.plan_gemma3_with_images),
    Family("Qwen2 and 2.5", "qwen2", "Qwen2ForCausalLM", qwen.plan_qwen2),
    Family("Qwen3", "qwen3", "Qwen3ForCausalLM", qwen.plan_qwen3),
    Family("Qwen2-VL", "qwen2_vl", "Qwen2VLForConditionalGeneration", qwen.plan_qwen2_vl),
    Family("Qwen2.5-VL", "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", qwen.plan_qwen2_vl),
    Family("Qwen3-VL", "qwen3_vl", "Qwen3VLForConditionalGeneration", qwen.plan_qwen3_vl),
    Family("Qwen3.5 and 3.6", "qwen3_5_text", "Qwen3_5ForCausalLM", qwen3_5.plan_text),
    Family("Qwen3.5 and 3.6 with images", "qwen3_5", "Qwen3_5ForConditionalGeneration", qwen3_5.plan_with_images),
    Family("SmolLM3", "smollm3", "SmolLM3ForCausalLM", smollm3.plan),
    Family("Phi-3, 3.5 and 4", "phi3", "Phi3ForCausalLM", phi3.plan),
    Family("GLM-4-9B", "glm", "GlmForCausalLM", glm.plan_glm),
    Family("GLM-4-0414", "glm4", "Glm4ForCausalLM", glm.plan_glm4),
    Family("ERNIE 4.5", "ernie4_5", "Ernie4_5ForCausalLM", ernie.plan),
    Family("Granite 3", "granite", "GraniteForCausalLM", granite.plan_granite),
    Family("Granite 4 without Mamba layers", "granitemoehybrid", "GraniteMoeHybridForCausalLM", granite.plan_granite4),
    Family("OLMo 2", "olmo2", "Olmo2ForCausalLM", olmo.plan_olmo2),
    Family("OLMo 3", "olmo3", "Olmo3ForCausalLM", olmo.plan_olmo3),
    Family("EXAONE 4", "exaone4", "Exaone4ForCausalLM", exaone.plan),
    Family("HunYuan dense", "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", hunyuan.plan),
    Family("InternLM2", "internlm2", "InternLM2ForCausalLM", internlm.plan_internlm2),
    Family("InternLM3", "internlm3", "InternLM3ForCausalLM", internlm.plan_internlm3),
    Family("Seed-OSS", "seed_oss", "SeedOssForCausalLM", seed_oss.plan),
    Family("Command R", "cohere", "CohereForCausalLM", cohere.plan_cohere),
    Family("Command R7B and A", "cohere2", "Cohere2ForCausalLM", cohere.plan_cohere2),
    Family("Nemotron 4, Minitron", "nemotron", "NemotronForCausalLM", nemotron.plan),
    Family("StarCoder2", "starcoder2", "Starcoder2ForCausalLM", starcoder2.plan),
    Family("StableLM", "stablelm", "StableLmForCausalLM", stablelm.plan),
    Family("Phi-1 and 2", "phi", "PhiForCausalLM", phi2.plan),
    Family("GPT-2", "gpt2", "GPT2LMHeadModel", gpt2.plan),
    Family("Mixtral", "mixtral", "MixtralForCausalLM", mixtral.plan),
    Family("Qwen2-MoE", "qwen2_moe", "Qwen2MoeForCausalLM", qwen_moe.plan_qwen2_moe),
    Family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM", qwen_moe.plan_qwen3_moe),
    Family("Granite 3 MoE", "granitemoe", "GraniteMoeForCausalLM", granite_moe.plan),
    Family("GLM-4.5", "glm4_moe", "Glm4MoeForCausalLM", glm_moe.plan),
    Family("GPT-OSS", "gpt_oss", "GptOssForCausalLM", gpt_oss.plan),
]

# What models that are not served have.
_UNSERVED = {
    "latent attention (MLA)": (
        "DeepseekV2 DeepseekV3 DeepseekV32 Glm4MoeLite GlmMoeDsa KimiLinear LongcatFlash MiniCPM3"
    ),
    "Mamba layers": "Mamba Mamba2 FalconMamba FalconH1 NemotronH Bamba Zamba Zamba2 Jamba Plamo2",
    "four streams of hidden states": "Gemma3n",
    "keys and values of other sizes in some layers": "Gemma4 Gemma4Unified",
    "chunked attention and rotations of its own": "Llama4",
}

# Models saved without a head, as embedding models often are: their architecture by model_type.
_HEADLESS = {"llama": "LlamaModel", "mistral": "MistralModel", "qwen2": "Qwen2Model", "qwen3": "Qwen3Model"}


def register(model_type: str, architecture: str, planner: Planner) -> None:
    """Adds a family, named as in the configurations of its models. Raises ValueError if the name is taken."""
    if any(model_type == known.model_type or architecture == known.architecture for known in _families):
        raise ValueError(f"family {model_type} or architecture {architecture} is registered already")
    _families.append(Family(architecture, model_type, architecture, planner))


def families() -> tuple[Family, ...]:
    """Returns every family that is served."""
    return tuple(_families)


def load_plan(folder: Path) -> DecoderPlan:
    """Returns the plan of the model in a folder, or in a GGUF file. Raises ModelLoadError with the field that cannot be
    served."""
    if folder.is_file():
        return _plan_of_file(folder)
    plan = plan_of(read_config(folder))
    with suppress(TensorFileError):  # no weights, or none that can be read, which the loader reports
        stored = weight_files(folder)
        if plan.head is not None and not any(name in stored for name in plan.stored_names(plan.head)):
            plan = replace(plan, head=None)  # as transformers does, whatever the configuration says
        plan = with_stored(plan, stored)
        if plan.embed == "model.embed_tokens.weight" and "embed_tokens.weight" in stored:
            # An embedding model, saved without the module of its head, and so are its adapters.
            plan = replace(plan, checkpoint_prefixes=("", "model."), adapter_prefixes=(*plan.adapter_prefixes, ""))
    return plan


def _plan_of_file(path: Path) -> DecoderPlan:
    config = read_config(path)
    try:
        return plan_for(opened_model(path), plan_of(config))
    except ModelLoadError as error:  # fields are named as in config.json, which the metadata became
        raise ModelLoadError(error.message.replace("config.json", path.name)) from None


def read_config(folder: Path) -> Config:
    """Reads `folder/config.json`, or what the metadata of a GGUF file say in its place. Raises ModelLoadError if it is
    missing or no JSON object."""
    path = folder / "config.json"
    try:
        if problem := why_no_model(folder):
            raise ModelLoadError(problem)
        if folder.is_file():
            return gguf_config(folder)
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return config


def plan_of(config: Config) -> DecoderPlan:
    """Turns a Hugging Face configuration into a plan. Raises ModelLoadError for what this server cannot compute."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"config.json: architectures must be a list of names, not {names!r:.80}")
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise ModelLoadError("config.json: tokens attend to later ones too; only causal models are supported")
    for family in _families:
        is_headless = names == [_HEADLESS.get(family.model_type)]
        is_of_type = not names and config.get("model_type") == family.model_type
        if family.architecture in names or is_headless or is_of_type:
            return _planned(family, config)
    raise ModelLoadError(
        f"config.json: architecture {names or config.get('model_type')!r} is not supported{_why_unserved(names)}; "
        f"supported are {', '.join(family.architecture for family in _families)}"
    )


def _planned(family: Family, config: Config) -> DecoderPlan:
    """Returns the plan of a model of a family. Raises ModelLoadError, also for fields of types or values that no
    reading of a field expects."""
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused below
            plan = with_formats(family.plan(config), parse_quantization(config))
        numbers = list(_numbers(plan))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelLoadError(
            f"config.json: its fields are not those of {family.architecture}: {type(error).__name__}: {error!s:.200}"
        ) from None
    for name, value in numbers:
        if isinstance(value, complex) or not math.isfinite(value):
            raise ModelLoadError(f"config.json: {name} would be {value}; a finite number is needed")
    return plan


def _numbers(plan: DecoderPlan) -> Iterator[tuple[str, float | complex]]:
    """Yields the numbers by which a model multiplies or divides."""
    yield from (("the embedding's scale", plan.embed_scale), ("the logits' scale", plan.logit_scale))
    caps = {plan.logit_cap, *(one.cap for one in plan.attentions)} - {None}
    yield from (("one divided by a soft cap", math.inf if cap == 0 else cap or 0.0) for cap in caps)
    yield from (("the scale of attention", one.scale) for one in plan.attentions)
    yield from (("the multiplier of blocks", block.multiplier) for layer in plan.layers for block in layer.blocks)
    yield from (("the scale of experts", moe.scale) for moe in plan.moes)
    for rope in plan.ropes:
        yield from (("a rotation's frequency", one) for one in (*rope.frequencies, *rope.long_frequencies))
        yield from (("a rotation's factor", one) for one in (rope.factor, *(rope.q_growth or ())))


def _why_unserved(names: Sequence[str]) -> str:
    """Returns what a known model has that is not computed, after a colon."""
    stems = {str(name).partition("For")[0] for name in names}
    for what, known in _UNSERVED.items():
        if stems & set(known.split()):
            return f": it has {what}"
    return ""
