"""Names the routings, and makes the placement plan that a routing needs."""

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
    """Makes the plan for a routing, or returns None if it needs none. `padded`: whether the largest rank in a batch
    slows down the other requests in it."""
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
    """Returns the same demand, converted to the largest rank. Where ranks do not slow one another down, classes would
    only divide the fleet into parts that cannot share their load."""
    known = list(adapters)
    rank = max((adapter.rank for adapter in known), default=0)
    return [
        replace(one, rank=rank, tokens_per_s=one.tokens_per_s * operating_points[rank] / operating_points[one.rank])
        for one in known
    ]
