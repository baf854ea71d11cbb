"""VeRA: all modules share random A and B; each has a factor for every rank row and for every output.

As LoRA with scale 1: the first columns of A with their rows times `vera_lambda_d`, and the first rows of B times
`vera_lambda_b`.
"""

import re
from collections.abc import Mapping

from caraserve.core.lora_layout import Array
from caraserve.errors import AdapterRejected
from caraserve.lora.peft_fields import CONFIG_NAME, Fields, checked_rank, flag, refusal, shown
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan


class Vera:
    """A and B are products of shared tensors and a module's own factors."""

    title = "VeRA"
    peft_type = "VERA"
    switch: str | None = None
    fields = frozenset(
        ("r", "bias", "save_projection", "projection_prng_key", "vera_dropout", "d_initial", "init_weights")
    )
    what = "vera_lambda_d or vera_lambda_b"
    tensor_name = re.compile(
        r"(?P<module>.+?)\.(?P<tensor>vera_lambda_[bd])(?P<adapter>(?:\.(?!weight$)[A-Za-z0-9_-]+)?)(?:\.weight)?"
    )
    shared: Mapping[str, int] = {"vera_A": 1, "vera_B": 0}
    sources: Mapping[str, tuple[str, ...]] = {"A": ("vera_lambda_d", "vera_A"), "B": ("vera_lambda_b", "vera_B")}
    is_computed = True

    def __init__(self, fields: Fields, plan: DecoderPlan) -> None:
        if fields.get("bias", "none") != "none":
            raise refusal("bias", f"is {shown(fields['bias'])}; only 'none' is supported")
        if fields.get("save_projection") is not None and not flag(fields, "save_projection"):
            raise AdapterRejected(f"{CONFIG_NAME}: the file lacks vera_A and vera_B; save with save_projection true")
        self._rank = checked_rank("r", fields.get("r", 256))  # peft's default

    def rank(self, module: str) -> int:
        return self._rank

    def scale(self, module: str) -> float:
        return 1.0

    def shapes(self, rank: int, linear: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """The shared matrices are as large as the largest module."""
        own = {"vera_lambda_d": (rank,), "vera_lambda_b": (linear.outputs,)}
        return {**own, "vera_A": (rank, linear.inputs), "vera_B": (linear.outputs, rank)}

    def matrix(self, name: str, tensors: Mapping[str, Array], linear: LinearPlan) -> Array:
        """Multiplies the module's part of a shared matrix by the module's factors."""
        values = {one: to_float32(tensor, Dtype.F32) for one, tensor in tensors.items()}
        if name == "A":
            return values["vera_A"][:, : linear.inputs] * values["vera_lambda_d"][:, None]
        return values["vera_B"][: linear.outputs] * values["vera_lambda_b"][:, None]
