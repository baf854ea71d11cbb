"""What moves between instances, and how fast: adapters towards a plan, and queued requests as dLoRA moves them. Pure.

An instance moves its own adapters: it fetches what a plan wants of it, hot ones first and slowly, and lets go of what
the plan gives to others only once they have it. A request that needs an adapter fetches it at once, past these limits.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from caraserve.cluster.placement.plan import AdapterDemand, PlacementPlan


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """What background moves may use of an instance's network."""

    bytes_per_s: float = 500e6
    burst_bytes: float = 1e9  # what an idle bucket saves up
    concurrent: int = 2


class MoveScheduler:
    """One instance's moves towards the plan that holds."""

    def __init__(self, me: str, limits: MigrationLimits) -> None:
        self._me, self._limits = me, limits
        self._credit_bytes, self._filled_s = limits.burst_bytes, 0.0
        self._flying: set[str] = set()

    def fetches(
        self, plan: PlacementPlan, held: Set[str], adapters: Mapping[str, AdapterDemand], now_s: float
    ) -> list[str]:
        """The adapters to start fetching now. Each is in flight until `done`."""
        credit = self._credit_bytes + (now_s - self._filled_s) * self._limits.bytes_per_s
        self._credit_bytes, self._filled_s = min(credit, self._limits.burst_bytes), now_s
        wanted = [
            (-share.fraction * adapters[name].tokens_per_s, name)
            for name, shares in plan.shares.items()
            for share in shares
            if share.instance == self._me and name in adapters and name not in held and name not in self._flying
        ]
        started = []
        for _, name in sorted(wanted):
            # A debt is paid off before the next one starts: no adapter is too large to ever move.
            if len(self._flying) >= self._limits.concurrent or self._credit_bytes <= 0:
                break
            self._credit_bytes -= adapters[name].num_bytes
            self._flying.add(name)
            started.append(name)
        return started

    def done(self, adapter: str) -> None:
        """A fetch has ended, well or not; one that failed is wanted again."""
        self._flying.discard(adapter)

    def drops(self, plan: PlacementPlan, held: Set[str], holders: Mapping[str, Set[str]]) -> list[str]:
        """Adapters held here that the plan gives to others who all have them (`holders`: adapter → who has verified
        bytes). What the plan does not know stays: it may be younger than the plan. Deleting still needs a promise."""
        return sorted(
            name
            for name in held
            if (instances := plan.instances(name))
            and self._me not in instances
            and set(instances) <= holders.get(name, set())
        )


# --- dLoRA ---


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that has not started."""

    request_id: str
    adapter: str | None
    tokens: int  # that it will take, prompt and answer


@dataclass(frozen=True, slots=True)
class QueueMove:
    """A queued request's move."""

    request_id: str
    source: str
    target: str


def rebalanced(
    queues: Mapping[str, Sequence[QueuedRequest]],
    outstanding_tokens: Mapping[str, float],
    holders: Mapping[str | None, Iterable[str]],
    cost_tokens: float,
) -> list[QueueMove]:
    """dLoRA's migration between instances, greedily where the paper solves an integer program: from the most loaded
    instance, the latest queued request goes to the least loaded holder of its adapter as long as the gap between the
    two then shrinks by more than the move costs (in tokens of service). Adapters without entry are with everyone."""
    load = dict(outstanding_tokens)
    left = {name: list(queue) for name, queue in queues.items()}
    moves: list[QueueMove] = []
    sources = set(left)
    while sources:
        source = max(sources, key=lambda name: (load[name], name))
        if not left[source]:
            sources.discard(source)
            continue
        queued = left[source].pop()
        targets = set(holders.get(queued.adapter, load)) & load.keys() - {source}
        if not targets:
            continue
        target = min(targets, key=lambda name: (load[name], name))
        if load[source] - load[target] > queued.tokens + cost_tokens:
            load[source] -= queued.tokens
            load[target] += queued.tokens
            moves.append(QueueMove(queued.request_id, source, target))
    return moves
