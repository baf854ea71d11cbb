"""Routings by name, and the plan that belongs to each. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, get_args

from caraserve.cluster.placement.loraserve import place
from caraserve.cluster.placement.plan import AdapterDemand, PlacementPlan, Server, contiguous_plan, random_plan

Routing = Literal[
    "auto",
    "rank-aware",
    "loraserve",
    "random",
    "round-robin",
    "first-fit",
    "most-idle",
    "dlora",
    "s-lora-random",
    "s-lora-contiguous",
]
ROUTINGS: tuple[str, ...] = get_args(Routing)


def make_plan(
    routing: str,
    adapters: Iterable[AdapterDemand],
    servers: Iterable[Server],
    operating_points: Mapping[int, float],
    epoch: int,
    previous: PlacementPlan | None = None,
    padded: bool = True,
) -> PlacementPlan | None:
    """The plan that a policy goes by; None if it needs none. `padded`: whether a batch's largest rank slows down the
    others in it."""
    if routing == "s-lora-random":
        return random_plan([*adapters], [*servers], epoch)
    if routing == "s-lora-contiguous":
        return contiguous_plan([*adapters], [*servers], epoch)
    if routing == "auto" and not padded:
        adapters = _of_one_class(adapters, operating_points)
    if routing in ("auto", "loraserve"):
        return place(adapters, servers, operating_points, epoch, previous)
    return None


def _of_one_class(adapters: Iterable[AdapterDemand], operating_points: Mapping[int, float]) -> list[AdapterDemand]:
    """The same demand as of one rank. Where ranks do not slow one another down, classes only divide the fleet into
    parts that cannot help one another out."""
    known = list(adapters)
    rank = max((adapter.rank for adapter in known), default=0)
    return [
        replace(one, rank=rank, tokens_per_s=one.tokens_per_s * operating_points[rank] / operating_points[one.rank])
        for one in known
    ]
