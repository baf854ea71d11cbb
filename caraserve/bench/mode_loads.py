"""The loads of `bench modes`: the requests of each repeat, and the adapters that a server gets requests for first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from caraserve.bench.records import Workload
from caraserve.bench.workload.build import WorkloadSpec, build


@dataclass(frozen=True, slots=True)
class ModeLoads:
    """The requests of every repeat."""

    repeats: tuple[Workload, ...]
    drops_after_use: bool  # no request is to find its adapter on the device

    def warm_up_order(self, resident: int) -> list[int]:
        """Returns the adapters to request before the first run, by index.

        They are those that runs use, so that the server has read their files, and `resident` ones at the end, which
        stay on the device: those that are requested last of all where adapters leave the device after use, and
        otherwise the last by index, which says nothing of their popularity in the papers' settings.
        """
        used = dict.fromkeys(
            request.adapter for load in self.repeats for request in load.requests if request.adapter is not None
        )
        count = len(self.repeats[0].ranks)
        if self.drops_after_use:
            return [*used, *(adapter for adapter in range(count) if adapter not in used)][: len(used) + resident]
        kept = range(max(0, count - resident), count)
        return [*(adapter for adapter in used if adapter not in kept), *kept]


def mode_loads(spec: WorkloadSpec, repeats: int) -> ModeLoads:
    """Builds the requests of each repeat with a seed of its own. Raises ConfigError."""
    loads = [build(replace(spec, seed=spec.seed + repeat)) for repeat in range(repeats)]
    drops_after_use = spec.popularity.drops_after_use and bool(loads[0].ranks)
    return ModeLoads(tuple(_dealt_in_turn(loads) if drops_after_use else loads), drops_after_use)


def _dealt_in_turn(loads: Sequence[Workload]) -> list[Workload]:
    """Returns the loads with adapters in one order, which each load continues where the one before ended: an adapter
    is requested again only after all others."""
    first = dict.fromkeys(request.adapter for request in loads[0].requests)
    others = (adapter for adapter in range(len(loads[0].ranks)) if adapter not in first)
    dealt = cycle([*first, *others])
    return [
        replace(load, requests=tuple(replace(request, adapter=next(dealt)) for request in load.requests))
        for load in loads
    ]
