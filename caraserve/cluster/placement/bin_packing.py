"""Assigns adapters to instances, by load and by bytes: LoRAServe's Algorithm 1, steps 3 and 4.

`loraserve.py` assigns every instance a rank first; instances of one rank are a class. A load is in units of servers:
tokens/s over the operating point. Three passes, hot adapters first. The first decides how much of an adapter's load
goes to which class. The second gives each adapter one home, so that no adapter is left out for other adapters' copies.
The third adds copies and levels the load among them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from caraserve.cluster.placement.cold_adapters import AdapterTable, ColdAdapters, Places, ServerLoad
from caraserve.cluster.routing.placement_plan import Integers, PlacementPlan, Shares, mixed, word

_LEVEL_PLACE = attrgetter("level", "place")
_LEAST = 0.01


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """The targets and limits of a plan."""

    copies: int = 2  # of each adapter, bytes allowing
    most_copies: int = 8
    hot_share: float = 0.25  # of a server's target: an adapter gets one copy for each such piece of its load
    least_fraction: float = 0.1  # of an equal part: the least that a copy serves, so that its adapter stays cached
    rounding: float = 1.25  # load ÷ target of a class's servers up to which its load stays in the class
    stay: float = 1.05  # utilisation ÷ target up to which an instance keeps the adapters that it had
    hysteresis: float = 0.15  # by which share the peak may exceed the plan's promise before a new plan is made
    strangers: float = 0.05  # by how much the share of load on instances for another rank may exceed the promise


class _Piece(NamedTuple):
    """A part of an adapter's load for one class."""

    adapter: int
    fraction: float
    rank: int
    is_home: bool  # the class where its first copy belongs
    load: float
    copies: int


class Packing:
    """Builds a plan: places adapters on the instances, and returns the result with `plan`."""

    def __init__(
        self, nodes: Sequence[ServerLoad], table: AdapterTable, previous: Shares, options: PlacementOptions
    ) -> None:
        """`nodes`: in order of their names. `previous`: shares of the table's adapters on these instances, which are
        kept if possible."""
        self._nodes, self._table, self._previous, self._options = nodes, table, previous, options
        self._classes: dict[int, list[ServerLoad]] = {}
        for node in nodes:
            self._classes.setdefault(node.rank, []).append(node)
        self._orders: dict[int, list[int]] = {}
        self._loads, self._ranks = table.loads.tolist(), table.ranks.tolist()
        self._num_bytes = table.num_bytes.tolist()
        self._target = math.fsum(self._loads) / math.fsum(node.server.speed for node in nodes)
        self._limit = self._target * options.stay
        self._parts: dict[int, dict[int, float]] = {}  # adapter → instance → fraction
        self._tails: list[ColdAdapters] = []  # adapters whose shares are equal
        self._adopted = False
        self._overfull: set[str] = set()

    def adopt(self) -> None:
        """Keeps the previous shares."""
        before, count = self._previous, len(self._nodes)
        loads = np.bincount(before.places, before.fractions * self._table.loads[before.owners], count)
        sizes = np.bincount(before.places, self._table.num_bytes[before.owners], count)  # exact up to 9 PB
        for node, load, num_bytes in zip(self._nodes, loads.tolist(), sizes.tolist(), strict=True):
            node.load, node.level, node.num_bytes = load, load / node.server.speed, int(num_bytes)
        self._overfull |= {node.server.name for node in self._nodes if node.num_bytes > node.server.capacity_bytes}
        self._adopted = True

    def fill(self, adapters: Integers) -> None:
        """Places these adapters, given in order of their names, beside those that have been placed already."""
        loads = self._table.loads[adapters]
        asked = adapters[np.argsort(-loads, kind="stable")][: np.count_nonzero(loads > 0)].tolist()
        unasked = adapters[~(loads > 0)]
        pieces, tails = self._pieces(asked), self._cold(unasked)
        homes: dict[int, ServerLoad] = {}
        self._settle(pieces, homes)
        together = _taken(tails, [tail.homes(self._limit) for tail in tails])
        if not together:
            self._settle(self._pieces(unasked.tolist()), homes)
        for piece in pieces:
            self._spread(piece, homes[piece.adapter])
        if together and _taken(tails, [tail.copies(self._limit, self._options.copies) for tail in tails]):
            self._tails += tails
            return
        if together:
            for tail in tails:
                homes |= tail.homes_one_by_one()
        for piece in self._pieces(unasked.tolist()):
            self._spread(piece, homes[piece.adapter])

    def _cold(self, unasked: Integers) -> list[ColdAdapters]:
        """Groups adapters without demand by the class whose instances shall hold them."""
        ranks = self._table.ranks[unasked]
        classes: dict[int, list[int]] = {}
        for rank in np.unique(ranks).tolist():
            classes.setdefault(self._order(rank)[0], []).append(rank)
        return [
            ColdAdapters(unasked[np.isin(ranks, of)], self._table, self._classes[rank], self._previous)
            for rank, of in classes.items()
        ]

    def _settle(self, pieces: Iterable[_Piece], homes: dict[int, ServerLoad]) -> None:
        for piece in pieces:
            if piece.is_home:
                homes[piece.adapter] = home = self._home(piece)
                home.take(piece.adapter, self._num_bytes[piece.adapter], piece.load)

    def plan(self, epoch: int, before: PlacementPlan | None) -> PlacementPlan:
        """Returns the plan of an epoch with all adapters that have been placed. `before`: the previous plan."""
        table, shares = self._table, self._shares()
        classes = {node.server.name: node.rank for node in self._nodes}
        peak = max(node.level for node in self._nodes) / self._target if self._target > 0 else 1.0
        # Without any load, adapters are weighed by their bytes, as when instances are divided among ranks.
        weights = table.loads if self._target > 0 else table.num_bytes
        away = np.array([*classes.values()])[shares.places] != table.ranks[shares.owners]
        strange = math.fsum((weights[shares.owners] * shares.fractions)[away].tolist())
        strange /= math.fsum(weights.tolist()) or 1.0
        overfull = tuple(sorted(self._overfull))
        if before and (shares, classes) == (before.shares, before.classes):  # comparing is faster than a digest
            return replace(before, epoch=epoch, peak=peak, strange=strange, overfull=overfull)
        return PlacementPlan.made(epoch, shares, classes, peak, strange, overfull)

    def _shares(self) -> Shares:
        """Returns the shares of all adapters that have been placed."""
        parts = [(self._previous.owners, self._previous.places, self._previous.fractions)] if self._adopted else []
        for tail in self._tails:
            on = tail.instances()
            fraction = 1.0 / on.shape[1]
            fraction /= math.fsum([fraction] * on.shape[1])
            parts.append((np.repeat(tail.adapters, on.shape[1]), on.ravel(), np.full(on.size, fraction)))
        rows = []
        for adapter, fractions in self._parts.items():
            total = math.fsum(fractions.values())
            ordered = sorted(fractions.items(), key=lambda part: (-part[1], part[0]))
            rows += [(adapter, place, fraction / total) for place, fraction in ordered]
        apart = np.array(rows).reshape(-1, 3)  # indices are exact in float64
        parts.append((apart[:, 0].astype(np.int64), apart[:, 1].astype(np.int64), apart[:, 2]))
        owners, places, shares = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(owners, kind="stable")
        names, instances = self._table.names, [node.server.name for node in self._nodes]
        return Shares(names, instances, np.bincount(owners, minlength=len(names)), places[order], shares[order])

    # --- step 4: what a class cannot carry ---

    def _pieces(self, ordered: Sequence[int]) -> list[_Piece]:
        """Divides every adapter's load among the classes. The adapters come in order of load, largest first."""
        room = {
            rank: math.fsum(node.server.speed * self._target - node.load for node in nodes)
            for rank, nodes in self._classes.items()
        }
        excess: dict[int, float] = {}  # by rank of adapters
        for rank in {self._ranks[adapter] for adapter in ordered}:
            wanted = math.fsum(self._loads[adapter] for adapter in ordered if self._ranks[adapter] == rank)
            borne = (self._options.rounding - 1) * self._target * len(self._classes.get(rank, ()))
            excess[rank] = max(0.0, wanted - max(0.0, room.get(rank, 0.0) + borne))
            room[rank] = room.get(rank, 0.0) - wanted + excess[rank]
        pieces = []
        for adapter in ordered:
            load, own_rank, stays = self._loads[adapter], self._ranks[adapter], 1.0
            own = own_rank in self._classes
            order = self._order(own_rank)
            # At most half of an adapter's load leaves its own class, so that the copies there stay in use.
            gives = min(load / 2 if own else load, excess[own_rank])
            if gives == 0:  # true for most adapters
                pieces.append(self._piece(adapter, stays, order[0], is_home=True))
                continue
            excess[own_rank] -= gives
            found: list[tuple[int, float]] = []
            for rank in order:
                taken = min(gives, room[rank]) if rank != own_rank else 0.0
                if taken > _LEAST * min(load, self._target):  # less does not justify the bytes of a copy
                    found.append((rank, taken / load))
                    room[rank] -= taken
                    gives -= taken
                    stays -= taken / load
            home = max(found, key=lambda part: part[1])[0] if found and not own else order[0]
            fractions = dict(found)
            fractions[home] = fractions.get(home, 0.0) + stays  # including load that no class has room for
            pieces += [self._piece(adapter, part, rank, is_home=rank == home) for rank, part in fractions.items()]
        return pieces

    def _piece(self, adapter: int, fraction: float, rank: int, *, is_home: bool) -> _Piece:
        load, options = self._loads[adapter] * fraction, self._options
        copies = options.copies if is_home else 1
        if load > 0:
            pieces = load / self._target
            most = max(options.most_copies, math.ceil(2 * pieces))  # an adapter may fill several servers
            copies = max(copies, min(most, math.ceil(pieces / options.hot_share)))
        return _Piece(adapter, fraction, rank, is_home, load, copies)

    def _order(self, rank: int) -> list[int]:
        """Orders the classes for adapters of a rank: its own, then higher ones upwards, then lower ones downwards."""
        if rank not in self._orders:
            self._orders[rank] = sorted(self._classes, key=lambda other: (other < rank, abs(other - rank)))
        return self._orders[rank]

    # --- step 3: one home for each ---

    def _home(self, piece: _Piece) -> ServerLoad:
        order = self._order(self._ranks[piece.adapter])
        for rank in dict.fromkeys((piece.rank, *order)):
            if best := self._best(piece, rank, 1):
                return best[0]
        # No instance has room, so the one with the most free bytes serves the adapter from disk or from a peer. The
        # plan lists it as overfull.
        node = max(self._nodes, key=lambda node: (node.server.capacity_bytes - node.num_bytes, node.server.name))
        self._overfull.add(node.server.name)
        return node

    def _best(self, piece: _Piece, rank: int, count: int) -> list[ServerLoad]:
        """Returns up to `count` nodes of a class with room for an adapter: first those that had it, while the target
        allows it, then the least loaded; for an adapter without load, in its own order by hash."""
        adapter, num_bytes = piece.adapter, self._num_bytes[piece.adapter]
        found = [node for node in self._kept(piece, rank) if node.fits(adapter, num_bytes)][:count]
        if len(found) == count:  # the usual case from the second plan on
            return found
        for node in self._in_order(piece, self._classes[rank]):
            if node not in found and node.fits(adapter, num_bytes):
                found.append(node)
                if len(found) == count:
                    break
        return found

    def _kept(self, piece: _Piece, rank: int) -> list[ServerLoad]:
        """Returns the nodes of a class that had an adapter and would stay below the limit with it."""
        load, limit = piece.load / piece.copies, self._limit
        nodes = [self._nodes[place] for place in self._previous.places_of(piece.adapter)]
        return self._in_order(piece, [n for n in nodes if n.rank == rank and n.level + load / n.server.speed <= limit])

    def _in_order(self, piece: _Piece, nodes: list[ServerLoad]) -> list[ServerLoad]:
        if len(nodes) < 2:
            return nodes
        if piece.load > 0:
            return sorted(nodes, key=_LEVEL_PLACE)
        point = word(self._table.names[piece.adapter])
        scores = {mixed(point, node.point): node for node in nodes}  # distinct, as the points are
        return [scores[score] for score in sorted(scores, reverse=True)]

    # --- copies ---

    def _spread(self, piece: _Piece, home: ServerLoad) -> None:
        """Divides a piece of an adapter's load among copies in its class, so that utilisations become equal."""
        adapter, load, copies = piece.adapter, self._loads[piece.adapter], piece.copies
        nodes = []
        if piece.is_home:
            home.take(adapter, self._num_bytes[adapter], -piece.load)
            nodes.append(home)
        nodes += [node for node in self._best(piece, piece.rank, copies) if node is not home]
        nodes = nodes[:copies] or [home]
        least = piece.fraction * self._options.least_fraction / len(nodes)
        rest = piece.fraction - least * len(nodes)
        if load > 0:
            levels = [(node.load + least * load, node.server.speed) for node in nodes]
            fractions = [least + part / load for part in _levelled(levels, rest * load)]
        else:
            fractions = [piece.fraction / len(nodes)] * len(nodes)
        for node, fraction in zip(nodes, fractions, strict=True):
            self._put(adapter, node, fraction)

    def _put(self, adapter: int, node: ServerLoad, fraction: float) -> None:
        node.take(adapter, self._num_bytes[adapter], fraction * self._loads[adapter])
        parts = self._parts.setdefault(adapter, {})
        parts[node.place] = parts.get(node.place, 0.0) + fraction


def _levelled(nodes: Sequence[tuple[float, float]], amount: float) -> list[float]:
    """Divides `amount` among nodes, given as (load, speed), so that the lowest utilisations rise to one level. Returns
    each node's part, in the order of `nodes`."""
    lowest = sorted(nodes, key=lambda node: node[0] / node[1])
    for count in range(1, len(lowest) + 1):
        loads, speeds = zip(*lowest[:count], strict=True)
        level = (math.fsum(loads) + amount) / math.fsum(speeds)
        if count == len(lowest) or level <= lowest[count][0] / lowest[count][1]:
            break
    return [max(0.0, level * speed - load) for load, speed in nodes]


def _taken(tails: Sequence[ColdAdapters], places: Sequence[Places]) -> bool:
    """Claims these places if every instance has bytes for its adapters. Returns whether it did."""
    fit = all(tail.fit(its) for tail, its in zip(tails, places, strict=True))
    if fit:
        for tail, its in zip(tails, places, strict=True):
            tail.take(its)
    return fit
