"""The memory of compiled grammars: one budget for those that are kept for later requests and those in use.

llguidance has no call for the size of a grammar. The process that checks one measures how many bytes the C library has
allocated for it. Over twelve kinds of grammars the resident memory of the server grew by 0.6 to 2.2 times as much, so
twice as much is counted. Answers add states to the lexer of a grammar, which all answers to it share: mostly 0.1 to 1
MB, but 290 MB in 200 answers to 300 counting expressions. `Growth` counts that.
"""

import threading
import time
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
# Masks of at least this time lie between two looks at the process's memory. A look takes 0.02 ms, but 20 ms where
# 150,000 small blocks have been freed between others.
_LOOK_S = 0.05
_QUICK_LOOK_S = 0.0002  # a look that takes longer would cost too much around every mask
_MOST_BYTES_PER_S = 128 << 20  # that masks may add: one where a table doubled added 3.4 MB in 33 ms
_SUSPECT_BYTES = 4 << 20  # above what ordinary grammars grow by, and below what has consequences


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

    Looking at the process's memory around every mask would cost as much as the masks, and around some of them would
    miss most: 1 % of the masks add 95 % of the bytes, where a table doubles. So at first all that the process allocates
    between two looks counts, as far as masks that took so long can cause it. That includes what others allocate, so it
    only tells which grammars may have grown: from `_SUSPECT_BYTES` on, only what is allocated during a mask counts.
    """

    def __init__(
        self,
        allocated: Callable[[], int] = allocated_bytes,
        look_s: float = _LOOK_S,
        most_per_s: int = _MOST_BYTES_PER_S,
        now: Callable[[], float] = time.thread_time,
    ) -> None:
        """`most_per_s`: bytes that masks can add in a second. `now`: times looks, without waits for the interpreter
        lock."""
        self.num_bytes = 0
        self._allocated, self._look_s, self._most_per_s, self._now = allocated, look_s, most_per_s, now
        self._look_took_s, self._mask_s = 0.0, 0.0
        self._seen_bytes = self._look()

    def before_mask(self) -> None:
        """Prepares for a mask, which `note_mask` ends."""
        if self._is_suspect and self._can_look_often:
            self._seen_bytes, self._mask_s = self._look(), 0.0

    def note_mask(self, seconds: float) -> bool:
        """Counts a mask that took so long. Returns whether `num_bytes` has changed."""
        self._mask_s += seconds
        was_suspect, before_bytes = self._is_suspect, self.num_bytes
        if self._mask_s < self._look_s and not (was_suspect and self._can_look_often):
            return False
        now_bytes, most_bytes = self._look(), int(self._mask_s * self._most_per_s)
        more_bytes = min(most_bytes, max(-most_bytes, now_bytes - self._seen_bytes))
        self.num_bytes = max(0, self.num_bytes + more_bytes)
        if not was_suspect and self._can_look_often:
            self.num_bytes = min(self.num_bytes, _SUSPECT_BYTES)
        self._seen_bytes, self._mask_s = now_bytes, 0.0
        return self.num_bytes != before_bytes

    @property
    def _is_suspect(self) -> bool:
        return self.num_bytes >= _SUSPECT_BYTES

    @property
    def _can_look_often(self) -> bool:
        return self._look_took_s <= _QUICK_LOOK_S

    def _look(self) -> int:
        began_s = self._now()
        num_bytes = self._allocated()
        self._look_took_s = self._now() - began_s
        return num_bytes


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
