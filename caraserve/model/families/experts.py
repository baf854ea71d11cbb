"""What families with experts share: layers whose second block may be a mixture of experts, tensors of experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from caraserve.errors import ModelLoadError
from caraserve.model.families.dense import Config, DenseLayers, Sizes, positive
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import Body, ExpertTensor, Moe

_MOST = 1 << 12  # experts of a layer, beyond any model


@dataclass(frozen=True)
class ExpertLayers(DenseLayers):
    """Layers of attention and experts. `moe(layer)` returns None for a layer with an MLP."""

    moe: Callable[[int], Moe | None] = field(kw_only=True)

    def mlp(self, layer: int) -> Body:
        return self.moe(layer) or DenseLayers.mlp(self, layer)


def expert_counts(
    config: Config, keys: Sequence[str], *, experts: int | None = None, top_k: int | None = None
) -> tuple[int, int]:
    """Returns the number of experts, under the first of `keys` that the configuration has, and how many a token takes.
    `experts`, `top_k`: if it has none. Raises ModelLoadError."""
    key = next((one for one in keys if config.get(one) is not None), keys[0])
    found, taken = positive(config, key, experts, most=_MOST), positive(config, "num_experts_per_tok", top_k)
    if taken > found:
        raise ModelLoadError(f"config.json: num_experts_per_tok {taken} is more than {key} {found}")
    return found, taken


def router(module: str, sizes: Sizes, experts: int, *, bias: bool = False) -> LinearPlan:
    return LinearPlan.of_role(module, sizes.hidden, experts, "router", bias=bias)


def experts_one_by_one(
    module: str, hidden: int, intermediate: int, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[ExpertTensor, ExpertTensor, ExpertTensor]:
    """Returns gate, up and down with a tensor for each expert. `names`: of these."""
    gate, up, down = (f"{module}.{{expert}}.{name}.weight" for name in names)
    return (
        ExpertTensor(gate, intermediate, hidden),
        ExpertTensor(up, intermediate, hidden),
        ExpertTensor(down, hidden, intermediate),
    )
