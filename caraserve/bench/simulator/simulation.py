"""A simulated cluster under a virtual clock: requests arrive, routers choose by delayed views, instances batch.

The result depends only on the setting (which includes the seed) and the requests. `events` has the compiled loop, which
returns here for plans and for dLoRA's rebalancing.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from random import Random

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.records import Workload
from caraserve.bench.simulator import events
from caraserve.bench.simulator.adapter_cache import make_caches
from caraserve.bench.simulator.compiled import (
    FOREVER,
    INSTANCE,
    LIMITS,
    MACHINE,
    MAX_QUEUE,
    MAX_RANKS,
    MAX_RUNNING,
    MS,
    REQUEST,
    Batches,
)
from caraserve.bench.simulator.fleet import SETTING, FleetArrays, PlanArrays, make_fleet, with_room
from caraserve.bench.simulator.setting import ClusterSetting, SimulatedMachine
from caraserve.cluster.placement.loraserve import make_plan
from caraserve.cluster.placement.migration import QueuedRequest, rebalanced
from caraserve.cluster.placement.plan import AdapterDemand, Server, extrapolated
from caraserve.cluster.routing.cost import PRIOR_TOKENS, PRIOR_WEIGHT
from caraserve.cluster.routing.placement_plan import PlacementPlan, homes
from caraserve.cluster.routing.policies import Policy
from caraserve.cluster.routing.policy_rules import AUTO, POLICIES
from caraserve.errors import ConfigError

_S = 1000 * MS
_MOVE_TOKENS = 50.0  # cost of moving a queued request, in tokens: it has no KV yet, only an adapter to load


def make_requests(workload: Workload) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Returns the workload's requests, which have not arrived, and its ranks, ascending, with 0 for the base model."""
    planned, count = workload.requests, len(workload.requests)
    ranks = np.array([*workload.ranks, 0])  # the last one is the base model's
    classes = np.unique(ranks)
    if len(classes) > MAX_RANKS:
        raise ConfigError(f"a simulated load has at most {MAX_RANKS - 1} different ranks, not {len(classes) - 1}")
    requests = np.zeros(count, REQUEST)
    at_s = np.fromiter((one.at_s for one in planned), np.float64, count)
    requests["arrived"] = np.rint(at_s * _S)
    requests["adapter"] = np.fromiter((-1 if one.adapter is None else one.adapter for one in planned), np.int64, count)
    requests["rank"] = ranks[requests["adapter"]]
    requests["rank_class"] = np.searchsorted(classes, requests["rank"])
    requests["prompt"] = requests["left"] = np.fromiter((one.prompt_tokens for one in planned), np.int64, count)
    requests["output"] = np.fromiter((one.output_tokens for one in planned), np.int64, count)
    for name in ("delivered", "ready", "admitted", "first", "done", "place", "next_ended"):
        requests[name] = -1
    return requests, classes


def make_batches(machines: Sequence[SimulatedMachine], requests: NDArray[np.void], ranks: NDArray[np.int64]) -> Batches:
    """Returns instances without requests."""
    rows = [
        (
            astuple(machine.model),
            astuple(machine.links),
            *(getattr(machine, name) for name in LIMITS),
            machine.device_adapter_bytes,
            machine.host_adapter_bytes,
            machine.request_ms,
            machine.beside_prompt_ms,
        )
        for machine in machines
    ]
    for machine in machines:
        if machine.max_running > MAX_RUNNING or machine.max_queue > MAX_QUEUE:
            raise ConfigError(f"a simulated instance runs at most {MAX_RUNNING} requests and queues {MAX_QUEUE}")
    instances = np.zeros(len(rows), INSTANCE)
    machine_rows = np.array(rows, MACHINE)
    instances["kv_free"], instances["stop"] = machine_rows["kv_tokens"], FOREVER
    instances["ended_head"] = -1
    return Batches(machine_rows, instances, requests, ranks)


class Simulation:
    """One run of a simulated cluster. Its state is in `fleet`."""

    def __init__(self, setting: ClusterSetting, workload: Workload) -> None:
        self._setting = setting
        self.requests, ranks = make_requests(workload)
        batches = make_batches(setting.machines, self.requests, ranks)
        rank_bytes = setting.machines[0].rank_bytes
        adapter_bytes = np.array([rank * rank_bytes for rank in workload.ranks], np.int64)
        caches = make_caches(batches.machines, batches.instances, adapter_bytes)
        self.fleet = make_fleet(self._numbers(), batches, caches)
        self.names = [f"i{number:03}" for number in range(len(setting.machines))]
        width = max(5, len(str(len(workload.ranks))))  # in plans adapters are in order of their names
        self.adapters = [f"adapter-{number:0{width}}" for number in range(len(workload.ranks))]
        self.planner = SimPlanner(setting, workload, self.names, self.adapters)
        self._rng = _generator(setting.seed)

    def _numbers(self) -> NDArray[np.void]:
        setting = self._setting
        rules = Policy(setting.routing)
        numbers = np.zeros(1, SETTING)
        numbers["policy"], numbers["central"] = POLICIES[setting.routing], setting.scheduler == "central"
        instances = len(setting.machines)  # of which the searched fleets may have fewer than the routers asked for
        numbers["routers"] = 1 if numbers["central"] else min(setting.routers or instances, instances)
        numbers["own_weight"], numbers["enforces_slo"] = rules.own_weight, rules.enforces_slo
        for name in ("slo_ms", "ttft_ms", "beat_ms", "beat_jitter"):
            numbers[name] = getattr(setting, name)
        numbers["gossip_ns"], numbers["quote_ns"] = round(setting.gossip_ms * MS), round(setting.quote_ms * MS)
        numbers["hop_ns"], numbers["half_hop_ns"] = round(setting.hop_ms * MS), round(setting.hop_ms / 2 * MS)
        numbers["move_bytes"] = setting.move_bytes_per_s * setting.beat_ms / 1000
        return numbers

    def run(self) -> None:
        """Simulates from the first arrival until every request has ended.

        Garbage collection is off meanwhile: no reference cycles are created, and while plans are made looking for them
        would take a fifth of the time.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            self._run()
        finally:
            if collects:
                gc.enable()

    def _run(self) -> None:
        self._begin()
        while True:
            reason, now = events.run(self.fleet, self._rng)
            if reason == events.ENDED:
                return
            if reason == events.NO_ROOM:
                self.fleet = with_room(self.fleet)
            elif reason == events.PLAN:
                self.fleet = self.planner.replan(self.fleet, now, self._rng)
                self.fleet.counts["plans"] += 1
                events.schedule(self.fleet, now + round(self._setting.plan_s * _S), events.PLAN, 0)
            else:
                self._rebalance(now)
                events.schedule(self.fleet, now + round(self._setting.rebalance_s * _S), events.REBALANCE, 0)

    def _begin(self) -> None:
        self.fleet.counts["answer_weight"], self.fleet.counts["answer_tokens"] = (
            PRIOR_WEIGHT,
            PRIOR_WEIGHT * PRIOR_TOKENS,
        )
        self.fleet = self.planner.begin(self.fleet)
        period = round(self._setting.beat_ms * MS)
        for number in range(len(self.names)):
            events.schedule(self.fleet, period * number // len(self.names), events.BEAT, number)
        if self._setting.routing == "dlora":
            events.schedule(self.fleet, round(self._setting.rebalance_s * _S), events.REBALANCE, 0)
        if self.planner.replans:
            events.schedule(self.fleet, round(self._setting.first_plan_s * _S), events.PLAN, 0)

    def _rebalance(self, now: int) -> None:
        """Moves requests that wait for memory to other instances, as dLoRA does."""
        if not events.advance_all(self.fleet.batches, now):
            return
        instances, requests = self.fleet.batches.instances, self.requests
        queues, wanted = {}, set()
        for name, one in zip(self.names, instances, strict=True):
            at = (one["waiting_head"] + np.arange(one["num_waiting"])) % MAX_QUEUE
            stuck = one["waiting"][at[one["waiting_joins"][at] <= one["first"]]]
            wanted.update(requests["adapter"][stuck].tolist())
            queues[name] = [
                QueuedRequest(str(index), self._adapter(requests["adapter"][index]), int(tokens))
                for index, tokens in zip(stuck.tolist(), (requests["prompt"] + requests["output"])[stuck], strict=True)
            ]
        used = self.fleet.batches.machines["kv_tokens"] - instances["kv_free"] + instances["kv_promised"]
        outstanding = dict(zip(self.names, used.astype(float).tolist(), strict=True))
        holders = {
            self._adapter(adapter): [self.names[number] for number in np.flatnonzero(self.fleet.tiers[adapter] < 3)]
            for adapter in wanted
            if adapter >= 0
        }
        for move in rebalanced(queues, outstanding, holders, _MOVE_TOKENS):
            while not events.move_request(self.fleet, int(move.request_id), self.names.index(move.target), now):
                self.fleet = with_room(self.fleet)

    def _adapter(self, number: int) -> str | None:
        return None if number < 0 else self.adapters[number]


def _generator(seed: int) -> np.random.Generator:
    """Returns a generator with the numbers of Python's `Random(seed)`."""
    _, state, _ = Random(seed).getstate()
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": np.array(state[:-1], np.uint32), "pos": state[-1]}}
    return np.random.Generator(twister)


# --- placement ---


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
