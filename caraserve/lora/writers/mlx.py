"""Adapters of MLX: `adapters.safetensors` beside an `adapter_config.json` with `lora_parameters`. A and B are stored
transposed, and the scale is that of the product, which the rank does not divide."""

import re
from typing import Any

from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import Piece, TensorSource, View
from caraserve.lora.peft_fields import Fields, checked_alpha, refusal, shown
from caraserve.lora.writers.stored_adapter import StoredAdapter, from_modules, shape_2d

_TENSOR = re.compile(r"(?P<module>.+)\.(?P<tensor>lora_a|lora_b|m)")
_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
_EMBEDDING_NAMES = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}
_EMBEDDING = "embed_tokens"


def wrote(fields: Fields) -> bool:
    """Returns whether a configuration is one of MLX."""
    return "peft_type" not in fields and ("lora_parameters" in fields or "fine_tune_type" in fields)


def translated(fields: Fields, file: TensorSource) -> StoredAdapter:
    """Returns the adapter under PEFT's names. Raises AdapterRejected, and TensorFileError."""
    kind, parameters = fields.get("fine_tune_type", "lora"), fields.get("lora_parameters")
    if kind not in ("lora", "dora"):
        raise refusal("fine_tune_type", f"is {shown(kind)}; only lora and dora are served")
    scale = _scale(parameters)
    modules: dict[str, dict[str, View]] = {}
    for name in file.names:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterRejected(f"tensor {ascii(name)[:200]} is not lora_a, lora_b or m of a module")
        tensor, module = match["tensor"], modules.setdefault(match["module"], {})
        if tensor == "m":
            module["lora_magnitude_vector"] = View(file.shape(name), (Piece(name),))
            continue
        rows, columns = shape_2d(file, name)
        names = _EMBEDDING_NAMES if match["module"].endswith(_EMBEDDING) else _NAMES
        module[names[tensor]] = View((columns, rows), (Piece(name, transposed=True),))
    more: dict[str, Any] = {"use_dora": True} if kind == "dora" else {}
    return from_modules(file, modules, dict.fromkeys(modules, scale), **more)


def _scale(parameters: Any) -> float:
    if not isinstance(parameters, dict) or "scale" not in parameters:
        raise refusal("lora_parameters", f"is {shown(parameters)}; an object with the scale is needed")
    if "alpha" in parameters:
        raise refusal("lora_parameters", "has an alpha, which versions of MLX apply differently; fuse the adapter")
    return checked_alpha("lora_parameters", parameters["scale"])
