"""Decides which addresses to connect to, and when. No I/O, no clock.

Seeds that were never reached and instances believed dead are dialled again and again; that is how the halves of a
partition find each other. All delays are randomised, so that sixty instances that start at once do not connect at the
same moment. Of two instances that learn of each other through others, the one with the lesser name dials first.
"""

from collections.abc import Iterable
from random import Random

from caraserve.cluster.membership.messages import Hello
from caraserve.cluster.membership.swim import MemberRecord, MemberState

_SPREAD_S = 0.2
_OTHER_SIDE_S = 1.0  # by which the instance with the greater name dials later
_RETRY_S = 0.7
_REFUSED_S = 30.0


class Dialer:
    """The known addresses and the time at which each is due."""

    def __init__(self, name: str, seeds: tuple[str, ...], rng: Random, now: float) -> None:
        self._name = name
        self.seeds = seeds
        self._rng = rng
        self._due = {address: now + _SPREAD_S * rng.random() for address in seeds}
        self._names: dict[str, str] = {}  # a seed's address → the name of the instance there

    def due(
        self, known: Iterable[MemberRecord], reached: Iterable[tuple[str | None, Hello | None]], now: float
    ) -> list[str]:
        """Returns the addresses to dial now. `reached`: (dialled address, peer) of every open connection."""
        connections = list(reached)
        names = {peer.name for _, peer in connections if peer is not None} | {self._name}
        open_addresses = {dialled for dialled, _ in connections}
        wanted = {address: now for address in self.seeds if self._names.get(address) not in names}
        for record in known:
            if record.name not in names and record.state != MemberState.LEFT:
                first = _OTHER_SIDE_S if record.name < self._name else 0.0
                wanted.setdefault(record.address, now + first + _SPREAD_S * self._rng.random())
        self._due = {address: self._due.get(address, first) for address, first in wanted.items()}
        chosen = [address for address, when in self._due.items() if when <= now and address not in open_addresses]
        for address in chosen:
            self._due[address] = now + _RETRY_S * (0.5 + self._rng.random())
        return chosen

    def reached(self, address: str | None, name: str) -> None:
        """Records the name of the instance that answers at an address."""
        if address is not None and address in self.seeds:
            self._names = {seed: who for seed, who in self._names.items() if seed in self.seeds} | {address: name}

    def is_us(self, address: str | None) -> None:
        """Records that a seed is this instance's own address, as when all instances get the same list."""
        self.reached(address, self._name)

    def refused(self, address: str | None, now: float) -> None:
        """Delays the next attempt at an address whose instance has refused this one."""
        if address in self._due:
            self._due[address] = now + _REFUSED_S * (0.5 + self._rng.random())
