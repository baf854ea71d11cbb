"""Fair shares between tenants by virtual token counters; within one by priority, then by arrival. Pure; level 2.

Each tenant has a counter of the service it got, in weighted tokens; the waiting tenant with the least goes first. A
tenant that comes back is lifted to the least counter of those waiting: time away is not saved up.
(Sheng et al., "Fairness in Serving Large Language Models".)
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from typing import Generic, TypeVar

_PROMPT_WEIGHT, _OUTPUT_WEIGHT = 1.0, 2.0  # an output token costs a whole iteration's turn, a prompt token a share
_MAX_COUNTERS = 10_000  # of tenants that are not waiting; tenant names come from clients

W = TypeVar("W")


class FairQueue(Generic[W]):
    """Waiting items by tenant. `priority`: of a tenant's items, those with a lower one go first."""

    def __init__(self, priority: Callable[[W], int] = lambda item: 0) -> None:
        self._priority = priority
        self._queues: dict[str, deque[W]] = {}
        self._served: dict[str, float] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[W]:
        for queue in self._queues.values():
            yield from queue

    def push(self, tenant: str, item: W) -> None:
        """Adds to the tenant's queue: behind the items of the same priority, before those of a higher one."""
        if tenant not in self._queues:
            least = min((self._served[name] for name in self._queues), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            self._queues[tenant] = deque()
            self._forget_idle()
        queue, own = self._queues[tenant], self._priority(item)
        later = sum(1 for _ in takewhile(lambda other: self._priority(other) > own, reversed(queue)))
        queue.insert(len(queue) - later, item)

    def in_order(self) -> list[tuple[str, W]]:
        """The first item of every tenant, least served tenant first."""
        tenants = sorted(self._queues, key=lambda tenant: (self._served[tenant], tenant))
        return [(tenant, self._queues[tenant][0]) for tenant in tenants]

    def upcoming(self, count: int) -> list[W]:
        """About the first `count` items to come: the tenants' first ones, then their second ones, and so on."""
        queues = [self._queues[tenant] for tenant, _ in self.in_order()]
        depth = min(count, max(map(len, queues), default=0))
        turns = (queue[turn] for turn in range(depth) for queue in queues if turn < len(queue))
        return list(islice(turns, count))

    def pop(self, tenant: str) -> W:
        """Takes the tenant's first item."""
        queue = self._queues[tenant]
        item = queue.popleft()
        if not queue:
            del self._queues[tenant]
        return item

    def remove(self, tenant: str, item: W) -> None:
        """Takes an item out of the middle. Raises ValueError when it is not there."""
        self._queues[tenant].remove(item)
        if not self._queues[tenant]:
            del self._queues[tenant]

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """Records service given to a tenant."""
        service = _PROMPT_WEIGHT * prompt_tokens + _OUTPUT_WEIGHT * output_tokens
        self._served[tenant] = self._served.get(tenant, 0.0) + service

    def _forget_idle(self) -> None:
        if len(self._served) > _MAX_COUNTERS + len(self._queues):
            self._served = {tenant: self._served[tenant] for tenant in self._queues}
