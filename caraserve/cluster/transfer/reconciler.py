"""Moves adapters towards the plan in the background: downloads those it places here, deletes those it places elsewhere.

Each instance moves its own adapters, a few at a time and hot ones first, so that neither requests nor the event loop
wait. It deletes an adapter that the plan places on other instances only once they have it. A request that needs an
adapter downloads it at once, outside the limits here.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import numpy as np

from caraserve.cluster.membership.member import Member
from caraserve.cluster.routing.placement_plan import PlacementPlan
from caraserve.cluster.transfer.adapter_pool import AdapterPool
from caraserve.telemetry.prometheus import family

log = logging.getLogger(__name__)

_MISSING_PER_TURN = 200  # adapters to check
_SPARE_PER_TURN = 16  # adapters on disk to check, each with a look-up of its holders
_RETRY_S = 30.0  # before a failed move is tried again


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """Limits of background downloads on one instance: a token bucket of bytes, and a number of downloads at once."""

    bytes_per_s: float = 500e6
    burst_bytes: float = 1e9  # the most that the bucket holds
    concurrent: int = 2


class ByteBucket:
    """The bytes that background downloads may take now."""

    def __init__(self, limits: MigrationLimits) -> None:
        self._limits = limits
        self._bytes, self._filled_s = limits.burst_bytes, 0.0

    def take(self, num_bytes: int, now_s: float) -> bool:
        """Takes bytes. Returns False if there are none. The bucket may go below zero, so that an adapter larger than it
        can move; then nothing is taken until it is above zero again."""
        filled = self._bytes + (now_s - self._filled_s) * self._limits.bytes_per_s
        self._bytes, self._filled_s = min(filled, self._limits.burst_bytes), now_s
        if self._bytes <= 0:
            return False
        self._bytes -= num_bytes
        return True


class Reconciler:
    """Moves the adapters of one instance."""

    def __init__(
        self,
        member: Member,
        pool: AdapterPool,
        limits: MigrationLimits | None = None,
        now: Callable[[], float] = time.monotonic,
        turn_s: float = 1.0,
    ) -> None:
        self.fetched = self.failed = self.dropped = 0
        self._member, self._pool, self._now, self._turn_s = member, pool, now, turn_s
        self._limits = limits or MigrationLimits()
        self._bucket = ByteBucket(self._limits)
        self._plan: PlacementPlan | None = None
        self._mine: PlacementPlan | None = None  # its part for this instance
        self._missing: deque[str] = deque()  # names of that part, hot ones first; some may be here already
        self._spare_start = 0  # index into the disk cache's digests
        self._retry_s: dict[str, float] = {}
        self._moves: dict[str, asyncio.Task[None]] = {}  # by name

    async def run(self, plan: Callable[[], PlacementPlan | None]) -> None:
        """Moves adapters until cancelled. `plan`: returns the plan in force."""
        try:
            while True:
                await asyncio.sleep(self._turn_s)
                if (in_force := plan()) is not None:
                    if in_force is not self._plan:
                        await self._adopt(in_force)
                    self._start_downloads()
                    await self._delete_spare(in_force)
        finally:
            for task in self._moves.values():
                task.cancel()

    def families(self, labels: str) -> Iterator[str]:
        """Yields the metric families for GET /metrics. `labels`: those of every sample."""
        ends = {"fetched": self.fetched, "failed": self.failed, "dropped": self.dropped}
        samples = [(f'outcome="{outcome}",{labels}', count) for outcome, count in ends.items()]
        yield family("caraserve:plan_moves_total", "counter", "Adapters moved because of the plan.", samples)
        wanted = len(self._mine.shares) if self._mine is not None else 0
        yield family("caraserve:plan_adapters", "gauge", "Adapters that the plan places here.", [(labels, wanted)])

    async def _adopt(self, plan: PlacementPlan) -> None:
        mine, missing = await asyncio.to_thread(_part_of, plan, self._member.name)
        self._plan, self._mine, self._missing, self._retry_s = plan, mine, missing, {}
        self._pool.store.set_planned(mine.shares.keys())

    def _start_downloads(self) -> None:
        """Starts downloads of missing adapters, as far as the limits allow."""
        now = self._now()
        for _ in range(min(_MISSING_PER_TURN, len(self._missing))):
            name = self._missing[0]
            registered = self._member.adapter(name)
            if registered is None or self._pool.holds_name(name):
                self._missing.popleft()
            elif name in self._moves or self._retry_s.get(name, 0.0) > now:
                self._missing.rotate(-1)  # behind all others
            elif len(self._moves) >= self._limits.concurrent or not self._bucket.take(registered.num_bytes, now):
                return
            else:
                self._missing.rotate(-1)
                self._moves[name] = asyncio.create_task(self._download(name))

    async def _download(self, name: str) -> None:
        try:
            if await self._pool.store_planned(name):
                self.fetched += 1
                return
        except Exception:  # a defect in this code must not end the other moves
            log.exception("adapter %s could not be moved here", name)
        finally:
            del self._moves[name]
        self.failed += 1
        self._retry_s[name] = self._now() + _RETRY_S

    async def _delete_spare(self, plan: PlacementPlan) -> None:
        """Deletes some adapters that the plan places elsewhere, and that are there."""
        digests = self._pool.store.stored.digests()
        start = self._spare_start if self._spare_start < len(digests) else 0
        self._spare_start = start + _SPARE_PER_TURN
        for name, digest in sorted(self._pool.store.spare(digests[start : self._spare_start])):
            if is_elsewhere(plan, name, self._member.name, self._member.holders(digest)):
                self.dropped += await self._pool.store.try_delete(digest)


def is_elsewhere(plan: PlacementPlan, adapter: str, me: str, holders: Container[str]) -> bool:
    """Whether the plan places an adapter on other instances only, and all of those hold it. An adapter that the plan
    lacks may be newer than it."""
    planned = plan.instances(adapter)
    return bool(planned) and me not in planned and all(name in holders for name in planned)


def _part_of(plan: PlacementPlan, name: str) -> tuple[PlacementPlan, deque[str]]:
    """Returns an instance's part of a plan, and the names in it, hot ones first: those have more copies."""
    mine = plan.restricted(plan.shares.adapters_on(name))
    hot_first = np.argsort(-mine.shares.counts, kind="stable")
    return mine, deque(mine.shares.adapters[row] for row in hot_first.tolist())
