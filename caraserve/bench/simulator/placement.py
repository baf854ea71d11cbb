"""Placement in a simulated cluster: measures demand, plans with the server's code, moves adapters at a limited rate."""

from collections.abc import Mapping, Sequence

import numpy as np

from caraserve.bench.records import Workload
from caraserve.bench.simulator import events
from caraserve.bench.simulator.fleet import FleetArrays, PlanArrays
from caraserve.bench.simulator.setting import ClusterSetting, SimulatedMachine
from caraserve.cluster.placement.loraserve import make_plan
from caraserve.cluster.placement.plan import AdapterDemand, Server, extrapolated
from caraserve.cluster.routing.placement_plan import PlacementPlan, homes
from caraserve.cluster.routing.policy_rules import AUTO

_S = 1_000_000_000


class SimPlanner:
    """Measures the demand for adapters, makes placement plans, and lists the moves that they ask for."""

    def __init__(
        self, setting: ClusterSetting, workload: Workload, names: Sequence[str], adapters: Sequence[str]
    ) -> None:
        self.plan: PlacementPlan | None = None
        self._setting, self._names, self._adapters = setting, names, adapters
        self._numbers = {name: number for number, name in enumerate(names)}
        self.replans = setting.routing in ("auto", "loraserve")
        machine = setting.machines[0]
        self._unasked = [
            AdapterDemand(name, rank, rank * machine.rank_bytes)
            for name, rank in zip(adapters, workload.ranks, strict=True)
        ]
        count = max(1, len(workload.requests))
        self._prompt = sum(one.prompt_tokens for one in workload.requests) / count
        self._output = sum(one.output_tokens for one in workload.requests) / count
        by_formula = {rank: self._point(machine, rank) for rank in sorted(set(workload.ranks))}
        self._points = setting.operating_points or by_formula
        self._servers = [
            Server(name, one.host_adapter_bytes, self._speed(one, by_formula))
            for name, one in zip(names, setting.machines, strict=True)
        ]
        self._rates: dict[int, float] = {}
        self._since = 0
        self._epoch = 0

    def _point(self, machine: SimulatedMachine, rank: int) -> float:
        return machine.model.operating_point(
            rank, self._setting.slo_ms, self._prompt, self._output, machine.max_running
        )

    def _speed(self, machine: SimulatedMachine, points: Mapping[int, float]) -> float:
        """Returns a machine's speed relative to the one with these operating points, averaged over ranks."""
        return sum(self._point(machine, rank) for rank in points) / sum(points.values()) if points else 1.0

    def begin(self, fleet: FleetArrays) -> FleetArrays:
        """Places all adapters before the first request: by a plan, or `copies` of each under routings without plans."""
        self.plan = self._make_plan({})
        if self.plan is not None:
            fleet = fleet._replace(plan=self._arrays(self.plan))
            adapters = np.repeat(np.arange(len(self._adapters)), np.diff(fleet.plan.starts))
            numbers = fleet.plan.instances
        else:
            copies = self._setting.copies or (len(self._names) if self._setting.scheduler == "central" else 2)
            places = homes(self._adapters, self._names, copies)
            adapters, numbers = np.repeat(np.arange(len(places)), places.shape[1]), places.ravel()
        events.add_adapters(fleet.caches, adapters, numbers)
        events.publish_all(fleet)
        return fleet

    def replan(self, fleet: FleetArrays, now: int, rng: np.random.Generator) -> FleetArrays:
        """Makes a plan from the demand since the last one. Routers see it at once; adapters move afterwards."""
        seconds = max(1e-9, (now - self._since) / _S)
        asked = np.flatnonzero(fleet.demand_tokens)
        latest = dict(zip(asked.tolist(), (fleet.demand_tokens[asked] / seconds).tolist(), strict=True))
        before = self._rates if self._epoch > 1 else {}
        demand = {adapter: extrapolated(before.get(adapter), rate) for adapter, rate in latest.items()}
        fleet.demand_tokens[:] = 0
        self._rates, self._since = latest, now
        plan = self._make_plan(demand)
        assert plan is not None
        if self.plan is not None and not plan.holds_over(self.plan):
            return fleet
        if fleet.setting["policy"][0] == AUTO:
            events.complete_orders(fleet, rng)
        return self._adopt(fleet, plan, demand)

    def _make_plan(self, demand: dict[int, float]) -> PlacementPlan | None:
        self._epoch += 1
        adapters = self._unasked.copy()
        for number, rate in demand.items():
            idle = adapters[number]
            adapters[number] = AdapterDemand(idle.name, idle.rank, idle.num_bytes, rate)
        padded = any(machine.model.padded for machine in self._setting.machines)
        setting, seed = self._setting, self._setting.seed
        return make_plan(setting.routing, adapters, self._servers, self._points, self._epoch, self.plan, padded, seed)

    def _arrays(self, plan: PlacementPlan) -> PlanArrays:
        shares, count = plan.shares.among(self._adapters, self._names), len(self._names)
        return PlanArrays(
            starts=shares.starts,
            instances=shares.places,
            in_order=np.sort(shares.owners * count + shares.places) % count,
            fractions=shares.fractions,
            classes=np.array([plan.classes[name] for name in self._names], np.int64),
        )

    def _adopt(self, fleet: FleetArrays, plan: PlacementPlan, demand: dict[int, float]) -> FleetArrays:
        before, self.plan = self.plan, plan
        instances, shares = fleet.batches.instances, plan.shares
        unchanged = before.shares.equal_rows(shares) if before else np.zeros(len(shares), np.bool_)
        for start, end in zip(instances["moves_next"].tolist(), instances["moves_end"].tolist(), strict=True):
            unchanged[fleet.moves[start:end]] = False  # not yet on its instances
        changed = ~unchanged[shares.owners]
        owners, places, fractions = shares.owners[changed], shares.places[changed], shares.fractions[changed]
        here = fleet.caches.entries["in_host"][owners, places]
        events.add_adapters(fleet.caches, owners[here], places[here])
        owners, places, fractions = owners[~here], places[~here], fractions[~here]
        rates = np.zeros(len(shares))
        rates[[*demand]] = [*demand.values()]
        hot_first = np.lexsort((owners, -fractions * rates[owners], places))
        ends = np.cumsum(np.bincount(places, minlength=len(instances)))
        instances["moves_next"], instances["moves_end"] = np.concatenate([[0], ends[:-1]]), ends
        new = self._arrays(plan)
        self._remove_unplanned(fleet, new)
        return fleet._replace(plan=new, moves=owners[hot_first])

    def _remove_unplanned(self, fleet: FleetArrays, plan: PlanArrays) -> None:
        """Removes adapters from instances that the plan does not name, where all that it names have them."""
        entries = fleet.caches.entries
        planned = np.zeros(entries.shape, np.bool_)
        planned[np.repeat(np.arange(len(entries)), np.diff(plan.starts)), plan.instances] = True
        in_host = np.ascontiguousarray(entries["in_host"])
        in_place = (in_host | ~planned).all(axis=1, keepdims=True)
        adapters, numbers = np.nonzero(in_host & ~planned & in_place)
        order = np.lexsort((entries["host_order"][adapters, numbers], numbers))
        events.remove_adapters(fleet.caches, adapters[order], numbers[order])
