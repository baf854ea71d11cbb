"""Moves towards the plan in the background: adapters that it wants here come, those that others now have go.

Slowly, and a few at a time, however many there are: requests that need an adapter fetch it at once and do not wait for
this, and neither does the event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

from caraserve.cluster.membership.node import Node
from caraserve.cluster.placement.migration import MigrationLimits, MoveScheduler
from caraserve.cluster.placement.plan import AdapterDemand, PlacementPlan
from caraserve.cluster.placement.planner import restricted
from caraserve.cluster.transfer.adapter_pool import AdapterPool
from caraserve.telemetry.prometheus import family

log = logging.getLogger(__name__)

_LOOKED_AT = 200  # adapters that may be missing, in a turn
_SPARE_LOOKED_AT = 16  # of those on our disk, each of which means asking who else holds it
_AGAIN_S = 30.0  # before a move that failed is tried again


class Reconciler:
    """This instance's moves."""

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
        self._mine: PlacementPlan | None = None  # the part of it that is for this instance
        self._missing: deque[str] = deque()  # of that part, hot ones first; some of them may be here already
        self._looked_at = 0  # of what is on our disk
        self._later_s: dict[str, float] = {}
        self._moves: set[asyncio.Task[None]] = set()
        pool.store.wanted = lambda name: self._mine is not None and name in self._mine.shares

    async def run(self, plan: Callable[[], PlacementPlan | None]) -> None:
        """Until cancelled. `plan`: the one that holds."""
        try:
            while True:
                await asyncio.sleep(self._turn_s)
                if (held := plan()) is not None:
                    if held is not self._plan:
                        await self._take(held)
                    self._fetch()
                    await self._drop(held)
        finally:
            for task in self._moves:
                task.cancel()

    def families(self, labels: str) -> Iterator[str]:
        """For GET /metrics."""
        ends = {"fetched": self.fetched, "failed": self.failed, "dropped": self.dropped}
        samples = [(f'outcome="{outcome}",{labels}', count) for outcome, count in ends.items()]
        yield family("caraserve:plan_moves_total", "counter", "Adapters moved because of the plan.", samples)
        wanted = len(self._mine.shares) if self._mine is not None else 0
        yield family("caraserve:plan_adapters", "gauge", "Adapters that the plan has here.", [(labels, wanted)])

    async def _take(self, plan: PlacementPlan) -> None:
        mine, missing = await asyncio.to_thread(_part_of, plan, self._node.name)
        self._plan, self._mine, self._missing, self._later_s = plan, mine, missing, {}

    def _fetch(self) -> None:
        """Starts what may be started of the next that are missing."""
        assert self._mine is not None
        now = self._now()
        wanted: dict[str, AdapterDemand] = {}
        for _ in range(min(_LOOKED_AT, len(self._missing))):
            name = self._missing.popleft()
            known = self._node.adapter(name)
            if known is None or self._pool.holds_name(name):
                continue
            if self._later_s.get(name, 0.0) > now:
                self._missing.append(name)  # after all others
            else:
                copies = len(self._mine.shares[name])  # hot ones have more: that is what tells them here
                wanted[name] = AdapterDemand(name, known.rank, known.num_bytes, float(copies))
        self._missing.extendleft(reversed(wanted))
        for name in self._mover.fetches(restricted(self._mine, list(wanted)), frozenset(), wanted, now):
            task = asyncio.create_task(self._bring(name))
            self._moves.add(task)
            task.add_done_callback(self._moves.discard)

    async def _bring(self, name: str) -> None:
        try:
            if await self._pool.bring(name):
                self.fetched += 1
                return
        except Exception:  # a defect of ours, which must not end the other moves
            log.exception("adapter %s could not be moved here", name)
        finally:
            self._mover.done(name)
        self.failed += 1
        self._later_s[name] = self._now() + _AGAIN_S

    async def _drop(self, plan: PlacementPlan) -> None:
        """Lets some of what is not for this instance go, if those whom it is for have it."""
        digests = self._pool.store.stored_digests()
        start = self._looked_at if self._looked_at < len(digests) else 0
        self._looked_at = start + _SPARE_LOOKED_AT
        spare = dict(self._pool.store.spare(digests[start : self._looked_at]))
        holders = {name: self._node.holders(digest).keys() for name, digest in spare.items()}
        for name in self._mover.drops(restricted(plan, list(spare)), spare.keys(), holders):
            if await self._pool.store.let_go(spare[name]):
                self.dropped += 1


def _part_of(plan: PlacementPlan, name: str) -> tuple[PlacementPlan, deque[str]]:
    """What is for an instance, and its names, hot ones first."""
    mine = restricted(plan, [adapter for adapter in plan.shares if name in plan.instances(adapter)])
    return mine, deque(sorted(mine.shares, key=lambda adapter: (-len(mine.shares[adapter]), adapter)))
