"""dLoRA's balance: requests that wait here go to an instance with less to do, once a second. For `--routing dlora`.

Only a request that has not begun moves: it is cancelled here and handed back to where its client is, which finds it
another instance and keeps the stream. The paper moves running ones too, with their KV blocks, by an integer program.
Called by `dispatch.py`; `cluster/migration.py` decides.
"""

import asyncio
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from caraserve.cluster.placement.migration import QueuedRequest, rebalanced
from caraserve.cluster.routing.cost import Arrival
from caraserve.cluster.routing.forwarding import Forwarding
from caraserve.http.generation import Job, RunningJob
from caraserve.http.interfaces import EngineApi

_EVERY_S = 1.0
_COST_TOKENS = 32.0  # of service, that a move has to be worth: a hop and a place at the end of another queue


@dataclass(slots=True, eq=False)
class MovableJob:
    """A job that this instance has taken on."""

    job: Job
    arrival: Arrival
    running: RunningJob
    moved: bool = False

    def is_queued(self, waiting: Set[str]) -> bool:
        """Whether nothing of it has begun, and its client has seen nothing."""
        return not self.running.touched and all(one.request_id in waiting for one in self.job.requests)

    def hand_back(self) -> None:
        """Ends it here. Nothing of a waiting request is computed after that."""
        self.moved = True
        for stream in self.running.streams:
            stream.cancel()


class QueueRebalancer:
    """The jobs of one instance that could move."""

    def __init__(self, engine: EngineApi, forwarding: Forwarding) -> None:
        self._engine, self._forwarding = engine, forwarding
        self._jobs: dict[str, MovableJob] = {}

    @contextmanager
    def answering(self, job: Job, arrival: Arrival) -> Iterator[MovableJob]:
        """While this instance answers a job."""
        here = MovableJob(job, arrival, RunningJob())
        name = job.requests[0].request_id
        self._jobs[name] = here
        try:
            yield here
        finally:
            del self._jobs[name]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            self.balance()

    def balance(self) -> None:
        """Hands back what others would do sooner."""
        waiting = self._engine.waiting()
        queued = {name: here for name, here in self._jobs.items() if here.is_queued(waiting)}
        if not queued:
            return
        forwarding = self._forwarding
        queue = [
            QueuedRequest(name, here.arrival.adapter, round(here.arrival.prompt_tokens + here.arrival.output_tokens))
            for name, here in queued.items()
        ]
        outstanding, holders = forwarding.outstanding({one.adapter for one in queue})
        for move in rebalanced({forwarding.name: queue}, outstanding, holders, _COST_TOKENS):
            queued[move.request_id].hand_back()
            forwarding.routing_metrics.moved += 1
