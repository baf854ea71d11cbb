"""The loads of `bench modes`: the requests of each repeat, and the adapters that a server holds before it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from caraserve.bench.records import Workload
from caraserve.bench.workload.build import WorkloadSpec, build


@dataclass(frozen=True, slots=True)
class ModeLoads:
    """The requests of every repeat. `order`: in which adapters are dealt, round after round, where no request is to
    find its adapter on the device; otherwise empty."""

    repeats: tuple[Workload, ...]
    order: tuple[int, ...] = ()

    def used(self) -> list[int]:
        """Returns the adapters that requests use, by index."""
        found = {request.adapter for load in self.repeats for request in load.requests}
        return sorted(adapter for adapter in found if adapter is not None)

    def held_before(self, repeat: int, resident: int) -> list[int]:
        """Returns the `resident` adapters to request last before a repeat, so that the device holds them.

        Where no request is to find its adapter on the device, they are those that were dealt last: with adapters of
        equal rank, of which the device drops the least recently used, the repeat then finds none. Otherwise they are
        the last by index.
        """
        count = len(self.repeats[0].ranks)
        resident = min(resident, count)
        if not self.order:
            return list(range(count - resident, count))
        first = sum(len(load.requests) for load in self.repeats[:repeat])
        return [self.order[(first - back) % count] for back in range(resident, 0, -1)]


def mode_loads(spec: WorkloadSpec, repeats: int) -> ModeLoads:
    """Builds the requests of each repeat with a seed of its own. Raises ConfigError.

    Where adapters leave the device after use, they are dealt in one order, which each repeat continues where the one
    before ended: an adapter is requested again only after all others.
    """
    loads = [build(replace(spec, seed=spec.seed + repeat)) for repeat in range(repeats)]
    if not spec.popularity.drops_after_use or not loads[0].ranks:
        return ModeLoads(tuple(loads))
    order = _order_of(loads[0])
    dealt = cycle(order)
    return ModeLoads(tuple(_with_adapters(load, [next(dealt) for _ in load.requests]) for load in loads), order)


def _order_of(load: Workload) -> tuple[int, ...]:
    """Returns all adapters, in the order in which a load requests them first."""
    first = dict.fromkeys(request.adapter for request in load.requests if request.adapter is not None)
    return *first, *(adapter for adapter in range(len(load.ranks)) if adapter not in first)


def _with_adapters(load: Workload, adapters: Sequence[int]) -> Workload:
    requests = zip(load.requests, adapters, strict=True)
    return replace(load, requests=tuple(replace(request, adapter=adapter) for request, adapter in requests))
