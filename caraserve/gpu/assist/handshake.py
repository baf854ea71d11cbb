"""The words by which device, CPU workers and a watchdog agree on an assisted prefill, and who gives up.

The device runs through all layers of a chunk without the host, so every hand-off of a chunk (a layer's group of
modules that read the same x) has words of its own, in a *book*; a chunk has a book to itself. In host memory, each word
on a line of its own:

    status   watchdog              the generation of the chunk that was given up
    x_flag   device                the chunk's generation, after x
    y_flag   last worker to finish the chunk's generation, after y
             device                the same, when no worker is asked, the layer having arrived for example: the wait
                                   falls through, and the kernels after it look further
             watchdog              the same, after `status`: nothing is to be added

All writers of a y_flag write the same value, so whoever comes late changes nothing, as long as the book, its x and its
y have not been used again; and they are not, until every worker that may be late has been seen idle or dead. For that
to be enough, a worker that finds an x_flag first says that it is busy, and then begins only if `status` is not the
generation. Who adds y looks at `status` after the wait: a chunk that was given up adds nothing from there on, and its
request does it again without help.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from caraserve.gpu.driver.api import has_reached, successor

_LINE = 64
LOOK_S = 0.001  # between two looks while a chunk is under way
_PATIENCE, _PATIENCE_S = 5.0, 0.002  # a hand-off may take so many times what was predicted, and so much more
_MOURNING_S = 0.003  # after a death the others have so long to redo its part


class SharedWords(Protocol):
    """Words of host memory that the device sees, by their offset."""

    def load(self, offset: int) -> int:
        """What was read after is at least as new."""

    def store(self, offset: int, value: int) -> None:
        """What was written before is seen first."""


def book_bytes(entries: int) -> int:
    """Bytes of a book."""
    return _LINE * (1 + 2 * entries)


@dataclass(frozen=True, slots=True)
class Entry:
    """The words of one hand-off."""

    x_flag: int
    y_flag: int


@dataclass(slots=True, eq=False)
class Book:
    """The words of one chunk; offsets. `generation` differs from that of every chunk that anybody still knows of."""

    offset: int
    entries: tuple[Entry, ...]
    generation: int = 0

    @property
    def status(self) -> int:
        return self.offset

    @classmethod
    def at(cls, offset: int, entries: int, generation: int = 0) -> "Book":
        """A book whose words begin at `offset` and all have the value `generation`."""
        lines = [offset + _LINE * (1 + 2 * index) for index in range(entries)]
        return cls(offset, tuple(Entry(line, line + _LINE) for line in lines), generation)


@dataclass(frozen=True, slots=True)
class Life:
    """A CPU worker at one moment. `incarnation`: a number of its own for each life; None: nobody is there."""

    worker: int
    incarnation: int | None
    is_idle: bool


class Books:
    """Who has which book. Bounds the chunks under way."""

    def __init__(self, words: SharedWords, books: Iterable[Book]) -> None:
        self._words = words
        self._free = list(books)
        self._quarantine: list[tuple[Book, set[tuple[int, int]]]] = []

    def take(self) -> Book | None:
        """A book for a chunk; None when there is none: the chunk then waits for its weights instead."""
        if not self._free:
            return None
        book = self._free.pop(0)
        # Numbers count round: words that have not been written for half a round would look as if they were ahead.
        for word in (book.status, *(flag for entry in book.entries for flag in (entry.x_flag, entry.y_flag))):
            self._words.store(word, book.generation)
        book.generation = successor(book.generation)
        return book

    def give_back(self, book: Book, lives: Sequence[Life] = ()) -> None:
        """The device is done with a book. `lives`: all workers, if the chunk was given up: one of them may be late."""
        late = {(life.worker, life.incarnation) for life in lives if life.incarnation is not None and not life.is_idle}
        if late:
            self._quarantine.append((book, late))
        else:
            self._free.append(book)

    def tidy(self, lives: Sequence[Life]) -> None:
        """Frees books that nobody can come late to any more."""
        busy = {(life.worker, life.incarnation) for life in lives if life.incarnation is not None and not life.is_idle}
        for book, late in list(self._quarantine):
            late &= busy
            if not late:
                self._quarantine.remove((book, late))
                self._free.append(book)


@dataclass(slots=True, eq=False)
class _Watched:
    book: Book
    expected_s: dict[int, float]  # of the hand-offs that workers were to do, in the device's order
    until_s: float = 0.0  # the hand-off under way may take
    at: int | None = None  # the hand-off under way
    lives: frozenset[tuple[int, int]] = frozenset()  # when it was first seen


class Watchdog:
    """Sees to it that no hand-off is waited for in vain. Any process that has the words can run it."""

    def __init__(self, words: SharedWords) -> None:
        self._words = words
        self._watched: list[_Watched] = []

    @property
    def is_needed(self) -> bool:
        """Whether `look` is to be called every `LOOK_S`, and when a worker dies."""
        return bool(self._watched)

    def watch(self, book: Book, expected_s: dict[int, float]) -> None:
        """A chunk is about to be launched. `expected_s`: what each of its entries should take."""
        self._watched.append(_Watched(book, expected_s))

    def forget(self, book: Book) -> bool:
        """The device is done with a chunk. Returns whether it was given up."""
        self._watched = [watched for watched in self._watched if watched.book is not book]
        return self._words.load(book.status) == book.generation

    def look(self, now_s: float, lives: Sequence[Life]) -> None:
        """Gives up chunks whose workers have died or take too long."""
        alive = frozenset((life.worker, life.incarnation) for life in lives if life.incarnation is not None)
        for watched in self._watched:
            if self._is_overdue(watched, now_s, alive):
                self.give_up(watched.book)

    def give_up(self, book: Book) -> None:
        """Lets the device through all that is left of a chunk; nothing is added any more."""
        self._words.store(book.status, book.generation)
        for entry in book.entries:
            self._words.store(entry.y_flag, book.generation)

    def _is_overdue(self, watched: _Watched, now_s: float, alive: frozenset[tuple[int, int]]) -> bool:
        waiting = self._waiting(watched)
        if waiting is None:
            return False
        if waiting != watched.at:
            watched.at, watched.lives = waiting, alive
            watched.until_s = now_s + _PATIENCE * watched.expected_s[waiting] + _PATIENCE_S
        if not watched.lives <= alive:
            watched.until_s = min(watched.until_s, now_s + _MOURNING_S)
        return not alive or now_s >= watched.until_s

    def _waiting(self, watched: _Watched) -> int | None:
        """The entry whose x is there and whose y is not."""
        for index in watched.expected_s:
            entry, generation = watched.book.entries[index], watched.book.generation
            if has_reached(self._words.load(entry.y_flag), generation):
                continue
            return index if has_reached(self._words.load(entry.x_flag), generation) else None
        return None
