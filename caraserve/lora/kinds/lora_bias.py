"""LoRA with a trained bias of B: W x + alpha / r · (B A x + bias)."""

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from caraserve.lora.kinds.lora import Lora
from caraserve.model.base_linears import BaseLinears
from caraserve.model.linear_plan import LinearPlan

_BIAS = "lora_B.bias"


class LoraBias(Lora):
    """A and B are those of LoRA; every module has a bias."""

    title = "LoRA with trained biases (lora_bias)"
    switch: str | None = "lora_bias"
    fields = Lora.fields | {"lora_bias"}
    what = "LoRA A or B, or B's bias,"
    tensor_name = re.compile(
        r"(?P<module>.+?)\.(?P<tensor>lora_A(?!.*\.bias$)|lora_B)(?P<adapter>(?:\.(?!bias$)[A-Za-z0-9_-]+)?)"
        r"(?:\.weight|(?P<suffix>\.bias))"
    )
    sources: Mapping[str, tuple[str, ...]] = {**Lora.sources, "vectors": (_BIAS,)}

    def shapes(self, rank: int, linear: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """The bias has as many numbers as there are outputs."""
        return {**super().shapes(rank, linear), _BIAS: (linear.outputs,)}

    def vectors(
        self, tensors: Mapping[str, NDArray[np.float32]], scale: float, linear: LinearPlan, base: BaseLinears | None
    ) -> NDArray[np.float32]:
        """Returns factors of 1, and the scaled bias."""
        bias = tensors[_BIAS] * np.float32(scale)
        return np.stack([np.ones_like(bias), bias])
