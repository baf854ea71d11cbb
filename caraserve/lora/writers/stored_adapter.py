"""An adapter as PEFT would have stored it, and helpers of the files that translate other programs' adapters."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import AdapterTensors, TensorSource, View
from caraserve.lora.peft_fields import Fields
from caraserve.lora.tensor_names import peft_name
from caraserve.model.linear_plan import interleaved_rows
from caraserve.model.plan import Attention, DecoderPlan, Mlp


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """The configuration and the tensors of an adapter, as PEFT names them."""

    fields: Fields
    tensors: AdapterTensors


def from_modules(
    file: TensorSource, modules: Mapping[str, Mapping[str, View]], scales: Mapping[str, float], **fields: Any
) -> StoredAdapter:
    """Returns an adapter of modules {name: {PEFT's name of the tensor in it: how it is made}} with these scales. Raises
    AdapterRejected for a module without A."""
    views: dict[str, View | None] = {}
    ranks: dict[str, int] = {}
    for name, tensors in modules.items():
        views |= {peft_name(name, tensor): view for tensor, view in tensors.items()}
        a = tensors.get("lora_A.weight") or tensors.get("lora_embedding_A")
        if a is None:
            raise AdapterRejected(f"{file.name}: {name} has no A")
        ranks[name] = a.shape[0]
    if not ranks:
        raise AdapterRejected(f"{file.name} has no LoRA tensors")
    rank, _ = Counter(ranks.values()).most_common(1)[0]
    alphas = {name: scales[name] * one for name, one in ranks.items()}
    alpha, _ = Counter(alphas.values()).most_common(1)[0]
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{name}$": one for name, one in ranks.items() if one != rank},
        "alpha_pattern": {f"^{name}$": one for name, one in alphas.items() if one != alpha},
        "target_modules": sorted(ranks),
    }
    return StoredAdapter(config | fields, AdapterTensors(file, views))


def separated_rows(plan: DecoderPlan, layer: int, role: str, outputs: int) -> tuple[int, ...] | None:
    """Returns the rows of B in Hugging Face's order, for a file with q's and k's in the order in which neighbours are
    rotated together. None for other roles, and for more or fewer rows than the attention's, which is refused later."""
    attention = plan.layers[layer].attention if layer < len(plan.layers) else None
    if role not in ("q", "k") or attention is None:
        return None
    heads = attention.heads if role == "q" else attention.kv_heads
    is_whole = outputs == heads * attention.head_dim
    return interleaved_rows(heads, attention.head_dim, attention.head_dim) if is_whole else None


def module_of(plan: DecoderPlan, layer: int, body: type[Attention | Mlp], roles: str) -> str | None:
    """Returns the name of the module in an attention or an MLP that has the outputs of these roles, as `q` or `qkv`;
    for a part of a joined module, the name that it would have alone. None if there is none."""
    blocks = plan.layers[layer].blocks if layer < len(plan.layers) else ()
    for block in blocks:
        if not isinstance(block.body, body):
            continue
        for linear in (*block.body.linears, block.body.out):
            own = [part.role for part in linear.parts]
            name = linear.name_in_adapters
            if "".join(own) == roles or own == [roles]:
                return name
            if roles in own or (roles == "qkv" and own[0] == "q"):
                return f"{name.rpartition('.')[0]}.{roles}_proj"
    return None


def shape_2d(file: TensorSource, name: str) -> tuple[int, int]:
    """Returns the shape of a matrix. Raises AdapterRejected for a tensor of other dimensions, and TensorFileError."""
    shape = file.shape(name)
    if len(shape) != 2:
        raise AdapterRejected(
            f"{file.name}: tensor {name} has {len(shape)} dimensions; of experts and the like, no "
            "adapters are converted"
        )
    return shape[0], shape[1]
