"""InternLM2: one module of q, k and v, grouped by key-value head, and names of its own. InternLM3: Llama's names.

Their configurations are written by code that comes with the checkpoints."""

from dataclasses import dataclass

from caraserve.model.families.dense import (
    Config,
    DenseLayers,
    activation_of,
    flag,
    plan_of_layers,
    sizes_of,
)
from caraserve.model.linear_plan import LinearPlan, Part
from caraserve.model.plan import DecoderPlan
from caraserve.model.rope import rope_of


@dataclass(frozen=True)
class _GroupedLayers(DenseLayers):
    """Layers whose module of q, k and v has, for each key-value head, its query heads, its key and its value."""

    def qkv(self, name: str, rotated: int) -> tuple[LinearPlan, ...]:
        sizes = self.sizes
        shared, dim = sizes.heads // sizes.kv_heads, sizes.head_dim
        group = (shared + 2) * dim
        outputs = sizes.kv_heads * group

        def rows(first: int, count: int) -> tuple[int, ...]:
            starts = range(first * dim, outputs, group)
            return tuple(row for start in starts for row in range(start, start + count * dim))

        parts = Part("q", rows(0, shared)), Part("k", rows(shared, 1)), Part("v", rows(shared + 1, 1))
        return (LinearPlan(f"{name}.{self.qkv_names[0]}", sizes.hidden, outputs, parts, self.qkv_bias),)


def plan_internlm2(config: Config) -> DecoderPlan:
    """Returns the plan of an InternLM2 or InternLM2.5 model. Raises ModelLoadError."""
    sizes, has_bias = sizes_of(config), flag(config, "bias")
    made = _GroupedLayers.alike(
        sizes,
        rope_of(config, sizes.head_dim, sizes.max_position),
        attention_name="attention",
        qkv_names=("wqkv",),
        out_name="wo",
        mlp_name="feed_forward",
        mlp_names=("w1", "w3"),
        down_name="w2",
        norm_names=("attention_norm", None, "ffn_norm", None),
        qkv_bias=has_bias,
        o_bias=has_bias,
        activation=activation_of(config),
    )
    head = None if flag(config, "tie_word_embeddings") else "output.weight"
    return plan_of_layers(config, "internlm2", made, embed="model.tok_embeddings.weight", head=head)


def plan_internlm3(config: Config) -> DecoderPlan:
    """Returns the plan of an InternLM3 model. Raises ModelLoadError."""
    sizes, has_bias = sizes_of(config), flag(config, "bias")
    made = DenseLayers.alike(
        sizes,
        rope_of(config, sizes.head_dim, sizes.max_position),
        qkv_bias=flag(config, "qkv_bias"),
        o_bias=has_bias,
        mlp_bias=has_bias,
        activation=activation_of(config),
    )
    return plan_of_layers(config, "internlm3", made)
