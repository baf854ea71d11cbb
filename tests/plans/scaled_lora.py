"""A made-up kind of adapter, added from this one file: each output of B A x has a factor of its own, as in VeRA."""

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import Array
from caraserve.lora import kinds
from caraserve.lora.kinds.lora import Lora
from caraserve.model.linear_plan import LinearPlan


class ScaledLora(Lora):
    """B is stored in two tensors: a matrix, and a factor for each of its rows."""

    switch = "use_output_scales"
    fields = Lora.fields | {"use_output_scales"}
    what = "lora_A, lora_B or lora_scale"
    tensor_name = re.compile(r"(?P<module>.+?)\.(?P<tensor>lora_[AB]|lora_scale)(?P<adapter>)(?:\.weight)?")
    sources: Mapping[str, tuple[str, ...]] = {"A": ("lora_A",), "B": ("lora_B", "lora_scale")}
    is_computed = True

    def shapes(self, rank: int, linear: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        return {**super().shapes(rank, linear), "lora_scale": (linear.outputs,)}

    def matrix(self, name: str, tensors: Mapping[str, Array], linear: LinearPlan) -> Array:
        if name == "A":
            return tensors["lora_A"]
        matrix: NDArray[np.float32] = tensors["lora_B"] * tensors["lora_scale"][:, None]
        return matrix

    @staticmethod
    def update(tensors: Mapping[str, NDArray[np.float64]], scale: float) -> NDArray[np.float64]:
        """Returns what is added to a module's weight, [outputs, inputs]: the reference."""
        return scale * tensors["lora_scale"][:, None] * tensors["lora_B"] @ tensors["lora_A"]


kinds.register(ScaledLora)
