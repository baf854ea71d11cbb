"""QALoRA: A reads groups of g neighbouring inputs, as peft computes it: the mean of each times the number of groups.

As LoRA: column i of A is the stored column ⌊i / g⌋ times (inputs / g) / g.
"""

from collections.abc import Mapping

import numpy as np

from caraserve.core.lora_layout import Array
from caraserve.lora.kinds.lora import Lora
from caraserve.lora.peft_fields import Fields, refusal, shown
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan


class QaLora(Lora):
    """A is stored with one column for each group of inputs."""

    title = "QALoRA"
    switch: str | None = "use_qalora"
    fields = Lora.fields | {"use_qalora", "qalora_group_size"}
    is_computed = True

    def __init__(self, fields: Fields, plan: DecoderPlan) -> None:
        super().__init__(fields, plan)
        size = fields.get("qalora_group_size", 16)  # peft's default
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise refusal("qalora_group_size", f"is {shown(size)}; a positive integer is needed")
        self._group_size = size

    def shapes(self, rank: int, linear: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """A is [rank, groups]. Refuses inputs that are not a whole number of groups."""
        if linear.inputs % self._group_size:
            raise refusal("qalora_group_size", f"is {self._group_size}; {linear.target} has {linear.inputs} inputs")
        return {**super().shapes(rank, linear), "lora_A": (rank, linear.inputs // self._group_size)}

    def matrix(self, name: str, tensors: Mapping[str, Array], linear: LinearPlan) -> Array:
        """Repeats and scales the columns of A."""
        if name == "B":
            return tensors["lora_B"]
        factor = np.float32(linear.inputs // self._group_size / self._group_size)
        return np.repeat(to_float32(tensors["lora_A"], Dtype.F32) * factor, self._group_size, axis=1)
