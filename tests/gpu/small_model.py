"""The spec of a small model, and a plan whose layers differ, for tests that need no checkpoint."""

from dataclasses import replace
from typing import Any

from caraserve.model.families import plan_of
from caraserve.model.plan import Attention, Block, DecoderPlan, LayerPlan
from tests.plans import made_up
from tests.plans.made_up import HIDDEN, KV, Q

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SPEC: DecoderPlan = plan_of(CONFIG)


def mixed_plan() -> DecoderPlan:
    """Returns a plan of two layers with fused modules. The second has six sites of one module, two of them three
    columns wide, and fewer sites in its MLP. The last groups of both layers' blocks have the same shapes."""
    plan, (attention, mlp) = made_up.gated(), made_up.parallel().layers[1].blocks
    parts = ("q", Q), ("a", 3), ("k", KV), ("b", 3), ("v", KV), ("z", Q)
    assert isinstance(attention.body, Attention)
    fused = replace(attention.body, linears=(made_up.linear(1, "in_proj", HIDDEN, *parts),))
    return replace(plan, layers=(plan.layers[0], LayerPlan((Block(fused, attention.pre), mlp))))
