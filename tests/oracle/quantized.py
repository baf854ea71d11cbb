"""Quantised checkpoints of the tiny models, as llm-compressor and AutoFP8 write them, and their dequantised weights."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracle.models import ALL_TARGETS

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True)
class Kind:
    """A form of quantised checkpoints. `ignored`: the modules that it leaves as they are, a regular expression."""

    section: Mapping[str, Any]  # quantization_config
    code: torch.dtype = torch.float8_e4m3fn
    per_output: bool = True
    scale_dtype: torch.dtype = torch.float32
    scale_shape: tuple[int, ...] = (-1, 1)
    input_scale: float | None = None
    ignored: str = "lm_head"


def compressed(
    kind: str, inputs: Mapping[str, Any] | None, *, strategy: str = "channel", ignore: tuple[str, ...] = ("lm_head",)
) -> dict[str, Any]:
    """Returns the section of a compressed-tensors checkpoint with these inputs (`kind`: float or int)."""
    common = {"num_bits": 8, "type": kind, "symmetric": True, "group_size": None, "observer": "minmax"}
    weights = common | {"strategy": strategy, "dynamic": False, "actorder": None}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if inputs is None else common | inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "global_compression_ratio": 1.5,
    }


PER_TOKEN = {"dynamic": True, "strategy": "token"}
STATIC = {"dynamic": False, "strategy": "tensor"}
_PARTLY = ("lm_head", "re:.*layers\\.1\\.mlp.*", "model.layers.0.self_attn.o_proj")
KINDS = {
    "fp8-per-output": Kind(compressed("float", PER_TOKEN), scale_dtype=torch.bfloat16),
    "fp8-per-tensor": Kind(compressed("float", PER_TOKEN, strategy="tensor"), per_output=False, scale_shape=(1,)),
    "fp8-static": Kind(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": None},
        per_output=False,
        scale_shape=(),
        input_scale=0.01,
    ),
    "fp8-weights": Kind(compressed("float", None)),
    "int8": Kind(compressed("int", PER_TOKEN), torch.int8),
    "int8-static": Kind(compressed("int", STATIC), torch.int8, input_scale=0.05),
    "int8-weights-partly": Kind(
        compressed("int", None, ignore=_PARTLY),
        torch.int8,
        scale_dtype=torch.float16,
        ignored="lm_head|layers.1.mlp|layers.0.self_attn.o_proj",
    ),
}


def quantize(source: Path, folder: Path, kind: Kind) -> Path:
    """Writes the model of `source` to `folder` with quantised weights; returns the folder."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in ALL_TARGETS or re.search(kind.ignored, name) or name == module:
            found[name] = tensor
            continue
        found |= _quantized(module, tensor.float(), kind)
        if kind.input_scale is not None:  # a little different for modules with one input, as if calibrated apart
            scale = kind.input_scale * (1 + ALL_TARGETS.index(module.rpartition(".")[2]) % 3 / 50)
            found[f"{module}.input_scale"] = torch.tensor([scale])
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kind.section}), encoding="utf-8")
    return folder


def _quantized(module: str, weight: Tensor, kind: Kind) -> dict[str, Tensor]:
    largest = weight.abs().amax(1, keepdim=True) if kind.per_output else weight.abs().amax()
    scale = (largest / LARGEST[kind.code]).to(kind.scale_dtype)
    return {
        f"{module}.weight": rounded(weight / scale.float(), kind.code),
        f"{module}.weight_scale": scale.reshape(kind.scale_shape),
    }


def rounded(values: Tensor, code: torch.dtype) -> Tensor:
    """Rounds to codes; what is too large becomes the largest."""
    limited = values.clamp(-LARGEST[code], LARGEST[code])
    return (limited.round() if code is torch.int8 else limited).to(code)


def dequantize(source: Path, folder: Path) -> Path:
    """Writes the model of a quantised folder in float32, without quantisation, for transformers; returns the folder."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    plain = {name: tensor.float() for name, tensor in tensors.items() if not name.endswith("_scale")}
    for name in plain:
        scale = tensors.get(f"{name}_scale")
        if scale is not None:
            plain[name] *= scale.float()
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def quantize_inputs(model: torch.nn.Module, folder: Path, kind: Kind) -> None:
    """Makes a dequantised model quantise the inputs of the modules that are quantised in `folder`, as `kind` says."""
    stored = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        place = re.search(r"layers\.\d+\.(?:self_attn|mlp)\.\w+(?=$|\.base_layer$)", name)
        if place is None or f"model.{place[0]}.weight_scale" not in stored or not isinstance(module, torch.nn.Linear):
            continue
        scale = None
        if kind.input_scale is not None:
            scale = max(float(stored[f"{other}.input_scale"]) for other in _beside(f"model.{place[0]}"))
        module.register_forward_pre_hook(_rounding(kind.code, scale))


def _beside(module: str) -> list[str]:
    """Returns the modules that read the same input."""
    prefix, _, site = module.rpartition(".")
    groups = (ALL_TARGETS[:3], ALL_TARGETS[3:4], ALL_TARGETS[4:6], ALL_TARGETS[6:])
    return next([f"{prefix}.{other}" for other in group] for group in groups if site in group)


def _rounding(code: torch.dtype, given: float | None) -> Any:
    def quantized(module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = arguments
        scale = (x.abs().amax(-1, keepdim=True) / LARGEST[code]).clamp(min=1e-30) if given is None else given
        return (rounded(x / scale, code).float() * scale,)

    return quantized
