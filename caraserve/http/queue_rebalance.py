"""Queue rebalancing as in dLoRA: once a second, moves waiting requests to an instance with less work.

Only for `--routing dlora`. Only a request that waits moves: it is cancelled here and returned to the instance that has
its client, which forwards it to another one and keeps the stream. The paper also moves running requests with their KV
blocks, by an integer program. `cluster/placement/migration.py` chooses the moves.
"""

import asyncio
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from caraserve.cluster.placement.migration import QueuedRequest, rebalanced
from caraserve.cluster.routing.cost import Arrival
from caraserve.cluster.routing.selector import InstanceSelector
from caraserve.http.generation import Generation
from caraserve.loop import Engine

_INTERVAL_S = 1.0
_COST_TOKENS = 32.0  # least gain of a move, in tokens of work: it costs a forward and a place at the end of a queue


@dataclass(slots=True, eq=False)
class TrackedGeneration:
    """A generation on this instance, which moves if it still waits."""

    generation: Generation
    arrival: Arrival
    moved: bool = False

    def is_queued(self, waiting: Set[str]) -> bool:
        """Whether none of its engine requests has started, and its client has received nothing."""
        requests = self.generation.api_request.requests
        return not self.generation.response_started and all(one.request_id in waiting for one in requests)

    def move(self) -> None:
        """Cancels it here, for another instance to answer."""
        self.moved = True
        self.generation.cancel()


class QueueRebalancer:
    """Tracks the generations of one instance and moves waiting ones."""

    def __init__(self, engine: Engine, selector: InstanceSelector) -> None:
        self._engine, self._selector = engine, selector
        self._tracked: dict[str, TrackedGeneration] = {}  # by the id of the first engine request

    @contextmanager
    def track(self, generation: Generation, arrival: Arrival) -> Iterator[TrackedGeneration]:
        """Lets a generation move while the context is open."""
        tracked = TrackedGeneration(generation, arrival)
        request_id = generation.api_request.requests[0].request_id
        self._tracked[request_id] = tracked
        try:
            yield tracked
        finally:
            del self._tracked[request_id]

    async def run(self) -> None:
        """Rebalances once a second, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.rebalance()

    def rebalance(self) -> None:
        """Moves the waiting requests that other instances would finish sooner."""
        waiting = self._engine.waiting()
        queued = {request_id: one for request_id, one in self._tracked.items() if one.is_queued(waiting)}
        if not queued:
            return
        selector = self._selector
        queue = [
            QueuedRequest(request_id, one.arrival.adapter, round(one.arrival.prompt_tokens + one.arrival.output_tokens))
            for request_id, one in queued.items()
        ]
        outstanding, holders = selector.outstanding({one.adapter for one in queue})
        for move in rebalanced({selector.name: queue}, outstanding, holders, _COST_TOKENS):
            queued[move.request_id].move()
            selector.routing_metrics.moved += 1
