"""The memory of compiled grammars: one budget for those that are kept for later requests and those in use.

llguidance has no call for the size of a grammar. The process that checks one measures how many bytes the C library has
allocated for it. Over twelve kinds of grammars the resident memory of the server grew by 0.6 to 2.2 times as much, so
twice as much is counted. Answers add states to the lexer of a grammar, which all answers to it share: mostly 0.1 to 1
MB, but 290 MB in 200 answers to 300 counting expressions. `Growth` counts that.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from caraserve.tokenizer.child_process import allocated_bytes

MAX_BYTES = 256 << 20
MAX_CLIENT_BYTES = MAX_BYTES // 2  # of grammars that were compiled for one client
_LEAST_BYTES = 512 << 10  # for the text and the first states, of which most grammars have not many more
# Masks of at least this time lie between two looks at the process's memory, of which each takes 0.05 ms or more.
_LOOK_S = 0.05
_MOST_BYTES_PER_S = 64 << 20  # that masks may add; the most that was measured is 26 MB


class SizedGrammar(Protocol):
    """What the budget asks of a grammar."""

    @property
    def client(self) -> str:
        """For whom it was compiled."""

    @property
    def num_bytes(self) -> int:
        """How much it takes now."""


G = TypeVar("G", bound=SizedGrammar)


def counted_bytes(allocated_bytes: int) -> int:
    """Returns the bytes that count for a grammar for which so many were allocated."""
    return _LEAST_BYTES + 2 * allocated_bytes


class Growth:
    """What the answers to one grammar have added to it.

    What the process allocates or frees while masks of the grammar are computed counts as the grammar's, as far as masks
    that took so long can cause it. What other threads allocate for long meanwhile is counted too.
    """

    def __init__(
        self,
        allocated: Callable[[], int] = allocated_bytes,
        look_s: float = _LOOK_S,
        most_per_s: int = _MOST_BYTES_PER_S,
    ) -> None:
        """`most_per_s`: bytes that masks can add in a second."""
        self.num_bytes = 0
        self._allocated, self._look_s, self._most_per_s = allocated, look_s, most_per_s
        self._seen_bytes, self._mask_s = allocated(), 0.0

    def note_mask(self, seconds: float) -> bool:
        """Counts a mask that took so long. Returns whether `num_bytes` may have changed."""
        self._mask_s += seconds
        if self._mask_s < self._look_s:
            return False
        now_bytes, most_bytes = self._allocated(), int(self._mask_s * self._most_per_s)
        more_bytes = min(most_bytes, max(-most_bytes, now_bytes - self._seen_bytes))
        self.num_bytes = max(0, self.num_bytes + more_bytes)
        self._seen_bytes, self._mask_s = now_bytes, 0.0
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """What a grammar that is being compiled for a client will take."""

    client: str
    num_bytes: int


class GrammarBudget(Generic[G]):
    """The compiled grammars. Those that are kept are dropped for others, the least recently used first. For any thread:
    the one that computes masks ends the last use of a grammar, or makes room for the growth of one."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_client_bytes: int = MAX_CLIENT_BYTES) -> None:
        self._max_bytes, self._max_client_bytes = max_bytes, max_client_bytes
        self._kept: OrderedDict[bytes, G] = OrderedDict()
        self._alive: dict[int, weakref.ref[G]] = {}  # kept or in use
        self._reservations: set[Reservation] = set()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all grammars that are kept, in use, or being compiled."""
        return sum(grammar.num_bytes for grammar in self._grammars())

    def get(self, digest: bytes) -> G | None:
        """Returns a grammar that is kept; it is now the most recently used one."""
        with self._lock:
            if (grammar := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
            return grammar

    def make_room(self, client: str, num_bytes: int) -> bool:
        """Drops grammars until a client's grammars may take so much more. Returns whether they may."""
        with self._lock:
            return self._make_room(client, num_bytes)

    @contextmanager
    def reserve(self, client: str, num_bytes: int) -> Iterator[Reservation | None]:
        """Makes room for a grammar that the block compiles: it counts as soon as the block begins, until it is kept or
        the block ends. Yields None where there is no room."""
        reservation = Reservation(client, num_bytes)
        with self._lock:
            if has_room := self._make_room(client, num_bytes):
                self._reservations.add(reservation)
        try:
            yield reservation if has_room else None
        finally:
            with self._lock:
                self._reservations.discard(reservation)

    def keep(self, digest: bytes, grammar: G, reservation: Reservation) -> None:
        """Keeps a grammar, in place of its reservation and of the grammar of the same source if there is one."""
        key = id(grammar)
        with self._lock:
            self._reservations.discard(reservation)
            self._alive[key] = weakref.ref(grammar, lambda _: self._alive.pop(key, None))
            self._kept[digest] = grammar
            self._kept.move_to_end(digest)

    def _grammars(self) -> list[SizedGrammar]:
        found = [reference() for reference in list(self._alive.values())]
        return [*(grammar for grammar in found if grammar is not None), *self._reservations]

    def _make_room(self, client: str, num_bytes: int) -> bool:
        own = [digest for digest, grammar in self._kept.items() if grammar.client == client]
        own_bytes = sum(grammar.num_bytes for grammar in self._grammars() if grammar.client == client)
        fits = self._drop(own, own_bytes + num_bytes - self._max_client_bytes)
        return self._drop(list(self._kept), self.num_bytes + num_bytes - self._max_bytes) and fits

    def _drop(self, digests: list[bytes], surplus_bytes: int) -> bool:
        """Drops grammars until they have freed so much. Returns whether they have."""
        for digest in digests:
            if surplus_bytes <= 0:
                break
            grammar = self._kept.pop(digest)
            key, num_bytes = id(grammar), grammar.num_bytes
            del grammar
            if key not in self._alive:  # else it is in use
                surplus_bytes -= num_bytes
        return surplus_bytes <= 0
