"""Assigns adapters to instances, by load and by bytes: LoRAServe's Algorithm 1, steps 3 and 4.

`loraserve.py` assigns every instance a rank first; instances of one rank are a class. A load is in units of servers:
tokens/s over the operating point. Three passes, hot adapters first. The first decides how much of an adapter's load
goes to which class. The second gives each adapter one home, so that no adapter is left out for other adapters' copies.
The third adds copies and levels the load among them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from caraserve.cluster.placement.cold_adapters import ColdAdapters, Places, ServerLoad
from caraserve.cluster.placement.plan import AdapterDemand, PlacementPlan, Share, mixed, word

_NAME = attrgetter("name")
_LEVEL_NAME = attrgetter("level", "server.name")
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

    adapter: AdapterDemand
    fraction: float
    rank: int
    is_home: bool  # the class where its first copy belongs
    load: float
    copies: int


class Packing:
    """Builds a plan: places adapters on the instances, and returns the result with `plan`."""

    def __init__(
        self,
        nodes: Sequence[ServerLoad],
        loads: Mapping[str, float],
        previous: PlacementPlan | None,
        options: PlacementOptions,
    ) -> None:
        self._nodes, self._loads, self._previous, self._options = nodes, loads, previous, options
        self._by_name = {node.server.name: node for node in nodes}
        self._classes: dict[int, list[ServerLoad]] = {}
        for node in nodes:
            self._classes.setdefault(node.rank, []).append(node)
        self._orders: dict[int, list[int]] = {}
        self._target = math.fsum(loads.values()) / math.fsum(node.server.speed for node in nodes)
        self._limit = self._target * options.stay
        self._parts: dict[str, dict[str, float]] = {}  # adapter → instance → fraction
        self._even: dict[str, tuple[Share, ...]] = {}  # of adapters without demand
        self._adopted: list[str] = []
        self._placed: list[AdapterDemand] = []
        self._overfull: set[str] = set()

    def adopt(self, adapters: Iterable[AdapterDemand]) -> None:
        """Keeps the previous plan's shares of those of these adapters that it has."""
        before = self._previous.shares if self._previous else {}
        for adapter in adapters:
            if adapter.name in before:
                self._adopted.append(adapter.name)
                self._placed.append(adapter)
                load = self._loads[adapter.name]
                for share in before[adapter.name]:
                    node = self._by_name[share.instance]
                    node.num_bytes += adapter.num_bytes
                    node.load += share.fraction * load
        for node in self._nodes:
            node.level = node.load / node.server.speed
        self._overfull |= {node.server.name for node in self._nodes if node.num_bytes > node.server.capacity_bytes}

    def fill(self, adapters: Iterable[AdapterDemand]) -> None:
        """Places these adapters, beside those that have been placed already."""
        by_name = sorted(adapters, key=_NAME)
        asked = sorted((one for one in by_name if self._loads[one.name] > 0), key=lambda one: -self._loads[one.name])
        unasked = [one for one in by_name if not self._loads[one.name] > 0]
        self._placed += asked + unasked
        pieces, tails = self._pieces(asked), self._tails(unasked)
        homes: dict[str, ServerLoad] = {}
        self._settle(pieces, homes)
        together = _taken(tails, [tail.homes(self._limit) for tail in tails])
        if not together:
            self._settle(self._pieces(unasked), homes)
        for piece in pieces:
            self._spread(piece, homes[piece.adapter.name])
        if together and _taken(tails, [tail.copies(self._limit, self._options.copies) for tail in tails]):
            self._even.update(pair for tail in tails for pair in tail.shares())
            return
        if together:
            homes.update(pair for tail in tails for pair in tail.home_nodes())
        for piece in self._pieces(unasked):
            self._spread(piece, homes[piece.adapter.name])

    def _tails(self, unasked: Iterable[AdapterDemand]) -> list[ColdAdapters]:
        """Groups adapters without demand by the class whose instances shall hold them."""
        classes: dict[int, list[AdapterDemand]] = {}
        for adapter in unasked:
            classes.setdefault(self._order(adapter.rank)[0], []).append(adapter)
        before = self._previous.shares if self._previous else {}
        return [ColdAdapters(adapters, self._classes[rank], before) for rank, adapters in classes.items()]

    def _settle(self, pieces: Iterable[_Piece], homes: dict[str, ServerLoad]) -> None:
        for piece in pieces:
            if piece.is_home:
                homes[piece.adapter.name] = home = self._home(piece)
                home.take(piece.adapter, piece.load)

    def plan(self, epoch: int) -> PlacementPlan:
        """Returns the plan of an epoch with all adapters that have been placed."""
        shares = {name: self._previous.shares[name] for name in self._adopted} if self._previous else {}
        for name, parts in self._parts.items():
            total = math.fsum(parts.values())
            ordered = sorted(parts.items(), key=lambda part: (-part[1], part[0]))
            shares[name] = tuple(Share(instance, fraction / total) for instance, fraction in ordered)
        shares |= self._even
        classes = {node.server.name: node.rank for node in self._nodes}
        peak = max(node.level for node in self._nodes) / self._target if self._target > 0 else 1.0
        # Without any load, adapters are weighed by their bytes, as when instances are divided among ranks.
        weights = [(one, self._loads[one.name] if self._target > 0 else one.num_bytes) for one in self._placed]
        strange = math.fsum(
            weight * share.fraction
            for one, weight in weights
            if weight  # most adapters have none
            for share in shares[one.name]
            if classes[share.instance] != one.rank
        )
        strange /= math.fsum(weight for _, weight in weights) or 1.0
        overfull = tuple(sorted(self._overfull))
        before = self._previous
        if before and (shares, classes) == (before.shares, before.classes):  # comparing is faster than a digest
            return replace(before, epoch=epoch, peak=peak, strange=strange, overfull=overfull)
        return PlacementPlan.made(epoch, shares, classes, peak, strange, overfull)

    # --- step 4: what a class cannot carry ---

    def _pieces(self, ordered: Sequence[AdapterDemand]) -> list[_Piece]:
        """Divides every adapter's load among the classes. The adapters come in order of load, largest first."""
        room = {
            rank: math.fsum(node.server.speed * self._target - node.load for node in nodes)
            for rank, nodes in self._classes.items()
        }
        excess: dict[int, float] = {}  # by rank of adapters
        for rank in {adapter.rank for adapter in ordered}:
            wanted = math.fsum(self._loads[adapter.name] for adapter in ordered if adapter.rank == rank)
            borne = (self._options.rounding - 1) * self._target * len(self._classes.get(rank, ()))
            excess[rank] = max(0.0, wanted - max(0.0, room.get(rank, 0.0) + borne))
            room[rank] = room.get(rank, 0.0) - wanted + excess[rank]
        pieces = []
        for adapter in ordered:
            load, stays = self._loads[adapter.name], 1.0
            own = adapter.rank in self._classes
            order = self._order(adapter.rank)
            # At most half of an adapter's load leaves its own class, so that the copies there stay in use.
            gives = min(load / 2 if own else load, excess[adapter.rank])
            if gives == 0:  # true for most adapters
                pieces.append(self._piece(adapter, stays, order[0], is_home=True))
                continue
            excess[adapter.rank] -= gives
            found: list[tuple[int, float]] = []
            for rank in order:
                taken = min(gives, room[rank]) if rank != adapter.rank else 0.0
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

    def _piece(self, adapter: AdapterDemand, fraction: float, rank: int, *, is_home: bool) -> _Piece:
        load, options = self._loads[adapter.name] * fraction, self._options
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
        order = self._order(piece.adapter.rank)
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
        found = [node for node in self._kept(piece, rank) if node.fits(piece.adapter)][:count]
        if len(found) == count:  # the usual case from the second plan on
            return found
        for node in self._in_order(piece, self._classes[rank]):
            if node not in found and node.fits(piece.adapter):
                found.append(node)
                if len(found) == count:
                    break
        return found

    def _kept(self, piece: _Piece, rank: int) -> list[ServerLoad]:
        """Returns the nodes of a class that had an adapter and would stay below the limit with it."""
        shares = self._previous.shares.get(piece.adapter.name, ()) if self._previous else ()
        load, limit = piece.load / piece.copies, self._limit
        nodes = [self._by_name[share.instance] for share in shares if share.instance in self._by_name]
        return self._in_order(piece, [n for n in nodes if n.rank == rank and n.level + load / n.server.speed <= limit])

    def _in_order(self, piece: _Piece, nodes: list[ServerLoad]) -> list[ServerLoad]:
        if len(nodes) < 2:
            return nodes
        if piece.load > 0:
            return sorted(nodes, key=_LEVEL_NAME)
        point = word(piece.adapter.name)
        scores = {mixed(point, node.point): node for node in nodes}  # distinct, as the points are
        return [scores[score] for score in sorted(scores, reverse=True)]

    # --- copies ---

    def _spread(self, piece: _Piece, home: ServerLoad) -> None:
        """Divides a piece of an adapter's load among copies in its class, so that utilisations become equal."""
        adapter, load, copies = piece.adapter, self._loads[piece.adapter.name], piece.copies
        nodes = []
        if piece.is_home:
            home.take(adapter, -piece.load)
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

    def _put(self, adapter: AdapterDemand, node: ServerLoad, fraction: float) -> None:
        node.take(adapter, fraction * self._loads[adapter.name])
        parts = self._parts.setdefault(adapter.name, {})
        parts[node.server.name] = parts.get(node.server.name, 0.0) + fraction


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
