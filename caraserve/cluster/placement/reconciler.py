"""Moves adapters towards the plan in the background: downloads those it places here, deletes those it places elsewhere.

It moves a few at a time, so that neither requests nor the event loop wait. A request that needs an adapter downloads it
at once, outside these limits.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from caraserve.cluster.membership.node import Node
from caraserve.cluster.placement.migration import MigrationLimits, MoveScheduler
from caraserve.cluster.placement.plan import AdapterDemand, PlacementPlan
from caraserve.cluster.placement.planner import restricted
from caraserve.cluster.transfer.adapter_pool import AdapterPool
from caraserve.telemetry.prometheus import family

log = logging.getLogger(__name__)

_MISSING_PER_TURN = 200  # adapters to check
_SPARE_PER_TURN = 16  # adapters on disk to check, each with a look-up of its holders
_RETRY_S = 30.0  # before a failed move is tried again


class Reconciler:
    """Moves the adapters of one instance."""

    def __init__(
        self,
        node: Node,
        pool: AdapterPool,
        limits: MigrationLimits | None = None,
        now: Callable[[], float] = time.monotonic,
        turn_s: float = 1.0,
    ) -> None:
        self.fetched = self.failed = self.dropped = 0
        self._node, self._pool, self._now, self._turn_s = node, pool, now, turn_s
        self._mover = MoveScheduler(node.name, limits or MigrationLimits())
        self._plan: PlacementPlan | None = None
        self._mine: PlacementPlan | None = None  # its part for this instance
        self._missing: deque[str] = deque()  # names of that part, hot ones first; some may be here already
        self._spare_start = 0  # index into the disk cache's digests
        self._retry_s: dict[str, float] = {}
        self._moves: set[asyncio.Task[None]] = set()

    async def run(self, plan: Callable[[], PlacementPlan | None]) -> None:
        """Moves adapters until cancelled. `plan`: returns the plan in force."""
        try:
            while True:
                await asyncio.sleep(self._turn_s)
                if (held := plan()) is not None:
                    if held is not self._plan:
                        await self._adopt(held)
                    self._fetch()
                    await self._drop(held)
        finally:
            for task in self._moves:
                task.cancel()

    def families(self, labels: str) -> Iterator[str]:
        """Yields the metric families for GET /metrics. `labels`: those of every sample."""
        ends = {"fetched": self.fetched, "failed": self.failed, "dropped": self.dropped}
        samples = [(f'outcome="{outcome}",{labels}', count) for outcome, count in ends.items()]
        yield family("caraserve:plan_moves_total", "counter", "Adapters moved because of the plan.", samples)
        wanted = len(self._mine.shares) if self._mine is not None else 0
        yield family("caraserve:plan_adapters", "gauge", "Adapters that the plan places here.", [(labels, wanted)])

    async def _adopt(self, plan: PlacementPlan) -> None:
        mine, missing = await asyncio.to_thread(_part_of, plan, self._node.name)
        self._plan, self._mine, self._missing, self._retry_s = plan, mine, missing, {}
        self._pool.store.set_planned(mine.shares.keys())

    def _fetch(self) -> None:
        """Starts downloads of missing adapters, as far as the limits allow."""
        assert self._mine is not None
        now = self._now()
        wanted: dict[str, AdapterDemand] = {}
        for _ in range(min(_MISSING_PER_TURN, len(self._missing))):
            name = self._missing.popleft()
            known = self._node.adapter(name)
            if known is None or self._pool.holds_name(name):
                continue
            if self._retry_s.get(name, 0.0) > now:
                self._missing.append(name)  # behind all others
            else:
                copies = len(self._mine.shares[name])  # stands for demand here: hot ones have more copies
                wanted[name] = AdapterDemand(name, known.rank, known.num_bytes, float(copies))
        self._missing.extendleft(reversed(wanted))
        for name in self._mover.fetches(restricted(self._mine, list(wanted)), frozenset(), wanted, now):
            task = asyncio.create_task(self._move_here(name))
            self._moves.add(task)
            task.add_done_callback(self._moves.discard)

    async def _move_here(self, name: str) -> None:
        try:
            if await self._pool.store_planned(name):
                self.fetched += 1
                return
        except Exception:  # a defect in this code must not end the other moves
            log.exception("adapter %s could not be moved here", name)
        finally:
            self._mover.done(name)
        self.failed += 1
        self._retry_s[name] = self._now() + _RETRY_S

    async def _drop(self, plan: PlacementPlan) -> None:
        """Deletes some adapters that the plan places elsewhere, if all of those instances have them."""
        digests = self._pool.store.stored_digests()
        start = self._spare_start if self._spare_start < len(digests) else 0
        self._spare_start = start + _SPARE_PER_TURN
        spare = dict(self._pool.store.spare(digests[start : self._spare_start]))
        holders = {name: self._node.holders(digest).keys() for name, digest in spare.items()}
        for name in self._mover.drops(restricted(plan, list(spare)), spare.keys(), holders):
            if await self._pool.store.try_delete(spare[name]):
                self.dropped += 1


def _part_of(plan: PlacementPlan, name: str) -> tuple[PlacementPlan, deque[str]]:
    """Returns an instance's part of a plan, and the names in it, hot ones first."""
    mine = restricted(plan, plan.shares.adapters_on(name))
    hot_first = np.argsort(-mine.shares.counts, kind="stable")
    return mine, deque(mine.shares.adapters[row] for row in hot_first.tolist())
