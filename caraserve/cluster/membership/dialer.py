"""Which addresses to connect to, and when. Pure; time and chance are handed in.

Seeds that were never reached and instances taken for dead are tried again and again: that is how the halves of a
partition find each other. All waits are spread out, so that sixty instances that start at once do not all knock at the
same time; of two that learn of each other by update the lesser name dials first, and the other one only if that failed.
"""

from collections.abc import Iterable
from random import Random

from caraserve.cluster.membership.messages import Hello
from caraserve.cluster.membership.swim import MemberRecord, MemberState

_SPREAD_S = 0.2
_OTHER_SIDE_S = 1.0  # how long the greater name leaves the dialling to the lesser
_RETRY_S = 0.7
_REFUSED_S = 30.0


class Dialer:
    """The addresses known and when each is due."""

    def __init__(self, name: str, seeds: tuple[str, ...], rng: Random, now: float) -> None:
        self._name = name
        self.seeds = seeds
        self._rng = rng
        self._due = {address: now + _SPREAD_S * rng.random() for address in seeds}
        self._names: dict[str, str] = {}  # a seed's address → who answered there, which may call itself otherwise

    def due(
        self,
        known: Iterable[MemberRecord],
        reached: Iterable[tuple[str | None, Hello | None]],
        now: float,
    ) -> list[str]:
        """Addresses to dial now. `reached`: (dialled, peer) of every open link."""
        links = list(reached)
        names = {peer.name for _, peer in links if peer is not None} | {self._name}
        open_addresses = {dialled for dialled, _ in links}
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
        """Somebody answered at an address of ours."""
        if address is not None and address in self.seeds:
            self._names = {seed: who for seed, who in self._names.items() if seed in self.seeds} | {address: name}

    def is_us(self, address: str | None) -> None:
        """A seed is our own address, as when all are given the same list."""
        self.reached(address, self._name)

    def refused(self, address: str | None, now: float) -> None:
        """Not welcome there: tried again rarely."""
        if address in self._due:
            self._due[address] = now + _REFUSED_S * (0.5 + self._rng.random())
