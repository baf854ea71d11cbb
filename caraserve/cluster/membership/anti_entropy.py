"""Replicates maps: new entries are pushed to every peer, and missed ones are found by comparing copies. No I/O.

    mine: root ≠ theirs ──Compare(my 256 sums)──► peer ──Entries of the buckets that differ──► me, until nothing is new

Each side compares when it sees the other's root in a heartbeat or a sync. One `Compare` per map is pending at a time;
otherwise a joining instance would receive all entries from every peer.
"""

from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from random import Random

from caraserve.cluster.membership.messages import Compare, entry_batches
from caraserve.cluster.membership.messages import Entries as EntriesMessage
from caraserve.cluster.state.lww_map import BUCKETS, Entry
from caraserve.cluster.state.replicated_map import REGISTRY, ReplicatedState

_MAX_ANSWER = 6  # frames: takes a millisecond; the peer requests the rest with another `Compare`
_MAX_NEWS = 10_000  # entries that wait to be pushed; further ones are found by comparing
_NEWS_FRAMES = 4  # to each peer in one tick
_ANSWER_S = 2.0
_REFUSED_S = 30.0  # until entries that were refused are requested again


@dataclass(slots=True)
class _PendingCompare:
    number: int
    peer: str
    root: int  # the peer's, which differed
    until_s: float
    got: int = 0
    news: int = 0
    refused: int = 0


class AntiEntropy:
    """The pending compares of one instance, and the entries that it still has to push."""

    def __init__(self, state: ReplicatedState, rng: Random) -> None:
        self._state = state
        self._rng = rng
        self._number = 0
        self._open: dict[str, _PendingCompare] = {}  # by owner
        # (owner, peer) → a root of the peer's with nothing new for this instance, and until when that holds: without
        # end if no entry was refused, else for 30 s, because a refused entry may be valid once a clock is corrected.
        self._known: dict[tuple[str, str], tuple[int, float]] = {}
        self._news: dict[str, dict[str, Entry]] = {}  # by owner and key

    def push(self, owner: str, entries: list[Entry]) -> None:
        """Queues entries for every peer. What exceeds the queue is found later by comparing."""
        room = _MAX_NEWS - sum(map(len, self._news.values()))
        waiting = self._news.setdefault(owner, {})
        for entry in entries:
            if room > 0 or entry.key in waiting:
                room -= entry.key not in waiting
                waiting[entry.key] = entry

    def next_frames(self, wall_ms: int) -> list[EntriesMessage]:
        """Returns the next messages to send to every peer."""
        self.push(self._state.me, self._state.correct_own_entries(wall_ms))
        frames: list[EntriesMessage] = []
        for owner, waiting in self._news.items():
            pieces = islice(entry_batches(waiting.values()), _NEWS_FRAMES - len(frames))
            frames += [EntriesMessage(0, owner, piece, 0, is_complete=False) for piece in pieces]
        for frame in frames:
            for entry in frame.entries:
                del self._news[frame.owner][entry.key]
        self._news = {owner: waiting for owner, waiting in self._news.items() if waiting}
        return frames

    def on_root(self, peer: str, owner: str, root: int, now: float) -> Compare | None:
        """Handles a peer's root of a map. Returns a `Compare` to send if its copy may have what this one lacks."""
        lww_map = self._state.map_of(owner)
        known, until_s = self._known.get((owner, peer), (None, 0.0))
        if lww_map is None or lww_map.root == root or (known == root and now < until_s):
            self._state.agreed = self._state.agreed or owner == REGISTRY
            return None
        question = self._open.get(owner)
        if question is not None and now < question.until_s:
            return None
        return self._ask(peer, owner, root, now)

    def answer(self, question: Compare) -> list[EntriesMessage]:
        """Returns the entries of the buckets in which the sender of a `Compare` differs."""
        lww_map = self._state.map_of(question.owner)
        buckets = lww_map.differing(question.sums) if lww_map is not None else []
        # Starts at a random bucket, so that a bucket that the peer cannot merge does not keep back all others.
        start = self._rng.randrange(BUCKETS)
        buckets.sort(key=lambda index: (index - start) % BUCKETS)
        found = chain.from_iterable(map(lww_map.bucket, buckets)) if lww_map is not None else ()
        pieces = list(islice(entry_batches(found), _MAX_ANSWER + 1))
        whole = len(pieces) <= _MAX_ANSWER
        pieces = pieces[:_MAX_ANSWER]
        total = sum(map(len, pieces))
        return [EntriesMessage(question.number, question.owner, piece, total, whole) for piece in pieces or [()]]

    def on_entries(
        self, peer: str, message: EntriesMessage, now: float, wall_ms: int
    ) -> tuple[list[Entry], Compare | None]:
        """Merges entries from a peer. Returns those that were new, and the next `Compare` to send."""
        refused = self._state.refused
        news, answers = self._state.merge(message.owner, message.entries, wall_ms)
        self.push(message.owner, answers)
        question = self._open.get(message.owner)
        if question is None or (question.number, question.peer) != (message.number, peer):
            return news, None
        question.got += len(message.entries)
        question.news += len(news)
        question.refused += self._state.refused - refused
        question.until_s = now + _ANSWER_S
        if question.got < message.total:
            return news, None
        del self._open[message.owner]
        if question.news or not message.is_complete:
            lww_map = self._state.map_of(message.owner)
            differs = lww_map is not None and lww_map.root != question.root
            return news, self._ask(peer, message.owner, question.root, now) if differs else None
        self._known[message.owner, peer] = question.root, now + _REFUSED_S if question.refused else inf
        return news, None

    def lost(self, peer: str) -> None:
        """Forgets the pending compares with a peer whose connection ended, and its roots."""
        self._open = {owner: question for owner, question in self._open.items() if question.peer != peer}
        self._known = {key: root for key, root in self._known.items() if key[1] != peer}

    def _ask(self, peer: str, owner: str, root: int, now: float) -> Compare | None:
        lww_map = self._state.map_of(owner)
        if lww_map is None:
            return None
        self._number += 1
        self._open[owner] = _PendingCompare(self._number, peer, root, now + _ANSWER_S)
        return Compare(self._number, owner, lww_map.sums)
