"""A made-up plan with fused modules whose parts lie in several ways, and adapters of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.model.linear_plan import LinearPlan, Part, interleaved_rows, part_rows
from caraserve.model.plan import DecoderPlan, LayerPlan
from tests.lora.folders import SPEC

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 4, 2, 16, 64, 96
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
Parts = tuple[Part, ...]


def by_kv_head() -> Parts:
    """Returns the parts of a module that has, for each KV head, its query heads, then k, then v, as InternLM2."""
    per_head = np.arange(Q + 2 * KV).reshape(KV_HEADS, -1, HEAD_DIM)
    rows = per_head[:, :-2], per_head[:, -2], per_head[:, -1]
    return tuple(Part(role, tuple(part.ravel().tolist())) for role, part in zip("qkv", rows, strict=True))


def rotated_in_pairs() -> Parts:
    """Returns the parts of a module whose q and k are rotated in pairs of neighbours."""
    q, k = interleaved_rows(HEADS, HEAD_DIM, 8), interleaved_rows(KV_HEADS, HEAD_DIM, 8)
    return Part("q", q), Part("k", tuple(Q + row for row in k)), Part("v", range(Q + KV, Q + 2 * KV))


QKV: dict[str, Parts] = {
    "one after another": part_rows((("q", Q), ("k", KV), ("v", KV))),
    "by KV head": by_kv_head(),
    "rotated in pairs": rotated_in_pairs(),
}
GATE_UP: dict[str, Parts] = {
    "one after another": part_rows((("gate", INTERMEDIATE), ("up", INTERMEDIATE))),
    "alternating": (Part("gate", range(0, 2 * INTERMEDIATE, 2)), Part("up", range(1, 2 * INTERMEDIATE, 2))),
}


def fused_plan(qkv: str = "one after another", gate_up: str = "one after another", **changed: Any) -> DecoderPlan:
    """Returns the plan of `SPEC` with fused modules whose parts lie as said."""
    layers = []
    for index, layer in enumerate(SPEC.layers):
        attention, mlp = layer.blocks
        name = f"model.layers.{index}"
        fused = LinearPlan(f"{name}.self_attn.qkv_proj", HIDDEN, Q + 2 * KV, QKV[qkv])
        both = LinearPlan(f"{name}.mlp.gate_up_proj", HIDDEN, 2 * INTERMEDIATE, GATE_UP[gate_up])
        blocks = (
            replace(attention, body=replace(attention.body, linears=(fused,))),
            replace(mlp, body=replace(mlp.body, linears=(both,))),
        )
        layers.append(LayerPlan(blocks))
    return replace(SPEC, layers=tuple(layers), **changed)


Tensors = dict[str, NDArray[np.float32]]
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6}


def tensors_of(plan: DecoderPlan) -> Tensors:
    """Returns random A and B of every module, with names as in the plan."""
    rng, tensors = np.random.default_rng(0), Tensors()
    for linear in (linear for layer in plan.layers for linear in layer.linears):
        name, rank = f"base_model.model.{linear.name_in_adapters}", 9 if linear.target == "gate_up_proj" else 4
        tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, linear.inputs), np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.standard_normal((linear.outputs, rank), np.float32)
    return tensors


def write(folder: Path, plan: DecoderPlan, tensors: Tensors | None = None, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = CONFIG | {"target_modules": list(plan.targets)} | changed
    if "gate_up_proj" in plan.targets:
        config = {"rank_pattern": {"mlp.gate_up_proj": 9}} | config
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors_of(plan) if tensors is None else tensors, folder / TENSORS_NAME)
    return folder
