"""Which connection is closed for another one when there are as many as allowed. No I/O."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

_RESERVED = 16  # of so many places, one is not for the client that has all others
_SPARE = 64  # connections beyond the limit: they answer probes while all places are taken


class LimitedConnection(Protocol):
    """A connection of a client."""

    client: Hashable  # by its address

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request or for the rest of its headers."""

    @property
    def body_is_whole(self) -> bool:
        """Whether the body of its last request has arrived."""

    def give_up(self) -> None:
        """Closes the connection for another one."""


C = TypeVar("C", bound=LimitedConnection)


class ConnectionLimit(Generic[C]):
    """The open connections of one server, and the places of those that were used; there are `most` places.

    A connection takes a place with its first request that is not a probe. If none is free, another connection gives up
    its own and is closed: one that waits for its next request or, if none waits, one whose body is arriving; of these
    the oldest of the client that has the most, so that a client with many connections closes its own. If all others are
    being answered, the request is refused. One client has at most `most_of_client` places, so that requests of others
    are answered whatever it does. A request that is refused before its body has arrived holds no place while the rest
    arrives.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.most_of_client = most - most // _RESERVED
        self._open: set[C] = set()
        self._placed: set[C] = set()
        self._places: Counter[Hashable] = Counter()  # by client
        self._refused: _ByClient[C] = _ByClient()  # wait for the rest of a body
        self._unplaced: _ByClient[C] = _ByClient()  # wait for a request, and have no place
        self._idle: _ByClient[C] = _ByClient()  # wait for a request, and have a place
        self._receiving: _ByClient[C] = _ByClient()  # have a place, and a body arrives

    def add(self, one: C) -> bool:
        """Adds a new connection, for which another one may be closed. Returns False if there is no room."""
        if len(self._open) >= self.most + _SPARE:
            useless = self._refused.first() or _first_idle(self._unplaced)
            if not self._close(useless or _first_idle(self._idle) or self._longest_body()):
                return False
        self._open.add(one)
        self._unplaced.add(one)
        return True

    def request_began(self, one: C) -> None:
        """Notes that the headers of a request have arrived."""
        for waiting in (self._refused, self._unplaced, self._idle):
            waiting.discard(one)

    def give_place(self, one: C) -> bool:
        """Gives a connection a place for its request, perhaps by closing another. Returns False if there is none."""
        if one not in self._placed:
            if self._places[one.client] >= self.most_of_client:
                if not self._close(_first_idle(self._idle.of(one.client)) or self._longest_body(one.client)):
                    return False
            elif len(self._placed) >= self.most and not self._close(_first_idle(self._idle) or self._longest_body()):
                return False
            self._placed.add(one)
            self._places[one.client] += 1
        if not one.body_is_whole:
            self._receiving.add(one)
        return True

    def request_ended(self, one: C) -> None:
        """Notes that a request has been answered."""
        if one not in self._open:
            return
        self._receiving.discard(one)
        if not one.body_is_whole:
            self._leave_place(one)
            self._refused.add(one)
        else:
            (self._idle if one in self._placed else self._unplaced).add(one)

    def remove(self, one: C) -> None:
        """Removes a connection that is closed."""
        self.request_began(one)
        self._receiving.discard(one)
        self._open.discard(one)
        self._leave_place(one)

    def _leave_place(self, one: C) -> None:
        if one in self._placed:
            self._placed.remove(one)
            self._places[one.client] -= 1
            if not self._places[one.client]:
                del self._places[one.client]

    def _close(self, one: C | None) -> bool:
        if one is None:
            return False
        self.remove(one)
        one.give_up()
        return True

    def _longest_body(self, client: Hashable = None) -> C | None:
        """Returns the oldest connection whose body is arriving, of `client` or of that with the most."""
        receiving = self._receiving if client is None else self._receiving.of(client)
        while (one := next(iter(receiving), None)) is not None:
            if not one.body_is_whole:
                return one
            self._receiving.discard(one)  # it is being answered
        return None


class _ByClient(Generic[C]):
    """Connections in one state, grouped by client, in the order in which they are closed: those of the client with the
    most connections first, of one client the oldest first. All but the iteration takes constant time."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, dict[C, None]] = {}
        self._clients: dict[int, dict[Hashable, None]] = {}  # by the number of their connections
        self._largest = 0  # of these numbers

    def __iter__(self) -> Iterator[C]:
        for size in range(self._largest, 0, -1):
            for client in self._clients.get(size, ()):
                yield from self._groups[client]

    def of(self, client: Hashable) -> Iterable[C]:
        return self._groups.get(client, ())

    def first(self) -> C | None:
        return next(iter(self), None)

    def add(self, one: C) -> None:
        group = self._groups.setdefault(one.client, {})
        before = len(group)
        group[one] = None
        self._resize(one.client, before, len(group))

    def discard(self, one: C) -> None:
        group = self._groups.get(one.client, {})
        if one in group:
            del group[one]
            self._resize(one.client, len(group) + 1, len(group))

    def _resize(self, client: Hashable, before: int, size: int) -> None:
        """Notes that a client has one connection more or less."""
        if size == before:
            return
        if before:
            del self._clients[before][client]
            if not self._clients[before]:
                del self._clients[before]
        if size:
            self._clients.setdefault(size, {})[client] = None
        else:
            del self._groups[client]
        if size > self._largest or self._largest not in self._clients:
            self._largest = size


def _first_idle(connections: Iterable[C]) -> C | None:
    """Returns the first connection of which no request has arrived meanwhile."""
    return next((one for one in connections if one.is_idle), None)
