"""Ranks candidates with compiled code: does what `router.rank_candidates` does, several times as fast.

A simulated hour has a million routing decisions over 60 instances. The cost formula exists once, as plain Python in
`cost.py`, and is compiled here. Results are bitwise equal: both do the same float64 operations in the same order.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, overload

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
from caraserve.cluster.routing.router import Candidate, Fleet, Instance
from caraserve.cpu.jit import callee, entry

_FORMULA = (cold_ms, decode_ms, prefill_ms, total_cost, cost_and_latency)  # all functions that compiled code calls
for _function in _FORMULA:
    callee(_function)


def _numbers(names: Iterable[str]) -> np.dtype[np.void]:
    return np.dtype([(name, np.float64) for name in names])


_MODEL, _LINKS = (_numbers(field.name for field in fields(part)) for part in (PerfModel, LinkSpeeds))
_ROW = np.dtype([("model", _MODEL), ("links", _LINKS), ("backlog", _numbers(Backlog._fields))])
_MACHINE_FORMAT = struct.Struct("=13d")
_BACKLOG_FORMAT = struct.Struct("=8d")
_ROW_OF = attrgetter("row")


@dataclass(slots=True)
class PackedInstance(Instance):
    """An instance that also has its numbers as bytes: joined, the rows of several instances are a NumPy array."""

    machine: bytes = field(default=b"", repr=False, compare=False)  # model and links, packed once per machine
    row: bytes = field(init=False, repr=False, compare=False)  # of dtype _ROW

    def __post_init__(self) -> None:
        if not self.machine:
            self.machine = _MACHINE_FORMAT.pack(*astuple(self.model), *astuple(self.links))
        self.row = self.machine + _BACKLOG_FORMAT.pack(*self.backlog)

    def with_backlog(self, backlog: Backlog) -> "PackedInstance":
        """Returns the same instance with another backlog."""
        return PackedInstance(self.name, self.model, backlog, self.links, self.able, self.machine)


def _digest() -> str:
    files = sorted({function.__code__.co_filename for function in _FORMULA})
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]


_DIGEST = _digest()


def _entry(function: Callable[..., Any]) -> Any:
    """Applies `jit.entry` under a name with the formula's digest.

    Numba caches by function name and file; without the digest it would not recompile when `cost.py` is edited.
    """
    function.__qualname__ += f"_{_DIGEST}"
    return entry(function)


@_entry
def _estimates(rows, tiers, rank, prompt_tokens, output_tokens, adapter_bytes, slo_ms, own_weight):  # type: ignore[no-untyped-def]
    """Returns costs and latencies in ms of a request on n instances, float64 [2, n].

    `rows` has n elements of dtype _ROW, `tiers` n of uint8.
    """
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


@_entry
def _ranked(request, draws):  # type: ignore[no-untyped-def]
    """Returns `_estimates(*request)`, and its column indices by cost, then latency, then `draws` (float64 [n])."""
    found = _estimates(*request)
    order = np.empty(draws.size, np.int64)
    for at in range(draws.size):  # insertion sort
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


def _request(candidates: Iterable[Instance], tiers: bytes, arrival: Arrival, own_weight: float) -> tuple[Any, ...]:
    return (
        np.frombuffer(b"".join(map(_ROW_OF, candidates)), _ROW),
        np.frombuffer(tiers, np.uint8),
        float(arrival.rank),
        float(arrival.prompt_tokens),
        float(arrival.output_tokens),
        float(arrival.adapter_bytes),
        float(arrival.slo_ms),
        own_weight,
    )


class _Ranking(Sequence[Candidate]):
    """The candidates, best first. Each `Candidate` is created when it is read, as only few are."""

    __slots__ = ("_costs", "_draws", "_latencies_ms", "_names", "_order")

    def __init__(self, names: list[str], draws: Any, costs: list[float], latencies_ms: list[float], order: Any) -> None:
        self._names, self._draws, self._order = names, draws, order
        self._costs, self._latencies_ms = costs, latencies_ms

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...
    @overload
    def __getitem__(self, place: slice) -> list[Candidate]: ...
    def __getitem__(self, place: int | slice) -> Candidate | list[Candidate]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        at = self._order[place]
        return Candidate(CostEstimate(self._costs[at], self._latencies_ms[at]), float(self._draws[at]), self._names[at])


def rank_compiled(
    candidates: Mapping[str, Instance],
    arrival: Arrival,
    fleet: Fleet,
    own_weight: float,
    rng: Random,
    known: dict[str, CostEstimate] | None = None,
) -> Sequence[Candidate]:
    """Returns the candidates (`PackedInstance`s), the cheapest first, as `rank_candidates` does. It estimates all of
    them, also `known` ones: a copy of their estimates would take longer."""
    tiers_by_name, others = fleet.adapter_tiers(arrival.adapter)
    names = [*candidates]
    tiers = bytes(map(tiers_by_name.get, names, repeat(others)))
    draws = np.fromiter(iter(rng.random, None), np.float64, len(names))
    found, order = _ranked(_request(candidates.values(), tiers, arrival, own_weight), draws)
    costs, latencies_ms = found.tolist()
    return _Ranking(names, draws, costs, latencies_ms, order.tolist())


def estimates(
    candidates: Iterable[Instance], tiers: Iterable[Tier], arrival: Arrival, own_weight: float
) -> list[CostEstimate]:
    """Returns the cost of the arrival on each `PackedInstance`. `tiers` says where each of them has the adapter."""
    costs, latencies_ms = _estimates(*_request(candidates, bytes(tiers), arrival, own_weight)).tolist()
    return list(map(CostEstimate, costs, latencies_ms))


# A first call, so that the code is compiled or loaded from Numba's cache when the simulator is imported: some seconds.
_MODEL_OF_NO_MACHINE = PerfModel(0.0, 0.0, 1.0, False, 1.0, 0.0, 0.0)
_ranked(_request([PackedInstance("", _MODEL_OF_NO_MACHINE)], bytes(1), Arrival(None, 0, 1, 1.0), 0.0), np.zeros(1))
