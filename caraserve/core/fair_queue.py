"""Fair shares by virtual token counters: between clients, then between the users of each client. No I/O.

Each client has a counter of the service that it received, in weighted tokens or in seconds, divided by the client's own
weight: with weight 2 a client gets twice the service of one with weight 1 while both wait. The waiting client with the
lowest counter is served next, and of its users the one with the lowest, whose requests are ordered by priority, then by
arrival. A client has one share however many users it names. When a client or user starts to wait again, its counter is
raised to the lowest one of those that wait or, if none waits, to that of the last one served: idle time earns no
credit, and service received while no other client waited is not charged later.
(Sheng et al., "Fairness in Serving Large Language Models".)
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice, takewhile
from typing import Generic, TypeVar

from caraserve.core.tenant import Tenant

_PROMPT_WEIGHT, _OUTPUT_WEIGHT = 1.0, 2.0  # an output token takes a whole iteration, a prompt token a part of one
_MAX_COUNTERS = 10_000  # for clients, and for users, that are not waiting; clients choose users' names, without limit

W = TypeVar("W")
K = TypeVar("K", str, Tenant)


class _Counters(Generic[K]):
    """The service that each client, or each user, has received."""

    def __init__(self) -> None:
        self._served: dict[K, float] = {}
        self._most = _MAX_COUNTERS

    def lift(self, name: K, others: Iterable[K], last: float) -> None:
        """Raises the counter of `name`, which starts to wait, to the lowest of `others` or, if there are none, to
        `last`."""
        least = min((self._served[other] for other in others), default=last)
        self._served[name] = max(self._served.get(name, 0.0), least)

    def of(self, name: K) -> float:
        """Returns the counter of a waiting name."""
        return self._served[name]

    def least(self, names: Iterable[K], count: int = 1) -> list[K]:
        """Returns the `count` names with the lowest counters, the lowest first."""
        return heapq.nsmallest(count, names, key=lambda name: (self._served[name], name))

    def charge(self, name: K, service: float) -> None:
        self._served[name] = self._served.get(name, 0.0) + service

    @property
    def are_too_many(self) -> bool:
        return len(self._served) > self._most

    def keep(self, waiting: Iterable[K]) -> None:
        """Removes the counters of all names but the waiting ones."""
        self._served = {name: self._served[name] for name in waiting}
        self._most = max(_MAX_COUNTERS, 2 * len(self._served))


class FairQueue(Generic[W]):
    """Waiting items by client and user. `priority`: of a user's items, those with a lower one go first."""

    def __init__(self, priority: Callable[[W], int] = lambda item: 0) -> None:
        self._priority = priority
        self._queues: dict[str, dict[Tenant, deque[W]]] = {}
        self._length = 0
        self._clients: _Counters[str] = _Counters()
        self._users: _Counters[Tenant] = _Counters()
        self._last_client = 0.0  # the counter of the last client served, at that time
        self._last_user: dict[str, float] = {}  # by client: the same of its users

    def __len__(self) -> int:
        return self._length  # kept, as it is read several times for each new request: 1,000 clients take 1 ms to count

    def __iter__(self) -> Iterator[W]:
        for users in self._queues.values():
            for queue in users.values():
                yield from queue

    def count(self, client: str) -> int:
        """Returns the number of one client's items."""
        return sum(map(len, self._queues.get(client, {}).values()))

    def push(self, tenant: Tenant, item: W) -> None:
        """Adds an item to the tenant's queue: after the items of the same priority, before those of a higher one."""
        queue, own = self._queue_of(tenant), self._priority(item)
        later = sum(1 for _ in takewhile(lambda other: self._priority(other) > own, reversed(queue)))
        queue.insert(len(queue) - later, item)

    def put_back(self, tenant: Tenant, item: W) -> None:
        """Adds an item that was taken from the tenant's queue before its time, as the next one."""
        self._queue_of(tenant).appendleft(item)

    def _queue_of(self, tenant: Tenant) -> deque[W]:
        """Returns the tenant's queue, to which an item is added."""
        if tenant.client not in self._queues:
            self._clients.lift(tenant.client, self._queues, self._last_client)
            self._queues[tenant.client] = {}
            if self._clients.are_too_many:
                self._clients.keep(self._queues)
                self._last_user = {name: last for name, last in self._last_user.items() if name in self._queues}
        self._length += 1
        users = self._queues[tenant.client]
        if tenant not in users:
            self._users.lift(tenant, users, self._last_user.get(tenant.client, 0.0))
            users[tenant] = deque()
            if self._users.are_too_many:
                self._users.keep(chain.from_iterable(self._queues.values()))
        return users[tenant]

    def first(self, without: Collection[str] = ()) -> Tenant | None:
        """Returns the tenant whose first item is served next, if the clients in `without` have no turn; or None."""
        clients = [client for client in self._queues if client not in without] if without else self._queues
        if not clients:
            return None
        (client,) = self._clients.least(clients)
        return self._users.least(self._queues[client])[0]

    def first_of(self, is_ready: Callable[[W], bool]) -> Tenant | None:
        """Returns the tenant whose first item is served next, of those whose first item is ready; None without one."""
        for client in self._clients.least(self._queues, len(self._queues)):
            users = self._queues[client]
            for tenant in self._users.least(users, len(users)):
                if is_ready(users[tenant][0]):
                    return tenant
        return None

    def upcoming(self, count: int) -> list[W]:
        """Returns about the next `count` items: the first one of each client, then the second ones, and so on; a
        client's items alternate between its users in the same way."""
        clients = [self._by_turns(self._queues[name], count) for name in self._clients.least(self._queues, count)]
        return list(islice(_turns(clients), count))

    def _by_turns(self, users: dict[Tenant, deque[W]], count: int) -> Iterator[W]:
        return _turns([iter(users[tenant]) for tenant in self._users.least(users, count)])

    def newest_of_largest(self, beside: Tenant, *others: "FairQueue[W]") -> W | None:
        """Returns the newest item of the client with the most items for its weight, to be dropped for a new one of the
        client `beside`. None: that client would then have fewer items for its weight than `beside`. Items of `others`
        count as well, and are dropped of a client that has none in this queue."""
        queues = (self, *others)
        weights = {client: queue._weight(client) for queue in reversed(queues) for client in queue._queues}
        counts = {client: sum(queue.count(client) for queue in queues) for client in weights}
        if not counts:
            return None
        largest = max(counts, key=lambda client: counts[client] / weights[client])
        if (counts[largest] - 1) / weights[largest] < (counts.get(beside.client, 0) + 1) / beside.weight:
            return None
        users = next(queue._queues[largest] for queue in queues if largest in queue._queues)
        return max(users.values(), key=len)[-1]

    def _weight(self, client: str) -> float:
        """Returns the weight of a waiting client, as of one of its users."""
        return next(iter(self._queues[client])).weight

    def pop(self, tenant: Tenant) -> W:
        """Removes and returns the tenant's first item."""
        item = self._queues[tenant.client][tenant].popleft()
        self._length -= 1
        self._last_client = self._clients.of(tenant.client)
        self._last_user[tenant.client] = self._users.of(tenant)
        self._drop_empty(tenant)
        return item

    def remove(self, tenant: Tenant, item: W) -> None:
        """Removes an item at any place. Raises ValueError if it is not in the queue."""
        self._queues.get(tenant.client, {}).get(tenant, deque[W]()).remove(item)
        self._length -= 1
        self._drop_empty(tenant)

    def charge(self, tenant: Tenant, prompt_tokens: int, output_tokens: int) -> None:
        """Adds tokens that a tenant received to its counters."""
        self.charge_service(tenant, _PROMPT_WEIGHT * prompt_tokens + _OUTPUT_WEIGHT * output_tokens)

    def charge_service(self, tenant: Tenant, service: float) -> None:
        """Adds service that a tenant received to its counters, in the unit of this queue."""
        self._clients.charge(tenant.client, service / tenant.weight)
        self._users.charge(tenant, service)

    def _drop_empty(self, tenant: Tenant) -> None:
        users = self._queues[tenant.client]
        if not users[tenant]:
            del users[tenant]
        if not users:
            del self._queues[tenant.client]


def _turns(queues: Iterable[Iterator[W]]) -> Iterator[W]:
    """Yields the first items of all queues, then the second ones, and so on."""
    waiting = list(queues)
    while waiting:
        going = []
        for queue in waiting:
            for item in islice(queue, 1):
                yield item
                going.append(queue)
        waiting = going
