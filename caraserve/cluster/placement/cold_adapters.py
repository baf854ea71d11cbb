"""Places adapters without demand, which are most of them, in one class at a time.

Such an adapter goes where it was before, or else to the first instances in its own order by hash. While there are bytes
for all, these choices do not depend on one another, so NumPy arrays make them all at once. Where bytes are short,
`bin_packing.py` places the adapters one by one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from caraserve.cluster.placement.plan import AdapterDemand, Server, Share, mixed, words

Places = np.ndarray[Any, np.dtype[np.integer[Any]]]
"""Instances of adapters, by index: a row for each adapter, its home first."""


@dataclass(slots=True, eq=False)
class ServerLoad:
    """A server and what has been placed on it so far."""

    server: Server
    point: int  # the hash of its name, for rendezvous hashing
    rank: int
    load: float = 0.0
    level: float = 0.0  # its utilisation: load over speed
    num_bytes: int = 0
    adapters: set[str] = field(default_factory=set)

    def fits(self, adapter: AdapterDemand) -> bool:
        """Whether the server has the adapter, or enough bytes left for it."""
        return adapter.name in self.adapters or self.num_bytes + adapter.num_bytes <= self.server.capacity_bytes

    def take(self, adapter: AdapterDemand, load: float) -> None:
        """Adds load of the adapter to the server, and the adapter's bytes the first time."""
        if adapter.name not in self.adapters:
            self.adapters.add(adapter.name)
            self.num_bytes += adapter.num_bytes
        self.load += load
        self.level = self.load / self.server.speed


class ColdAdapters:
    """Adapters without demand that belong on the instances of one class, which are in order of their names."""

    def __init__(
        self, adapters: Sequence[AdapterDemand], nodes: Sequence[ServerLoad], previous: Mapping[str, Sequence[Share]]
    ) -> None:
        self._adapters, self._nodes = adapters, nodes
        self._sizes = np.array([adapter.num_bytes for adapter in adapters], np.int64)
        points = np.array([node.point for node in nodes], np.uint64)
        scores = mixed(words(adapter.name for adapter in adapters)[:, None], points[None, :])
        self._by_score = np.argsort(scores, axis=1)[:, ::-1].astype(np.uint16)  # there may be millions of pairs
        columns = {node.server.name: column for column, node in enumerate(nodes)}
        had = [
            row * len(nodes) + columns[share.instance]
            for row, adapter in enumerate(adapters)
            for share in previous.get(adapter.name, ())
            if share.instance in columns
        ]
        self._had = np.zeros(scores.shape, np.bool_)
        self._had.reshape(-1)[had] = True
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

    def fit(self, places: Places) -> bool:
        """Whether every instance has bytes for these places. The first columns are the places claimed already."""
        new = places[:, self.places.shape[1] :]
        sizes = np.broadcast_to(self._sizes[:, None], new.shape)
        added = np.bincount(new.ravel(), sizes.ravel(), len(self._nodes))  # float64: exact up to 9 PB
        return all(
            node.num_bytes + more <= node.server.capacity_bytes
            for node, more in zip(self._nodes, added.tolist(), strict=True)
        )

    def take(self, places: Places) -> None:
        """Claims these places and adds the adapters' bytes to the instances."""
        new = places[:, self.places.shape[1] :]
        for column, node in enumerate(self._nodes):
            rows = np.flatnonzero((new == column).any(axis=1))
            node.num_bytes += int(self._sizes[rows].sum())
            node.adapters.update(self._adapters[row].name for row in rows.tolist())
        self.places = places

    def home_nodes(self) -> Iterator[tuple[str, ServerLoad]]:
        """Yields every adapter's name and home."""
        for adapter, at in zip(self._adapters, self.places[:, 0].tolist(), strict=True):
            yield adapter.name, self._nodes[at]

    def shares(self) -> Iterator[tuple[str, tuple[Share, ...]]]:
        """Yields every adapter's name and its shares, which are equal."""
        names, count = [node.server.name for node in self._nodes], self.places.shape[1]
        fraction = 1.0 / count
        fraction /= math.fsum([fraction] * count)
        made: dict[tuple[int, ...], tuple[Share, ...]] = {}  # few sets of instances for many adapters
        for adapter, row in zip(self._adapters, np.sort(self.places, axis=1).tolist(), strict=True):
            places = tuple(row)
            shares = made.get(places)
            if shares is None:
                shares = made[places] = tuple(Share(names[at], fraction) for at in places)
            yield adapter.name, shares
