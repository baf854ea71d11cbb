"""Candidates by what a request would cost them: `cost.worth`, compiled, for all of them in one call.

The formula stands in `cost.py` alone, as plain Python; what is compiled here is its text. Both give the same bits: they
do the same operations on float64 in the same order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np

from caraserve.cluster.routing.cost import (
    Arrival,
    Backlog,
    CostEstimate,
    LinkSpeeds,
    Tier,
    cold_ms,
    cost_and_latency,
    total_cost,
)
from caraserve.cluster.routing.perf_model import PerfModel, decode_ms, prefill_ms
from caraserve.cluster.routing.router import Chance, Fleet, Instance
from caraserve.cpu.jit import callee, entry

FORMULA = (
    cold_ms,
    decode_ms,
    prefill_ms,
    total_cost,
    cost_and_latency,
)  # and nothing else is called by what is compiled
for _function in FORMULA:
    callee(_function)

_OF_ROW = attrgetter("row")


def _numbers(names: Iterable[str]) -> np.dtype[np.void]:
    return np.dtype([(name, np.float64) for name in names])


_MODEL, _LINKS = (_numbers(field.name for field in fields(part)) for part in (PerfModel, LinkSpeeds))
_ROW = np.dtype([("model", _MODEL), ("links", _LINKS), ("backlog", _numbers(Backlog._fields))])  # as `cost.row` has it


@entry
def _worths(rows, tiers, rank, prompt_tokens, output_tokens, adapter_bytes, slo_ms, own_weight):  # type: ignore[no-untyped-def]
    """Costs and latencies in ms of a request on these instances, as float64 [2, n]. Rows: n _ROWs; tiers: n uint8."""
    found = np.empty((2, rows.size))
    for at in range(rows.size):
        one = rows[at]
        wait_ms = cold_ms(one.links, tiers[at], adapter_bytes)
        found[0, at], found[1, at] = cost_and_latency(
            one.model,
            one.backlog,
            rank,
            prompt_tokens,
            output_tokens,
            slo_ms,
            wait_ms,
            one.links.blocks_batch != 0,
            own_weight,
        )
    return found


@entry
def _ranked(request, draws):  # type: ignore[no-untyped-def]
    """The same, and their indices, best first: by cost, then latency, then draw (n float64). `request`: the arguments
    of the above."""
    found = _worths(*request)
    order = np.empty(draws.size, np.int64)
    for at in range(draws.size):
        place = at
        while place > 0:
            other = order[place - 1]
            if found[0, other] != found[0, at]:
                later = found[0, other] > found[0, at]
            elif found[1, other] != found[1, at]:
                later = found[1, other] > found[1, at]
            else:
                later = draws[other] > draws[at]
            if not later:
                break
            order[place] = other
            place -= 1
        order[place] = at
    return found, order


Request = tuple[Any, Any, float, float, float, float, float, float]


def _request(candidates: Iterable[Instance], tiers: bytes, arrival: Arrival, own_weight: float) -> Request:
    return (
        np.frombuffer(b"".join(map(_OF_ROW, candidates)), _ROW),
        np.frombuffer(tiers, np.uint8),
        float(arrival.rank),
        float(arrival.prompt_tokens),
        float(arrival.output_tokens),
        float(arrival.adapter_bytes),
        float(arrival.slo_ms),
        own_weight,
    )


class Ranking:
    """Candidates, best first."""

    __slots__ = ("_costs", "_latencies_ms", "_names", "_order")

    def __init__(self, names: list[str], costs: list[float], latencies_ms: list[float], order: list[int]) -> None:
        self._names, self._costs, self._latencies_ms, self._order = names, costs, latencies_ms, order

    def __len__(self) -> int:
        return len(self._order)

    def name(self, place: int) -> str:
        """The candidate of a place, from 0 on."""
        return self._names[self._order[place]]

    def cost(self, place: int) -> float:
        """Its cost."""
        return self._costs[self._order[place]]

    def estimate(self, place: int) -> CostEstimate:
        """All that is estimated of it."""
        at = self._order[place]
        return CostEstimate(self._costs[at], self._latencies_ms[at])

    def names(self) -> list[str]:
        """All."""
        return [self._names[at] for at in self._order]


def ranked(
    candidates: Mapping[str, Instance], arrival: Arrival, fleet: Fleet, own_weight: float, chance: Chance
) -> Ranking:
    """By cost on the views at hand, then by latency, then by chance."""
    known, others = fleet.of_adapter(arrival.adapter)
    names = [*candidates]
    tiers = bytes(map(known.get, names, repeat(others)))
    draws = np.fromiter(iter(chance.random, None), np.float64, len(names))
    worths, order = _ranked(_request(candidates.values(), tiers, arrival, own_weight), draws)
    costs, latencies_ms = worths.tolist()
    return Ranking(names, costs, latencies_ms, order.tolist())


def estimates(
    candidates: Iterable[Instance], tiers: Iterable[Tier], arrival: Arrival, own_weight: float
) -> list[CostEstimate]:
    """What the arrival would cost on each of these. `tiers`: where each of them has the adapter."""
    costs, latencies_ms = _worths(*_request(candidates, bytes(tiers), arrival, own_weight)).tolist()
    return list(map(CostEstimate, costs, latencies_ms))


# Compiled or loaded now, and not while the first request waits.
_nobody = Instance("", PerfModel(0.0, 0.0, 1.0, False, 1.0, 0.0, 0.0))
_nothing = _request([_nobody], bytes(1), Arrival(None, 0, 1, 1.0), 0.0)
_worths(*_nothing)
_ranked(_nothing, np.zeros(1))
