"""The sizes of a Llama-like decoder as flat fields, for code that does not take them from the plan yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caraserve.model.families import plan_of, read_config
from caraserve.model.plan import Attention, DecoderPlan, Rope
from caraserve.model.quantization import Quantization, parse_quantization

# The seven linear modules of a decoder layer that an adapter may change, in the order of use.
SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def module_name(layer: int, site: str) -> str:
    """Returns the whole name of one of a layer's linear modules, as checkpoints have it."""
    return f"model.layers.{layer}.{'self_attn' if site in SITES[:4] else 'mlp'}.{site}"


@dataclass(frozen=True)
class ModelSpec:
    """Sizes in elements, of a plan whose layers are alike."""

    plan: DecoderPlan
    quantization: Quantization | None = None

    @property
    def family(self) -> str:
        return self.plan.family

    @property
    def vocab_size(self) -> int:
        return self.plan.vocab_size

    @property
    def hidden(self) -> int:
        return self.plan.hidden

    @property
    def max_position(self) -> int:
        return self.plan.max_position

    @property
    def dtype(self) -> str:
        return self.plan.dtype

    @property
    def layers(self) -> int:
        return len(self.plan.layers)

    @property
    def _attention(self) -> Attention:
        attention = self.plan.layers[0].attention
        assert attention is not None
        return attention

    @property
    def heads(self) -> int:
        return self._attention.heads

    @property
    def kv_heads(self) -> int:
        return self._attention.kv_heads

    @property
    def head_dim(self) -> int:
        return self._attention.head_dim

    @property
    def intermediate(self) -> int:
        return self.site_shape("down_proj")[0]

    @property
    def rms_eps(self) -> float:
        return self.plan.final.eps

    @property
    def rope(self) -> Rope:
        return self.plan.ropes[0]

    @property
    def qkv_bias(self) -> bool:
        return self._attention.linears[0].bias

    @property
    def o_bias(self) -> bool:
        return self._attention.out.bias

    @property
    def mlp_bias(self) -> bool:
        return self.plan.layers[0].linears[-1].bias

    @property
    def qk_norm(self) -> bool:
        return self._attention.q_norm is not None

    @property
    def tied_embeddings(self) -> bool:
        return self.plan.head is None

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(attention.window for attention in self.plan.attentions)

    def site_shape(self, site: str) -> tuple[int, int]:
        """Returns the (input, output) features of one of `SITES`."""
        linear = self.plan.layers[0].linears[SITES.index(site)]
        return linear.inputs, linear.outputs

    @property
    def num_parameters(self) -> int:
        return self.plan.num_parameters

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes of K and V of one token over all layers."""
        return self.plan.kv_bytes_per_token(itemsize)


def as_plan(model: ModelSpec | DecoderPlan) -> DecoderPlan:
    """Returns the plan, of which some callers have only the view yet."""
    return model.plan if isinstance(model, ModelSpec) else model


def load_spec(folder: Path) -> ModelSpec:
    """Reads `folder/config.json`. Raises ModelLoadError naming the file or field that cannot be served."""
    return parse_spec(read_config(folder))


def parse_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Turns a Hugging Face config into a ModelSpec. Raises ModelLoadError for what this server cannot compute."""
    return ModelSpec(plan_of(config), parse_quantization(config))
