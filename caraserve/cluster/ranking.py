"""Candidates by what a request would cost them: `cost.worth`, compiled, for all of them in one call. Level 4.

The formula stands in `cost.py` alone, as plain Python; what is compiled here is its text. Both give the same bits: they
do the same operations on float64 in the same order.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from caraserve.cluster.cost import (
    LINKS_NUMBERS,
    MODEL_NUMBERS,
    Arrival,
    Backlog,
    Estimate,
    cold_ms,
    total_cost,
    worth,
)
from caraserve.cluster.perf_model import PerfModel, decode_ms, prefill_ms
from caraserve.cluster.router import Chance, Fleet, Instance
from caraserve.cpu.jit import callee, entry

for _function in (cold_ms, decode_ms, prefill_ms, total_cost, worth):
    callee(_function)

Worths = np.ndarray[Any, np.dtype[np.float64]]

_ROW = np.dtype(
    [
        (part, [(name, np.float64) for name in names])
        for part, names in (("model", MODEL_NUMBERS), ("links", LINKS_NUMBERS), ("backlog", Backlog._fields))
    ]
)


@entry
def _worths(rows, tiers, rank, prompt_tokens, output_tokens, adapter_bytes, slo_ms, own_weight):  # type: ignore[no-untyped-def]
    """Costs and latencies in ms of a request on these instances (rows: n _ROWs, tiers: n uint8), as float64 [2, n]."""
    found = np.empty((2, rows.size))
    for at in range(rows.size):
        one = rows[at]
        wait_ms = cold_ms(one.links, tiers[at], adapter_bytes)
        found[0, at], found[1, at] = worth(
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
def _order(worths, draws):  # type: ignore[no-untyped-def]
    """Indices, best first: by cost, then latency, then draw."""
    order = np.empty(draws.size, np.int64)
    for at in range(draws.size):
        place = at
        while place > 0:
            other = order[place - 1]
            if worths[0, other] != worths[0, at]:
                later = worths[0, other] > worths[0, at]
            elif worths[1, other] != worths[1, at]:
                later = worths[1, other] > worths[1, at]
            else:
                later = draws[other] > draws[at]
            if not later:
                break
            order[place] = other
            place -= 1
        order[place] = at
    return order


class Ranking:
    """Candidates, best first."""

    __slots__ = ("_costs", "_latencies_ms", "_names", "_order")

    def __init__(self, names: list[str], worths: Worths, order: list[int]) -> None:
        self._names, self._order = names, order
        self._costs, self._latencies_ms = worths.tolist()

    def best(self, count: int) -> list[tuple[str, Estimate]]:
        """The first so many, or all."""
        found = self._order[:count]
        return [(self._names[at], Estimate(self._costs[at], self._latencies_ms[at])) for at in found]

    def names(self) -> list[str]:
        """All."""
        return [self._names[at] for at in self._order]


def worths(candidates: Iterable[Instance], tiers: bytes, arrival: Arrival, own_weight: float) -> Worths:
    """Costs, and latencies in ms, of a request on each of these, as float64 [2, n]. `tiers`: where each of them has the
    adapter."""
    return _worths(  # type: ignore[no-any-return]
        np.frombuffer(b"".join([one.row for one in candidates]), _ROW),
        np.frombuffer(tiers, np.uint8),
        float(arrival.rank),
        float(arrival.prompt_tokens),
        float(arrival.output_tokens),
        float(arrival.adapter_bytes),
        float(arrival.slo_ms),
        own_weight,
    )


def ranked(
    candidates: Mapping[str, Instance], arrival: Arrival, fleet: Fleet, own_weight: float, chance: Chance
) -> Ranking:
    """By cost on the views at hand, then by latency, then by chance."""
    known, others = fleet.of_adapter(arrival.adapter)
    names, draw = [*candidates], chance.random
    tiers = bytes([known.get(name, others) for name in names]) if known else bytes([others]) * len(names)
    found = worths(candidates.values(), tiers, arrival, own_weight)
    draws = np.array([draw() for _ in names], np.float64)
    return Ranking(names, found, _order(found, draws).tolist())


# Compiled or loaded now, and not while the first request waits.
_nobody = Instance("", PerfModel(0.0, 0.0, 0.0, False, 0.0, 0.0, 0.0))
_order(worths([_nobody], bytes(1), Arrival(None, 0, 1, 1.0), 0.0), np.zeros(1))
