"""Chooses which queued requests move between instances: the migration of dLoRA. No I/O, no clock."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


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
