"""Adapters of Tinker: files like PEFT's, in which some modules have other names. All other PEFT files are left as they
are."""

from collections import Counter

from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import AdapterTensors, Piece, TensorSource, View, as_stored
from caraserve.lora.peft_fields import Fields
from caraserve.lora.writers.stored_adapter import StoredAdapter
from caraserve.model.plan import DecoderPlan

_HEAD, _ATTENTION = "model.unembed_tokens.", ".attn."


def translated(fields: Fields, file: TensorSource, plan: DecoderPlan) -> StoredAdapter:
    """Returns the adapter under PEFT's names. Raises AdapterRejected, and TensorFileError."""
    names = {name: _renamed(name, plan) for name in file.names}
    if all(name == own for name, own in names.items()):
        return StoredAdapter(fields, as_stored(file))
    if twice := [own for own, count in Counter(names.values()).items() if count > 1]:
        raise AdapterRejected(f"{file.name}: two tensors are {twice[0]!a:.200} under the names of PEFT and of Tinker")
    views = {own: None if own == name else View(file.shape(name), (Piece(name),)) for name, own in names.items()}
    return StoredAdapter(fields, AdapterTensors(file, views))


def _renamed(name: str, plan: DecoderPlan) -> str:
    renamed = name.replace(_HEAD, "lm_head.")
    if _ATTENTION in renamed and not any(_ATTENTION in module for module in plan.adapter_modules):
        return renamed.replace(_ATTENTION, ".self_attn.")
    return renamed
