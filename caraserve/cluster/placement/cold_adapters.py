"""Places adapters without demand, which are most of them, in one class at a time.

Such an adapter goes where it was before, or else to the first instances in its own order by hash. While there are bytes
for all, these choices do not depend on one another, so NumPy arrays make them all at once. Where bytes are short,
`bin_packing.py` places the adapters one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from caraserve.cluster.placement.plan import Server
from caraserve.cluster.routing.placement_plan import Floats, Integers, Shares, mixed, words

Places = np.ndarray[Any, np.dtype[np.integer[Any]]]
"""Instances of adapters, by index: a row for each adapter, its home first."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTable:
    """What a plan is made for: adapters in order of their names. An adapter's index here stands for it."""

    names: list[str]
    ranks: Integers  # by which instances are divided
    num_bytes: Integers
    loads: Floats  # in units of servers: tokens/s over the operating point


@dataclass(slots=True, eq=False)
class ServerLoad:
    """A server and what has been placed on it so far."""

    server: Server
    place: int  # its index in the order of names
    point: int  # the hash of its name, for rendezvous hashing
    rank: int
    load: float = 0.0
    level: float = 0.0  # its utilisation: load over speed
    num_bytes: int = 0
    adapters: set[int] = field(default_factory=set)  # those placed one by one

    def fits(self, adapter: int, num_bytes: int) -> bool:
        """Whether the server has the adapter, or enough bytes left for it."""
        return adapter in self.adapters or self.num_bytes + num_bytes <= self.server.capacity_bytes

    def take(self, adapter: int, num_bytes: int, load: float) -> None:
        """Adds load of the adapter to the server, and the adapter's bytes the first time."""
        if adapter not in self.adapters:
            self.adapters.add(adapter)
            self.num_bytes += num_bytes
        self.load += load
        self.level = self.load / self.server.speed


class ColdAdapters:
    """Adapters without demand that belong on the instances of one class, which are in order of their names."""

    def __init__(self, adapters: Integers, table: AdapterTable, nodes: Sequence[ServerLoad], previous: Shares) -> None:
        """`adapters`: indices into the table. `previous`: shares of the table's adapters; its instances are those that
        `ServerLoad.place` numbers."""
        self.adapters, self._nodes = adapters, nodes
        self._sizes = table.num_bytes[adapters]
        points = np.array([node.point for node in nodes], np.uint64)
        scores = mixed(words(table.names[adapter] for adapter in adapters.tolist())[:, None], points[None, :])
        self._by_score = np.argsort(scores, axis=1)[:, ::-1].astype(np.uint16)  # there may be millions of pairs
        columns = np.full(len(previous.instances), -1)
        columns[[node.place for node in nodes]] = np.arange(len(nodes))
        rows = np.full(len(table.names), -1)
        rows[adapters] = np.arange(len(adapters))
        had = rows[previous.owners], columns[previous.places]
        here = (had[0] >= 0) & (had[1] >= 0)
        self._had = np.zeros(scores.shape, np.bool_)
        self._had[had[0][here], had[1][here]] = True
        self.places: Places = np.empty((len(adapters), 0), np.intp)  # as far as they are taken

    def homes(self, limit: float) -> Places:
        """Chooses one place for each adapter, `[adapters, 1]`: the first in its order, but preferably an instance that
        had it and whose utilisation is at most `limit`."""
        stays = self._stays(limit)
        return np.take_along_axis(self._by_score, stays.argmax(axis=1, keepdims=True), axis=1)  # 0 where none stays

    def copies(self, limit: float, count: int) -> Places:
        """Chooses `count` places for each adapter, or all if there are fewer: its home, then instances that had it and
        whose utilisation is at most `limit`, then the others in its order."""
        first, home = np.argsort(~self._stays(limit), axis=1, kind="stable"), self.places[:, :1]
        order = np.take_along_axis(self._by_score, first, axis=1)
        others = order[order != home].reshape(len(order), -1)
        return np.hstack((home, others))[:, :count]

    def _stays(self, limit: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Returns `[adapters, instances]`, in each adapter's order: it was there, and utilisation is in the limit."""
        low = np.array([node.level <= limit for node in self._nodes])
        return np.take_along_axis(self._had & low, self._by_score, axis=1)

    def _added_bytes(self, places: Places) -> list[int]:
        """Returns the bytes that these places add to each instance. Their first columns are those claimed already."""
        new = places[:, self.places.shape[1] :]
        sizes = np.broadcast_to(self._sizes[:, None], new.shape)
        added = np.bincount(new.ravel(), sizes.ravel(), len(self._nodes))  # float64: exact up to 9 PB
        return [int(one) for one in added.tolist()]

    def fit(self, places: Places) -> bool:
        """Whether every instance has bytes for these places."""
        pairs = zip(self._nodes, self._added_bytes(places), strict=True)
        return all(node.num_bytes + more <= node.server.capacity_bytes for node, more in pairs)

    def take(self, places: Places) -> None:
        """Claims these places and adds the adapters' bytes to the instances."""
        for node, more in zip(self._nodes, self._added_bytes(places), strict=True):
            node.num_bytes += more
        self.places = places

    def homes_one_by_one(self) -> dict[int, ServerLoad]:
        """Returns the home of each adapter, for placing the copies one by one."""
        homes = {}
        for adapter, at in zip(self.adapters.tolist(), self.places[:, 0].tolist(), strict=True):
            homes[adapter] = node = self._nodes[at]
            node.adapters.add(adapter)
        return homes

    def instances(self) -> Integers:
        """Returns the instances of each adapter, `[adapters, copies]`, ascending, by `ServerLoad.place`."""
        return np.array([node.place for node in self._nodes])[np.sort(self.places, axis=1)]
