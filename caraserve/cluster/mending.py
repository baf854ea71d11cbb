"""Moves towards the plan in the background: adapters that it wants here come, those that others now have go. Level 4.

Slowly, and one after the other: requests that need an adapter fetch it at once and do not wait for this.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from caraserve.cluster.assignment import AdapterDemand, Plan
from caraserve.cluster.migration import MigrationLimits, Mover
from caraserve.cluster.node import Node
from caraserve.cluster.planner import restricted
from caraserve.cluster.pool import Pool
from caraserve.exposition import family

log = logging.getLogger(__name__)

_MOST_DROPS = 4  # in a turn
_AGAIN_S = 30.0  # before a move that failed is tried again


class Mending:
    """This instance's moves."""

    def __init__(
        self,
        node: Node,
        pool: Pool,
        limits: MigrationLimits | None = None,
        now: Callable[[], float] = time.monotonic,
        turn_s: float = 1.0,
    ) -> None:
        self.fetched = self.failed = self.dropped = 0
        self._node, self._pool, self._now, self._turn_s = node, pool, now, turn_s
        self._mover = Mover(node.name, limits or MigrationLimits())
        self._plan: Plan | None = None
        self._mine: Plan | None = None  # the part of it that is for this instance
        self._wanted: Mapping[str, AdapterDemand] = {}
        self._later_s: dict[str, float] = {}
        self._moves: set[asyncio.Task[None]] = set()
        pool.wanted = lambda name: self._mine is not None and name in self._mine.shares

    async def run(self, plan: Callable[[], Plan | None]) -> None:
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
        wanted = len(self._wanted)
        yield family("caraserve:plan_adapters", "gauge", "Adapters that the plan has here.", [(labels, wanted)])

    async def _take(self, plan: Plan) -> None:
        mine = await asyncio.to_thread(_part_of, plan, self._node.name)
        self._plan, self._mine, self._later_s = plan, mine, {}
        # Hot ones have more copies: that is what tells them here.
        self._wanted = {
            name: AdapterDemand(name, known.rank, known.num_bytes, float(len(shares)))
            for name, shares in mine.shares.items()
            if (known := self._node.adapter(name)) is not None
        }

    def _fetch(self) -> None:
        assert self._mine is not None
        now = self._now()
        done = {name for name in self._wanted if self._pool.holds_name(name) or self._later_s.get(name, 0) > now}
        for name in self._mover.fetches(self._mine, done, self._wanted, now):
            task = asyncio.create_task(self._bring(name))
            self._moves.add(task)
            task.add_done_callback(self._moves.discard)

    async def _bring(self, name: str) -> None:
        try:
            if await self._pool.bring(name):
                self.fetched += 1
            else:
                self.failed += 1
                self._later_s[name] = self._now() + _AGAIN_S
        finally:
            self._mover.done(name)

    async def _drop(self, plan: Plan) -> None:
        spare = {name: digest for name, digest in self._pool.spare() if name in plan.shares}
        holders = {name: self._node.holders(digest).keys() for name, digest in spare.items()}
        for name in self._mover.drops(restricted(plan, list(spare)), spare.keys(), holders)[:_MOST_DROPS]:
            if await self._pool.let_go(spare[name]):
                self.dropped += 1


def _part_of(plan: Plan, name: str) -> Plan:
    return restricted(plan, [adapter for adapter in plan.shares if name in plan.instances(adapter)])
