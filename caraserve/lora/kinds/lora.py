"""LoRA: W x + alpha / r · B A x. Rank-stabilised LoRA divides by sqrt(r)."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import Array
from caraserve.lora.peft_fields import (
    Fields,
    PatternTable,
    checked_alpha,
    checked_rank,
    flag,
    pattern_table,
    refusal,
    shown,
)
from caraserve.model.plan import DecoderPlan

# Ways of initialising that only choose A's and B's first values. Others change the base weights too.
_PLAIN_INITS = ("gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The ranks and scales of modules."""

    ranks: PatternTable[int]
    alphas: PatternTable[float]
    is_rank_stabilised: bool

    def rank(self, module: str) -> int:
        return self.ranks.of(module)

    def scale(self, module: str) -> float:
        rank = self.ranks.of(module)
        return self.alphas.of(module) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


class Lora:
    """A and B are stored as they are used."""

    peft_type = "LORA"
    switch: str | None = None
    fields = frozenset(("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias"))
    what = "LoRA A or B"
    tensor_name = re.compile(r"(?P<module>.+?)\.(?P<tensor>lora_[AB])(?P<adapter>(?:\.[A-Za-z0-9_-]+)?)\.weight")
    sources: Mapping[str, tuple[str, ...]] = {"A": ("lora_A",), "B": ("lora_B",)}
    is_computed = False

    def settings(self, fields: Fields, plan: DecoderPlan) -> LoraSettings:
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
        return LoraSettings(
            pattern_table(fields, "rank_pattern", "r", checked_rank, plan),
            pattern_table(fields, "alpha_pattern", "lora_alpha", checked_alpha, plan),
            flag(fields, "use_rslora"),
        )

    def shapes(self, rank: int, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:
        """A is [rank, inputs], B is [outputs, rank]."""
        return {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}

    def matrix(self, name: str, tensors: Mapping[str, Array]) -> Array:
        """Returns the one tensor of which a matrix consists."""
        return tensors[f"lora_{name}"]

    def update(self, tensors: Mapping[str, NDArray[np.float64]], scale: float) -> NDArray[np.float64]:
        """Returns scale · B A."""
        return scale * tensors["lora_B"] @ tensors["lora_A"]
