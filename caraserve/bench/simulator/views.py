"""The state that routers of a simulated cluster see: delayed heartbeats, plus the requests that each has sent since.

A heartbeat reaches all routers at once, so published states are stored once. When a router routes a request, the
requests that it has sent and its own exact state are added to them.
"""

from collections import deque
from collections.abc import Sequence

from caraserve.cluster.placement.plan import PlacementPlan
from caraserve.cluster.routing.cost import Arrival, Tier
from caraserve.cluster.routing.router import Fleet, Instance, SentRequests

_S = 1e-9


class RouterViews:
    """The views of all routers. Instances are numbered in the order of `published`, adapters in that of `adapters`."""

    def __init__(self, published: Sequence[Instance], adapters: Sequence[str], routers: int, delay_ns: int) -> None:
        self.plan: PlacementPlan | None = None
        self.tiers: dict[str, dict[str, Tier]] = {}
        self._names = [instance.name for instance in published]
        self._number = {name: number for number, name in enumerate(self._names)}
        self._adapters = adapters
        self._published = {instance.name: instance for instance in published}
        self._delay = delay_ns
        self._under_way: deque[tuple[int, int, Instance, dict[int, Tier]]] = deque()
        self._ledgers = [SentRequests() for _ in range(routers)]
        self._sent: list[dict[int, None]] = [{} for _ in published]  # instance → routers that sent to it lately
        self._open: list[dict[int, None]] = [{} for _ in range(routers)]  # router → instances that it sent to lately

    def publish(self, number: int, instance: Instance, changed: dict[int, Tier], now: int) -> None:
        """Sends an instance's heartbeat with the changes of its adapters."""
        self._under_way.append((now + self._delay, number, instance, changed))

    def arrive(self, now: int) -> None:
        """Applies the heartbeats that have arrived by `now`."""
        while self._under_way and self._under_way[0][0] <= now:
            at, number, instance, changed = self._under_way.popleft()
            self._published[instance.name] = instance
            for adapter, tier in changed.items():
                self.learn(adapter, instance.name, tier)
            for router in list(self._sent[number]):
                self._ledgers[router].on_heartbeat(instance.name, at * _S)
                if instance.name not in self._ledgers[router]:
                    del self._sent[number][router], self._open[router][number]

    def learn(self, adapter: int, name: str, tier: Tier) -> None:
        """Records where an adapter is."""
        holders = self.tiers.setdefault(self._adapters[adapter], {})
        if tier is Tier.ABSENT:
            holders.pop(name, None)
        else:
            holders[name] = tier

    def sent(self, router: int, number: int, arrival: Arrival, now: int) -> None:
        """Records a request that a router has forwarded."""
        self._ledgers[router].add(self._names[number], arrival, now * _S)
        self._sent[number][router] = None
        self._open[router][number] = None

    def of(self, router: int, own: Instance, now: int) -> Fleet:
        """Returns the cluster as one router sees it."""
        seen = self._published.copy()
        for number in self._open[router]:
            instance = seen[self._names[number]]
            backlog = self._ledgers[router].backlog(instance.name, instance.backlog, now * _S)
            seen[instance.name] = instance.with_backlog(backlog)
        seen[own.name] = own
        return Fleet(own.name, seen, self.tiers, self.plan)

    def number(self, name: str) -> int:
        """Returns the number of the instance with this name."""
        return self._number[name]
