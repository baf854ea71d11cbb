"""Adapters in GGUF files, as llama.cpp's converter writes them: `general.type` adapter, A and B of each module named as
in GGUF models. Their scale is alpha divided by the rank of each module, or 1 if alpha is 0."""

import re

from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import Piece, View
from caraserve.lora.writers.stored_adapter import StoredAdapter, from_modules, module_of, separated_rows, shape_2d
from caraserve.model.gguf_reader import INTERLEAVED, GgufFile
from caraserve.model.plan import Attention, DecoderPlan, Mlp

_TENSOR = re.compile(r"(?:blk\.(?P<layer>0|[1-9][0-9]{0,5})\.)?(?P<module>[a-z_]+)\.weight\.lora_(?P<tensor>[ab])")
_MODULES: dict[str, tuple[type[Attention | Mlp], str]] = {
    "attn_q": (Attention, "q"),
    "attn_k": (Attention, "k"),
    "attn_v": (Attention, "v"),
    "attn_qkv": (Attention, "qkv"),
    "attn_output": (Attention, "out"),
    "ffn_gate": (Mlp, "gate"),
    "ffn_up": (Mlp, "up"),
    "ffn_down": (Mlp, "down"),
}
_HEAD, _EMBEDDING = "output", "token_embd"


def translated(file: GgufFile, plan: DecoderPlan) -> StoredAdapter:
    """Returns the adapter under PEFT's names. Raises AdapterRejected, and TensorFileError."""
    _check(file)
    alpha = float(file.metadata["adapter.lora.alpha"])
    modules: dict[str, dict[str, View]] = {}
    for stored in file.names:
        match = _TENSOR.fullmatch(stored)
        name = None if match is None else _name(file, stored, match, plan)
        if match is None or name is None:
            raise AdapterRejected(f"tensor {ascii(stored)[:200]} is not lora_a or lora_b of a module of the base model")
        half = match["tensor"].upper()
        rows, columns = shape_2d(file, stored)
        module = modules.setdefault(name, {})
        if match["module"] == _EMBEDDING:  # A of an embedding is stored transposed
            is_a = half == "A"
            shape = (columns, rows) if is_a else (rows, columns)
            module[f"lora_embedding_{half}"] = View(shape, (Piece(stored, transposed=is_a),))
        else:
            order = _order(file, match, rows, plan)
            module[f"lora_{half}.weight"] = View((rows, columns), (Piece(stored, rows=order),))
    scales = {name: alpha / _rank(tensors) if alpha else 1.0 for name, tensors in modules.items()}
    return from_modules(file, modules, scales)


def _check(file: GgufFile) -> None:
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (found := file.metadata.get(key)) != wanted:
            raise AdapterRejected(f"{file.name}: {key} is {ascii(found)[:80]}, not {wanted!r}")
    alpha = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < 1e9:
        raise AdapterRejected(f"{file.name}: adapter.lora.alpha is {ascii(alpha)[:80]}, not a number below 1e9")
    if any(key.startswith("adapter.alora.") for key in file.metadata):
        raise AdapterRejected(f"{file.name}: it has invocation tokens; of GGUF files, only plain LoRA is served")


def _name(file: GgufFile, stored: str, match: re.Match[str], plan: DecoderPlan) -> str | None:
    module = match["module"]
    if match["layer"] is None:
        return {_HEAD: "lm_head", _EMBEDDING: plan.embed.removesuffix(".weight")}.get(module)
    if module not in _MODULES:
        return None
    body, role = _MODULES[module]
    layer = int(match["layer"])
    if module == "ffn_up":  # of some families it holds gate and up
        other = stored.replace("lora_a", "lora_b")
        part = module_of(plan, layer, Mlp, "gateup")
        target = plan.adapter_modules.get(part or "")
        outputs = plan.layers[layer].linears[target[1]].outputs if target is not None else 0
        if other in file.names and file.shape(other)[0] == outputs:
            return part
    return module_of(plan, layer, body, role)


def _order(file: GgufFile, match: re.Match[str], rows: int, plan: DecoderPlan) -> tuple[int, ...] | None:
    """Returns the rows of B in Hugging Face's order, None if they are stored so."""
    if match["tensor"] != "b" or str(file.metadata.get("general.architecture")) not in INTERLEAVED:
        return None
    _, role = _MODULES.get(match["module"], (None, ""))
    return separated_rows(plan, int(match["layer"] or 0), role, rows)


def _rank(tensors: dict[str, View]) -> int:
    first = tensors.get("lora_A.weight") or tensors.get("lora_embedding_A")
    return max(1, first.shape[0]) if first is not None else 1
