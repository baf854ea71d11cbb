"""Adapter folders written without peft, so that a test can damage any part of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.spec import SITES, ModelSpec, parse_spec

RANK = 4
MISSING = object()  # as the value of a field: the field is left out
Tensors = dict[str, NDArray[Any]]

SPEC: ModelSpec = parse_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)


def tensor_name(layer: int, site: str, half: str) -> str:
    """Writes the folder as peft saves it."""
    block = "self_attn" if site in SITES[:4] else "mlp"
    return f"base_model.model.model.layers.{layer}.{block}.{site}.lora_{half}.weight"


def tensors_for(targets: tuple[str, ...] = ("q_proj",), layers: tuple[int, ...] = (0, 1)) -> Tensors:
    """Returns random A and B of rank `RANK` for `SPEC`, the same ones each time."""
    rng = np.random.default_rng(0)
    tensors: Tensors = {}
    for layer in layers:
        for site in targets:
            inputs, outputs = SPEC.site_shape(site)
            tensors[tensor_name(layer, site, "A")] = rng.standard_normal((RANK, inputs), np.float32)
            tensors[tensor_name(layer, site, "B")] = rng.standard_normal((outputs, RANK), np.float32)
    return tensors


def write_adapter(folder: Path, changes: Mapping[str, Any] | None = None, tensors: Tensors | None = None) -> Path:
    """Writes a valid adapter of q_proj, with `changes` to its configuration or with other tensors."""
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], **(changes or {})}
    folder.mkdir(parents=True, exist_ok=True)
    kept = {field: value for field, value in fields.items() if value is not MISSING}
    (folder / "adapter_config.json").write_text(json.dumps(kept), encoding="utf-8")
    save_file(tensors_for() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def read(folder: Path, model: ModelSpec, filled: int = 0) -> HostAdapter:
    """Reads a whole adapter into memory that was filled with the byte `filled`."""
    into = aligned_bytes(inspect_adapter(folder, model).num_bytes)
    into[:] = filled
    return read_adapter(folder, model, into)
