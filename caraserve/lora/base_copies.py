"""Tensors of the base model in an adapter's file: of trained modules (`modules_to_save`), or as they were before. Those
that equal the base model's are left out; any other one would change more than A and B say, and is refused."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import AdapterTensors
from caraserve.lora.peft_fields import refusal, shown
from caraserve.lora.tensor_names import SavedTensor
from caraserve.model.base_tensors import BaseTensors
from caraserve.util.units import human_bytes


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A tensor in an adapter's file that stands for one of the base model."""

    saved: SavedTensor
    base: str  # name of the base model's tensor


def base_copy(saved: SavedTensor, tensors: AdapterTensors, base: BaseTensors) -> BaseCopy | None:
    """Returns the copy that a tensor is, None if the base model has no such tensor. Raises AdapterRejected for one of
    another shape, and TensorFileError."""
    name = base.find(saved.name)
    if name is None:
        return None
    if (shape := tensors.shape(saved.stored)) != (ours := base.shape(name)):
        raise AdapterRejected(f"tensor {saved.stored} has shape {list(shape)}; the base model's has {list(ours)}")
    return BaseCopy(saved, name)


def check_saved_modules(modules: Iterable[str], copies: Sequence[BaseCopy]) -> None:
    """Raises AdapterRejected for a module of `modules_to_save` of which the file has nothing."""
    names = [copy.saved.name.rpartition(".")[0] for copy in copies]
    for module in modules:
        if not any(name.endswith(module) for name in names):  # as in peft, also without a dot before it
            raise refusal("modules_to_save", f"has {shown(module)}, of which the file has no tensors")


def check_copies(copies: Iterable[BaseCopy], tensors: AdapterTensors, base: BaseTensors | None) -> None:
    """Compares copies with the base model. Raises AdapterRejected for one that differs, and TensorFileError."""
    for copy in copies:
        assert base is not None, "copies are found only with a base model"
        stored = copy.saved.stored
        rows = base.changed_rows(copy.base, partial(tensors.rows, stored), tensors.dtype(stored))
        if len(rows):
            raise _refused(copy, tensors, len(rows))


def _refused(copy: BaseCopy, tensors: AdapterTensors, changed: int) -> AdapterRejected:
    name, saved = copy.saved.name, copy.saved
    if saved.is_original:
        return AdapterRejected(f"{saved.stored} differs from the base model's; the adapter belongs to another base")
    rows, *rest = tensors.shape(saved.stored)
    if not rest:
        what = "norms" if "norm" in name else "biases"
        return AdapterRejected(f"modules_to_save holds {name}; trained {what} are not supported")
    num_bytes = tensors.dtype(saved.stored).itemsize * rows * rest[0]
    return AdapterRejected(
        f"{tensors.name}: {name} replaces {changed} of {rows} rows ({human_bytes(num_bytes)}) of the base; such "
        "changes are not supported. Train the module as a LoRA target or use trainable_token_indices"
    )
