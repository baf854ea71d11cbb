"""Adapter folders written without peft, so that a test can damage any part of them."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from caraserve.backend_factory import compile_copies
from caraserve.core.lora_layout import A_COLUMNS, PANEL, HostAdapter, SiteSpan, aligned_bytes
from caraserve.lora.image_filler import ImageFiller
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.dtype import to_float32
from caraserve.model.families import plan_of
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up, ceil_div

RANK = 4
MISSING = object()  # as the value of a field: the field is left out
Tensors = dict[str, NDArray[Any]]

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SPEC: DecoderPlan = plan_of(FIELDS)
LINEARS = {linear.target: linear for linear in SPEC.layers[0].linears}
TARGETS = tuple(LINEARS)


def tensor_name(layer: int, target: str, half: str) -> str:
    """Writes the name as peft saves it."""
    module = LINEARS[target].module.replace("layers.0.", f"layers.{layer}.")
    return f"base_model.model.{module}.lora_{half}.weight"


def tensors_for(targets: tuple[str, ...] = ("q_proj",), layers: tuple[int, ...] = (0, 1), rank: int = RANK) -> Tensors:
    """Returns random A and B for `SPEC`, the same ones each time."""
    rng = np.random.default_rng(0)
    tensors: Tensors = {}
    for layer in layers:
        for target in targets:
            linear = LINEARS[target]
            tensors[tensor_name(layer, target, "A")] = rng.standard_normal((rank, linear.inputs), np.float32)
            tensors[tensor_name(layer, target, "B")] = rng.standard_normal((linear.outputs, rank), np.float32)
    return tensors


def write_adapter(folder: Path, changes: Mapping[str, Any] | None = None, tensors: Tensors | None = None) -> Path:
    """Writes a valid adapter of q_proj, with `changes` to its configuration or with other tensors."""
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], **(changes or {})}
    folder.mkdir(parents=True, exist_ok=True)
    kept = {field: value for field, value in fields.items() if value is not MISSING}
    (folder / "adapter_config.json").write_text(json.dumps(kept), encoding="utf-8")
    save_file(tensors_for() if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


@cache
def compiled_filler() -> ImageFiller:
    """Returns the filler of a server with three threads."""
    return ImageFiller(compile_copies(), helpers=2)


def read(folder: Path, plan: DecoderPlan, filled: int = 0) -> HostAdapter:
    """Reads a whole adapter into memory that was filled with the byte `filled`. Checks that compiled code and several
    threads make the same image as NumPy."""
    spec = inspect_adapter(folder, plan, filler=compiled_filler())
    images = []
    for filler in (ImageFiller(), compiled_filler()):
        into = aligned_bytes(spec.num_bytes)
        into[:] = filled
        images.append(read_adapter(folder, plan, into, filler=filler))
    plain, compiled = images
    assert plain.spec == compiled.spec == spec
    assert np.array_equal(plain.data, compiled.data)
    return compiled


def matrices(
    adapter: HostAdapter, span: SiteSpan, plan: DecoderPlan
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns A [padded rank, padded inputs] and B [padded rank, padded outputs] of a site, from the image's bytes."""
    site, rank, dtype = plan.layers[span.layer].sites[span.site], span.padded_rank, adapter.spec.dtype

    def stored(offset: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        data = adapter.data[offset : offset + int(np.prod(shape)) * dtype.itemsize]
        return to_float32(data.view(dtype.storage), dtype).reshape(shape)

    a = stored(span.a_offset, (rank, align_up(site.inputs, A_COLUMNS)))
    panels = stored(span.b_offset, (ceil_div(site.outputs, PANEL), rank, PANEL))
    return a, panels.transpose(1, 0, 2).reshape(rank, -1)
