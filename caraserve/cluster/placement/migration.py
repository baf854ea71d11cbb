"""Chooses what moves between instances, and how fast: adapters towards a plan, and queued requests as in dLoRA.

Each instance moves its own adapters. It downloads those that the plan places on it, hot ones first and within limits,
and deletes those that the plan places on other instances only once they have them. A request that needs an adapter
downloads it at once, outside these limits.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from caraserve.cluster.placement.plan import AdapterDemand, PlacementPlan


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """Limits of background downloads on one instance: a token bucket of bytes, and a number of downloads at once."""

    bytes_per_s: float = 500e6
    burst_bytes: float = 1e9  # the most that the bucket holds
    concurrent: int = 2


class MoveScheduler:
    """Chooses one instance's next downloads and deletions towards the plan in force."""

    def __init__(self, me: str, limits: MigrationLimits) -> None:
        self._me, self._limits = me, limits
        self._credit_bytes, self._filled_s = limits.burst_bytes, 0.0
        self._flying: set[str] = set()

    def fetches(
        self, plan: PlacementPlan, held: Set[str], adapters: Mapping[str, AdapterDemand], now_s: float
    ) -> list[str]:
        """Returns the adapters to start downloading now. Each counts as in flight until `done`."""
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
            # The credit may become negative, and then nothing starts until it is positive again. So an adapter larger
            # than the bucket can still move.
            if len(self._flying) >= self._limits.concurrent or self._credit_bytes <= 0:
                break
            self._credit_bytes -= adapters[name].num_bytes
            self._flying.add(name)
            started.append(name)
        return started

    def done(self, adapter: str) -> None:
        """Ends an adapter's download, successful or not. After a failure `fetches` returns the adapter again."""
        self._flying.discard(adapter)

    def drops(self, plan: PlacementPlan, held: Set[str], holders: Mapping[str, Set[str]]) -> list[str]:
        """Returns the adapters held here that the plan places on other instances only, if all of those have them.
        `holders`: adapter → instances with verified bytes. Adapters that the plan lacks are kept: they may be newer
        than it. Deleting still requires a delete lease."""
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
    tokens: int  # to compute, prompt and answer


@dataclass(frozen=True, slots=True)
class QueueMove:
    """A queued request's move from one instance to another."""

    request_id: str
    source: str
    target: str


def rebalanced(
    queues: Mapping[str, Sequence[QueuedRequest]],
    outstanding_tokens: Mapping[str, float],
    holders: Mapping[str | None, Iterable[str]],
    cost_tokens: float,
) -> list[QueueMove]:
    """Returns the moves of dLoRA's migration between instances, greedily where the paper solves an integer program.
    From the most loaded instance, the latest queued request goes to the least loaded holder of its adapter, if the gap
    between the two then shrinks by more than the move's cost, in tokens. Every instance holds an adapter that is not
    in `holders`."""
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
