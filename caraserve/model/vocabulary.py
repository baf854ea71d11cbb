"""The names that adapters have for the embedding and the head of a plan."""

from typing import Literal

from caraserve.model.plan import DecoderPlan

Side = Literal["embedding", "head"]
SIDES: tuple[Side, ...] = ("embedding", "head")


def vocabulary_modules(plan: DecoderPlan) -> dict[str, Side]:
    """Returns the names of the two modules, with every prefix."""
    embed, head = (name.removesuffix(".weight") for name in (plan.embed, plan.head or "lm_head.weight"))
    own = max(filter(embed.startswith, plan.adapter_prefixes), key=len, default="")
    modules: dict[str, Side] = {embed: "embedding", head: "head"}
    for prefix in plan.adapter_prefixes:
        if own:
            modules[prefix + embed.removeprefix(own)] = "embedding"
        if prefix.endswith(".model."):  # of a model within another, which has its head beside it
            modules[prefix.removesuffix("model.") + head] = "head"
    return modules


def vocabulary_targets(plan: DecoderPlan) -> dict[Side, str]:
    """Returns the names by which adapters target the two modules."""
    return {side: name.rpartition(".")[2] for name, side in vocabulary_modules(plan).items()}
