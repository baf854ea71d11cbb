"""Writes an adapter as PEFT would have saved it: plain LoRA, with the values that are served."""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from caraserve.core.lora_layout import modules_of
from caraserve.errors import AdapterRejected
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.image_writer import ImageWriter, TensorLayout
from caraserve.lora.kinds.lora import Lora
from caraserve.lora.peft_fields import CONFIG_NAME, Fields
from caraserve.lora.tensor_names import peft_name

# Fields that say which tensors there are and how they are applied: the writer sets them. All others are kept.
_OWN = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "fan_in_fan_out"),
    "target_parameters",
)
_WRITTEN = ("A", "B")
_KEPT_WITH = "peft_type"  # a field of PEFT's configurations; those of other programs are not kept


def write_adapter(layout: TensorLayout, fields: Fields, folder: Path) -> None:
    """Writes the two files of an adapter to a folder. `fields`: of its configuration. Raises AdapterRejected for one
    that is more than LoRA, or whose values cannot be used; TensorFileError, and OSError."""
    sources = {tensor for matrix in _WRITTEN for tensor in layout.kind.sources[matrix]}
    for adapted in layout.modules.values():
        if not adapted.tensors.keys() <= sources:
            raise AdapterRejected(f"{adapted.names[0]} is changed by more than A and B; only plain LoRA can be written")
    if layout.head is not None:
        raise AdapterRejected(f"{layout.head} is a score head; only LoRA of layers can be written")
    if layout.vocabulary:
        raise AdapterRejected(f"{layout.vocabulary[0].module} is changed; only LoRA of layers can be written")
    config = json.dumps(_config(layout, fields), indent=2, ensure_ascii=False)
    (folder / CONFIG_NAME).write_text(config + "\n", encoding="utf-8")
    writer, entries, end = ImageWriter(layout), {}, 0
    for name, shape in _tensors(layout):
        start, end = end, end + math.prod(shape) * layout.spec.dtype.itemsize
        entries[name] = {"dtype": layout.spec.dtype.name, "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with (folder / TENSORS_NAME).open("xb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for module in sorted(layout.modules):
            for matrix in _WRITTEN:
                file.write(np.ascontiguousarray(writer.values(module, matrix)).data)


def _tensors(layout: TensorLayout) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the names and shapes of A and B, layer after layer."""
    for layer, index in sorted(layout.modules):
        linear, rank = layout.plan.layers[layer].linears[index], layout.modules[layer, index].rank
        yield peft_name(linear.name_in_adapters, "lora_A.weight"), (rank, linear.inputs)
        yield peft_name(linear.name_in_adapters, "lora_B.weight"), (linear.outputs, rank)


def _config(layout: TensorLayout, fields: Fields) -> dict[str, Any]:
    plan, modules = layout.plan, layout.modules
    names = {place: plan.layers[place[0]].linears[place[1]].name_in_adapters for place in sorted(modules)}
    ranks = {name: modules[place].rank for place, name in names.items()}
    alphas = {name: _alpha(modules[place].scale, modules[place].rank) for place, name in names.items()}
    targets = layout.spec.targets
    has_all = set(modules_of(plan, targets)) == set(modules)
    rank, alpha = _most_common(ranks), _most_common(alphas)
    own = {*_OWN, *(layout.kind.fields - Lora.fields)}  # A and B are written as plain LoRA, whatever they are made of
    kept = {field: value for field, value in fields.items() if field not in own} if _KEPT_WITH in fields else {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **kept,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: one for name, one in ranks.items() if one != rank},
        "alpha_pattern": {name: one for name, one in alphas.items() if one != alpha},
        "target_modules": list(targets) if has_all else list(names.values()),
    }


def _alpha(scale: float, rank: int) -> float:
    """Returns the alpha that gives a scale, exactly where a float does."""
    alpha = scale * rank
    near = (alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf))
    found = next((one for one in near if one / rank == scale), alpha)
    return int(found) if found.is_integer() else found


def _most_common(values: Mapping[str, Any]) -> Any:
    return Counter(values.values()).most_common(1)[0][0]
