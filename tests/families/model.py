"""Makes the model of a case with random weights, its adapters, and what transformers and peft compute with them."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from tests.families.cases import Case, arguments_of

TOKENS = [int(token) for token in np.random.default_rng(5).integers(2, 90, size=40)]
_OF_IMAGES = r".*(vision_tower|visual|multi_modal_projector).*"


@dataclass(frozen=True)
class Made:
    """A model folder, with the logits after each token of `TOKENS`, [tokens, vocabulary]; adapters by name."""

    folder: Path
    logits: NDArray[np.float64]
    adapters: dict[str, tuple[Path, NDArray[np.float64]]]


def configured(case: Case) -> Any:
    """Returns the configuration of a case, which names the class of its model."""
    config = getattr(transformers, f"{case.config}Config")(**arguments_of(case))
    config.architectures = [case.model]
    return config


def make(case: Case, folder: Path) -> Made:
    """Saves the model of a case and two adapters: of all linear modules, and of those of one layer."""
    config = configured(case)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(config).eval()
    randomise(model, case)
    model.save_pretrained(folder / "model")
    logits = logits_of(model)
    adapters = {}
    outside: dict[str, Any] = {} if case.text is None else {"exclude_modules": _OF_IMAGES}
    if case.model == "GPT2LMHeadModel":
        outside["fan_in_fan_out"] = True  # its modules are stored as [inputs, outputs]
    for name, seed, fields in (
        ("all", 1, {"r": 5, "lora_alpha": 7}),
        ("last", 2, {"r": 3, "lora_alpha": 6, "use_rslora": True, "layers_to_transform": [1, 2]}),
    ):
        adapted = get_peft_model(
            copy.deepcopy(model),  # reading the files again takes a third of the time of a test
            LoraConfig(target_modules=targets_of(model, case), task_type="CAUSAL_LM", **outside, **fields),
        ).eval()
        _randomise_lora(adapted, torch.Generator().manual_seed(seed))
        adapted.create_or_update_model_card = lambda folder: None  # compiles a template each time, which is slow
        adapted.save_pretrained(str(folder / name))
        adapters[name] = folder / name, logits_of(adapted)
    return Made(folder / "model", logits, adapters)


def targets_of(model: Any, case: Case) -> list[str]:
    """Returns the last words of the names of linear modules, but of the head and of vision towers."""
    kinds = torch.nn.Linear, transformers.pytorch_utils.Conv1D
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    text = [name for name in names if not any(word in name for word in ("vision", "visual", "projector", "lm_head"))]
    return sorted({name.rpartition(".")[2] for name in text if case.adapts_mlps or ".mlp." not in name})


def randomise(model: Any, case: Case) -> None:
    """Gives every parameter random values of a size at which each matters: equal norms, biases of zero and sinks of
    zero would hide half of the mistakes."""
    generator = torch.Generator().manual_seed(0)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]
    for name, parameter in [*model.named_parameters(), *buffers]:
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = name.endswith(".weight") and ("norm" in name or "ln_" in name)
        with torch.no_grad():
            if is_norm:
                parameter.copy_(1 - case.offset + 0.3 * noise)
            elif parameter.ndim == 1 or "bias" in name:
                parameter.copy_(0.5 * noise)
            elif any(word in name for word in ("embed", "wte", "wpe")):
                parameter.copy_(noise)
            else:
                parameter.copy_(1.2 / math.sqrt(_inputs(model, name, parameter)) * noise)
                if name.endswith("experts.gate_up_proj") and isinstance(model, transformers.GptOssForCausalLM):
                    parameter.mul_(5)  # so that its clamps bind


def _inputs(model: Any, name: str, parameter: torch.Tensor) -> int:
    is_transposed = isinstance(model, transformers.GPT2LMHeadModel) and parameter.ndim == 2
    if parameter.ndim == 3:
        is_transposed = isinstance(model, transformers.GptOssForCausalLM)
    return int(parameter.shape[-2 if is_transposed else -1])


def _randomise_lora(model: Any, generator: torch.Generator) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer) and module.lora_A:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            a.data = torch.randn(a.shape, generator=generator) * 0.4 / math.sqrt(a.shape[1])
            b.data = torch.randn(b.shape, generator=generator) * 0.4 / math.sqrt(b.shape[1])


def logits_of(model: Any) -> NDArray[np.float64]:
    """Returns the logits after each token of `TOKENS`."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(TOKENS)[None]).logits[0]
    return np.asarray(logits.double().numpy())
