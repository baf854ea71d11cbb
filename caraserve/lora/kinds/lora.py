"""LoRA: W x + alpha / r · B A x. Rank-stabilised LoRA divides by sqrt(r)."""

import math
import re
from collections.abc import Mapping

from caraserve.core.lora_layout import Array
from caraserve.lora.peft_fields import Fields, checked_alpha, checked_rank, flag, pattern_table, refusal, shown
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan

# Ways of initialising that only choose A's and B's first values. Others change the base weights too.
_PLAIN_INITS = ("gaussian", "orthogonal", "eva", "mica")


class Lora:
    """A and B are stored as they are used. Also the base class of kinds whose configuration is like LoRA's."""

    title = "LoRA, rsLoRA"
    peft_type = "LORA"
    switch: str | None = None
    fields = frozenset(("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"))
    what = "LoRA A or B"
    tensor_name = re.compile(r"(?P<module>.+?)\.(?P<tensor>lora_[AB])(?P<adapter>(?:\.[A-Za-z0-9_-]+)?)\.weight")
    shared: Mapping[str, int] = {}
    sources: Mapping[str, tuple[str, ...]] = {"A": ("lora_A",), "B": ("lora_B",)}
    is_computed = False

    def __init__(self, fields: Fields, plan: DecoderPlan) -> None:
        """Reads ranks and scales, and refuses what would change more than A and B say."""
        if fields.get("bias", "none") != "none":
            raise refusal("bias", f"is {shown(fields['bias'])}; only 'none' is supported")
        init = fields.get("init_lora_weights")
        if not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in _PLAIN_INITS)):
            raise refusal(
                "init_lora_weights",
                f"is {shown(init)}, which may have changed the base weights; save the adapter again with "
                "path_initial_model_for_weight_conversion, or merge it",
            )
        self._ranks = pattern_table(fields, "rank_pattern", "r", checked_rank, plan)
        self._alphas = pattern_table(fields, "alpha_pattern", "lora_alpha", checked_alpha, plan)
        self._is_rank_stabilised = flag(fields, "use_rslora")

    def rank(self, module: str) -> int:
        return self._ranks.of(module)

    def scale(self, module: str) -> float:
        rank = self._ranks.of(module)
        return self._alphas.of(module) / (math.sqrt(rank) if self._is_rank_stabilised else rank)

    def shapes(self, rank: int, linear: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """A is [rank, inputs], B is [outputs, rank]."""
        return {"lora_A": (rank, linear.inputs), "lora_B": (linear.outputs, rank)}

    def matrix(self, name: str, tensors: Mapping[str, Array], linear: LinearPlan) -> Array:
        """Returns the one tensor of which a matrix consists."""
        return tensors[f"lora_{name}"]
