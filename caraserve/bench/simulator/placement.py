"""Placement in a simulated cluster: measures demand, plans with the server's code, moves adapters at a limited rate."""

from collections import deque
from typing import TYPE_CHECKING

from caraserve.bench.records import Workload
from caraserve.bench.simulator.instance import SimRequest
from caraserve.bench.simulator.views import RouterViews
from caraserve.cluster.placement.loraserve import make_plan
from caraserve.cluster.placement.plan import AdapterDemand, PlacementPlan, Server, extrapolated, homes
from caraserve.cluster.routing.cost import Tier

if TYPE_CHECKING:
    from caraserve.bench.simulator.simulation import SimInstance

_S = 1_000_000_000


class SimPlanner:
    """Measures the demand for adapters, makes placement plans, and moves adapters as the plans say."""

    def __init__(
        self,
        routing: str,
        nodes: "list[SimInstance]",
        views: RouterViews,
        workload: Workload,
        adapters: list[str],
        slo_ms: float,
        copies: int,
    ) -> None:
        self._copies = copies
        self._routing, self._nodes, self._views = routing, nodes, views
        self._ranks, self._adapters = workload.ranks, adapters
        self._number = {name: number for number, name in enumerate(adapters)}
        self.replans = routing in ("auto", "loraserve")
        machine = nodes[0].machine
        self._bytes = [rank * machine.rank_bytes for rank in self._ranks]
        self._unasked = list(map(AdapterDemand, adapters, self._ranks, self._bytes))
        count = max(1, len(workload.requests))
        prompt = sum(one.prompt_tokens for one in workload.requests) / count
        output = sum(one.output_tokens for one in workload.requests) / count
        self._points = {
            rank: machine.model.operating_point(rank, slo_ms, prompt, output, machine.max_running)
            for rank in set(self._ranks)
        }
        self._servers = [
            Server(node.name, node.machine.host_adapter_bytes, self._speed(node, slo_ms, prompt, output))
            for node in nodes
        ]
        self._tokens: dict[int, int] = {}
        self._rates: dict[int, float] = {}
        self._since = 0
        self._epoch = 0
        self._moves: list[deque[int]] = [deque() for _ in nodes]
        self._credit = [0.0] * len(nodes)

    def _speed(self, node: "SimInstance", slo_ms: float, prompt: float, output: float) -> float:
        """Returns a node's speed relative to the first node's, by operating points averaged over ranks."""
        limit = node.machine.max_running
        own = [node.machine.model.operating_point(rank, slo_ms, prompt, output, limit) for rank in sorted(self._points)]
        return sum(own) / sum(self._points[rank] for rank in sorted(self._points)) if own else 1.0

    def begin(self) -> None:
        """Places all adapters before the first request: by a plan, or `copies` of each under routings without plans."""
        self._views.plan = plan = self._plan(None)
        if plan is not None:
            for number, name in enumerate(self._adapters):
                self._put(number, plan.instances(name))
        else:
            names = [node.name for node in self._nodes]
            for number, places in enumerate(homes(self._adapters, names, self._copies).tolist()):
                self._put(number, [names[at] for at in places])
        for node in self._nodes:
            for number, tier in node.cache.changed.items():
                self._views.learn(number, node.name, tier)
            node.cache.changed = {}

    def _put(self, adapter: int, names: "list[str] | tuple[str, ...]") -> None:
        for name in names:
            self._nodes[self._views.number(name)].cache.add(adapter, 0, keep=True)

    def observe(self, request: SimRequest) -> None:
        """Adds a request's output tokens to the demand for its adapter."""
        if request.adapter >= 0:
            self._tokens[request.adapter] = self._tokens.get(request.adapter, 0) + request.output

    def replan(self, now: int) -> None:
        """Makes a plan from the demand since the last one. Routers see it at once; adapters move afterwards."""
        seconds = max(1e-9, (now - self._since) / _S)
        latest = {adapter: tokens / seconds for adapter, tokens in self._tokens.items()}
        before = self._rates if self._epoch > 1 else {}
        demand = {adapter: extrapolated(before.get(adapter), rate) for adapter, rate in latest.items()}
        self._tokens, self._rates, self._since = {}, latest, now
        previous = self._views.plan
        plan = self._plan(previous, demand)
        assert plan is not None
        if previous is None or plan.holds_over(previous):
            self._adopt(plan, demand)

    def _plan(self, previous: PlacementPlan | None, demand: dict[int, float] | None = None) -> PlacementPlan | None:
        self._epoch += 1
        adapters = self._unasked.copy()
        for number, rate in (demand or {}).items():
            adapters[number] = AdapterDemand(self._adapters[number], self._ranks[number], self._bytes[number], rate)
        padded = any(node.machine.model.padded for node in self._nodes)
        return make_plan(self._routing, adapters, self._servers, self._points, self._epoch, previous, padded)

    def _adopt(self, plan: PlacementPlan, demand: dict[int, float]) -> None:
        before, self._views.plan = self._views.plan, plan
        moving = {adapter for moves in self._moves for adapter in moves}
        wanted: list[list[tuple[float, int]]] = [[] for _ in self._nodes]
        for name, shares in plan.shares.items():
            adapter = self._number[name]
            if before and before.shares.get(name) == shares and adapter not in moving:
                continue  # unchanged, and already on its instances
            for share in shares:
                number = self._views.number(share.instance)
                if self._nodes[number].cache.tier(adapter) is Tier.ABSENT:
                    wanted[number].append((-share.fraction * demand.get(adapter, 0.0), adapter))
                else:
                    self._nodes[number].cache.add(adapter, 0, keep=True)
        self._moves = [deque(adapter for _, adapter in sorted(moves)) for moves in wanted]
        places = [plan.instances(name) for name in self._adapters]
        for node in self._nodes:
            for adapter in [one for one in node.cache.host if node.name not in places[one]]:
                if all(self._holds(name, adapter) for name in places[adapter]):
                    node.cache.remove(adapter)

    def _holds(self, name: str, adapter: int) -> bool:
        return adapter in self._nodes[self._views.number(name)].cache.host

    def move(self, number: int, now: int, credit_bytes: float) -> None:
        """Fetches adapters that the plan assigns to an instance, as far as the bytes since its last heartbeat allow."""
        moves = self._moves[number]
        if not moves:
            self._credit[number] = 0.0
            return
        self._credit[number] += credit_bytes
        cache = self._nodes[number].cache
        while moves and self._credit[number] > 0:  # a large adapter makes the credit negative, and later ones wait
            adapter = moves.popleft()
            if cache.tier(adapter) is Tier.ABSENT:
                self._credit[number] -= self._bytes[adapter]
                cache.fetches += 1
                cache.fetched_bytes += self._bytes[adapter]
            cache.add(adapter, now, keep=True)
