"""DoRA: m / n ⊙ (W x + scale · B A x) + b, where n is the norm of each row of W + scale · B A, and b the base's bias.

n takes the base's weights, which are read when an adapter is read. All sums are in double precision: their order, which
depends on the machine, must not change a bit of n, or two machines would give one adapter two digests.
"""

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from caraserve.errors import AdapterRejected
from caraserve.lora.kinds.lora import Lora
from caraserve.model.base_linears import BaseLinears
from caraserve.model.linear_plan import LinearPlan

_MAGNITUDE = "lora_magnitude_vector"


class Dora(Lora):
    """A and B are those of LoRA; every output has a magnitude m, which the factor m / n gives it."""

    title = "DoRA"
    switch: str | None = "use_dora"
    fields = Lora.fields | {"use_dora"}
    what = "LoRA A or B or a magnitude vector"
    tensor_name = re.compile(
        r"(?P<module>.+?)\.(?P<tensor>lora_[AB](?=.*\.weight$)|lora_magnitude_vector)"
        r"(?P<adapter>(?:\.(?!weight$)[A-Za-z0-9_-]+)?)(?:\.weight)?"
    )
    sources: Mapping[str, tuple[str, ...]] = {**Lora.sources, "vectors": (_MAGNITUDE, "lora_A", "lora_B")}

    def shapes(self, rank: int, linear: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """There are as many magnitudes as outputs."""
        return {**super().shapes(rank, linear), _MAGNITUDE: (linear.outputs,)}

    def vectors(
        self, tensors: Mapping[str, NDArray[np.float32]], scale: float, linear: LinearPlan, base: BaseLinears | None
    ) -> NDArray[np.float32]:
        """Returns m / n, and what takes the factor off the base's bias."""
        if base is None:
            raise AdapterRejected("DoRA takes the norms of the base model's weights, and this server has none")
        a, b = (tensors[name].astype(np.float64) for name in ("lora_A", "lora_B"))
        norms = base.norms(linear, scale * b, a)
        if not norms.all():
            raise AdapterRejected(f"output {np.flatnonzero(norms == 0)[0]} of {linear.module} has weights of norm 0")
        factors = tensors[_MAGNITUDE] / norms
        return np.stack([factors, (1 - factors) * base.bias(linear)]).astype(np.float32)
