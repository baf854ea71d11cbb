"""The stored tensors of a base model, found by the names that adapters have for them, to compare copies with."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.model.base_linears import BaseLinears
from caraserve.model.checkpoint import Rows, StoredTensors, stored_tensors
from caraserve.model.dtype import Dtype, rounded, to_float32
from caraserve.model.plan import DecoderPlan

_PIECE_BYTES = 4 << 20  # that are compared at a time


class BaseTensors:
    """The tensors of a model. Thread-safe; methods raise TensorFileError."""

    def __init__(self, folder: Path, plan: DecoderPlan) -> None:
        self._folder, self._plan = folder, plan
        self.linears = BaseLinears(folder, plan.stored_names)

    @cached_property
    def _tensors(self) -> StoredTensors:
        return stored_tensors(self._folder)

    def find(self, name: str) -> str | None:
        """Returns the name of the stored tensor that adapters call `name`, None if the base model has none."""
        stored = (one for candidate in self._candidates(name) for one in self._plan.stored_names(candidate))
        return next((one for one in stored if one in self._tensors.names), None)

    def _candidates(self, name: str) -> Iterator[str]:
        plan = self._plan
        module, _, tensor = name.rpartition(".")
        word = module.rpartition(".")[2]
        if module in plan.adapter_modules:
            layer, index = plan.adapter_modules[module]
            yield f"{plan.layers[layer].linears[index].module}.{tensor}"
        if tensor == "weight" and word == plan.embed.split(".")[-2]:
            yield plan.embed
        if tensor == "weight" and word == (plan.head or "lm_head.weight").split(".")[-2]:
            yield plan.head or plan.embed
        yield name
        stored = plan.layers[0].linears[0].module.partition("layers.")[0]
        own = max(filter(name.startswith, plan.adapter_prefixes), key=len, default="")
        yield from (prefix + name.removeprefix(own) for prefix in (stored, *plan.adapter_prefixes))

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a stored tensor."""
        return self._tensors.shape(name)

    def changed_rows(self, name: str, rows: Rows, dtype: Dtype) -> NDArray[np.intp]:
        """Returns the rows of a stored tensor that differ from a copy of the same shape. `rows(start, stop)`: reads the
        copy, in `dtype`; the base's values are rounded to it. Memory does not grow with the tensor."""
        found: list[NDArray[np.intp]] = []
        count, *rest = self.shape(name)
        with self._tensors.open(name) as (stored_rows, source):
            step = max(1, _PIECE_BYTES // max(1, source.itemsize * int(np.prod(rest))))
            for start in range(0, count, step):
                stop = min(count, start + step)
                ours, copy = stored_rows(start, stop), rows(start, stop)
                if source is not dtype:
                    ours = rounded(to_float32(ours, source), dtype)
                bits = np.uint32 if dtype is Dtype.F32 else np.uint16
                different = (ours.view(bits) != copy.view(bits)).reshape(stop - start, -1).any(axis=1)
                found.append(np.flatnonzero(different) + start)
        return np.concatenate(found)
