"""Which connection is closed for another one when there are as many as allowed. No I/O."""

from collections.abc import Hashable, Iterable
from typing import Generic, Protocol, TypeVar

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
    its own and is closed: the one that has waited longest for its next request or, if none waits, of the client that is
    sending the most bodies the one whose body has been arriving longest. If all others are being answered, the request
    is refused. A request that is refused before its body has arrived holds no place while the rest arrives.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[C] = set()
        self._placed: set[C] = set()
        # The oldest is the first in each of these.
        self._refused: dict[C, None] = {}  # wait for the rest of a body
        self._unplaced: dict[C, None] = {}  # wait for a request, and have no place
        self._idle: dict[C, None] = {}  # wait for a request, and have a place
        self._receiving: dict[Hashable, dict[C, None]] = {}  # by client: have a place, and a body arrives

    def open(self, one: C) -> bool:
        """Adds a new connection, for which another one may be closed. Returns False if there is no room."""
        if len(self._open) >= self.most + _SPARE:
            useless = next(iter(self._refused), None) or _first_idle(self._unplaced)
            if not self._close(useless or _first_idle(self._idle) or self._longest_body()):
                return False
        self._open.add(one)
        self._unplaced[one] = None
        return True

    def began(self, one: C) -> None:
        """Notes that the headers of a request have arrived."""
        for waiting in (self._refused, self._unplaced, self._idle):
            waiting.pop(one, None)

    def place(self, one: C) -> bool:
        """Gives a connection a place for its request, for which another one may be closed. Returns False if there is
        none."""
        if one not in self._placed:
            if len(self._placed) >= self.most and not self._close(_first_idle(self._idle) or self._longest_body()):
                return False
            self._placed.add(one)
        if not one.body_is_whole:
            self._receiving.setdefault(one.client, {})[one] = None
        return True

    def ended(self, one: C) -> None:
        """Notes that a request has been answered."""
        if one not in self._open:
            return
        self._remove_body(one)
        if not one.body_is_whole:
            self._placed.discard(one)
            self._refused[one] = None
        else:
            (self._idle if one in self._placed else self._unplaced)[one] = None

    def lost(self, one: C) -> None:
        """Removes a connection that is closed."""
        self.began(one)
        self._remove_body(one)
        self._open.discard(one)
        self._placed.discard(one)

    def _close(self, one: C | None) -> bool:
        if one is None:
            return False
        self.lost(one)
        one.give_up()
        return True

    def _longest_body(self) -> C | None:
        while self._receiving:
            most = max(self._receiving.values(), key=len)
            one = next(iter(most))
            if not one.body_is_whole:
                return one
            self._remove_body(one)  # it is being answered
        return None

    def _remove_body(self, one: C) -> None:
        bodies = self._receiving.get(one.client, {})
        if one in bodies:
            del bodies[one]
            if not bodies:
                del self._receiving[one.client]


def _first_idle(connections: Iterable[C]) -> C | None:
    """Returns the first connection of which no request has arrived meanwhile."""
    return next((one for one in connections if one.is_idle), None)
