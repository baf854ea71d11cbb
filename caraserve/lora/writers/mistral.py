"""Adapters of mistral-finetune: `lora.safetensors` beside a `params.json`. Modules have the names of Mistral's own
files, and the outputs of q and k are in the order in which neighbours are rotated together."""

import re

from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import Piece, TensorSource, View
from caraserve.lora.peft_fields import Fields, shown
from caraserve.lora.writers.stored_adapter import StoredAdapter, from_modules, module_of, separated_rows, shape_2d
from caraserve.model.plan import Attention, DecoderPlan, Mlp

_TENSOR = re.compile(
    r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?:attention\.(?=w[qkvo])|feed_forward\.(?=w[123]))(?P<module>w[qkvo123])\."
    r"(?P<tensor>lora_[AB])\.weight"
)
_MODULES: dict[str, tuple[type[Attention | Mlp], str]] = {
    "wq": (Attention, "q"),
    "wk": (Attention, "k"),
    "wv": (Attention, "v"),
    "wo": (Attention, "out"),
    "w1": (Mlp, "gate"),
    "w2": (Mlp, "down"),
    "w3": (Mlp, "up"),
}


def translated(fields: Fields, file: TensorSource, plan: DecoderPlan) -> StoredAdapter:
    """Returns the adapter under PEFT's names. `fields`: of params.json. Raises AdapterRejected, and TensorFileError."""
    scale = _scale(fields)
    modules: dict[str, dict[str, View]] = {}
    for stored in file.names:
        match = _TENSOR.fullmatch(stored)
        layer = int(match["layer"]) if match else 0
        name = module_of(plan, layer, *_MODULES[match["module"]]) if match else None
        if match is None or name is None:
            raise AdapterRejected(f"tensor {ascii(stored)[:200]} is not LoRA A or B of a module of the base model")
        shape = shape_2d(file, stored)
        role = _MODULES[match["module"]][1]
        rows = separated_rows(plan, layer, role, shape[0]) if match["tensor"] == "lora_B" else None
        modules.setdefault(name, {})[f"{match['tensor']}.weight"] = View(shape, (Piece(stored, rows=rows),))
    return from_modules(file, modules, dict.fromkeys(modules, scale))


def _scale(fields: Fields) -> float:
    lora = fields.get("lora")
    scaling = lora.get("scaling") if isinstance(lora, dict) else None
    if not isinstance(scaling, int | float) or isinstance(scaling, bool) or not abs(scaling) < 1e6:
        raise AdapterRejected(f"params.json: lora is {shown(lora)}; an object with the scaling is needed")
    return float(scaling)
