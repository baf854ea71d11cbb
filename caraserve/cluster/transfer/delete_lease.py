"""When the last local bytes of an adapter may go: only against another holder's promise to keep its own. Pure.

Gossip alone is not enough: two instances, each seeing the other's copy in a stale view, would delete both.

    we ask ──► a holder promises to keep its bytes for `ttl_s` ──► we delete, while the promise surely still runs

A holder promises nothing while it waits for a promise itself, so two that would both delete refuse each other, and
both keep. Our reckoning of a promise starts when we ask, the holder's when it answers: ours ends first on any clocks
that run at one speed.
"""

from dataclasses import dataclass

_MARGIN = 0.8  # of a promise's time is used: clocks do not run at quite one speed


@dataclass(slots=True)
class _Asked:
    number: int
    until_s: float


class DeleteLeases:
    """The verified bytes that one instance has, by digest, and what it has promised about them.

    Promises outlive a restart: whoever restores a disk restores them too, with the time they still have.
    """

    def __init__(self) -> None:
        self._verified: set[str] = set()
        self._promised: dict[str, float] = {}  # digest → until when
        self._asked: dict[str, _Asked] = {}
        self._number = 0

    def has(self, digest: str) -> bool:
        """Whether all its bytes are here and were verified."""
        return digest in self._verified

    def verified(self, digest: str) -> None:
        """All bytes have arrived and have the right hash. Only now may they be announced."""
        self._verified.add(digest)

    def lost(self, digest: str) -> None:
        """The bytes turned out to be gone or wrong. A promise about them is broken, and nobody can help it."""
        self._verified.discard(digest)
        self._promised.pop(digest, None)
        self._asked.pop(digest, None)

    def promise(self, digest: str, ttl_s: float, now: float) -> bool:
        """Another instance asks us to keep our copy; whether we do."""
        if digest not in self._verified or digest in self._asked:
            return False
        self._promised[digest] = max(self._promised.get(digest, now), now + ttl_s)
        return True

    def ask(self, digest: str, ttl_s: float, now: float) -> int | None:
        """We should like to delete. The number to ask a holder with, or None if we may not even ask."""
        if digest not in self._verified or now < self._promised.get(digest, now):
            return None
        self._number += 1
        self._asked[digest] = _Asked(self._number, now + _MARGIN * ttl_s)
        return self._number

    def answered(self, digest: str, number: int, kept: bool, now: float) -> bool:
        """A holder's answer to the question of that number; whether we delete now, as we then must."""
        asked = self._asked.get(digest)
        if asked is None or asked.number != number:
            return False  # of an earlier question: its promise may have run out, and its giver have deleted on ours
        del self._asked[digest]
        if not kept or now >= asked.until_s:
            return False
        self._verified.discard(digest)
        self._promised.pop(digest, None)
        return True

    def give_up(self, digest: str) -> None:
        """No answer came, or it is wanted again after all; we may promise again."""
        self._asked.pop(digest, None)

    def promises(self, now: float) -> dict[str, float]:
        """Those that still run, with the seconds they have left: to be written to disk."""
        return {digest: until - now for digest, until in self._promised.items() if until > now}

    def restore(self, digests: set[str], promises: dict[str, float], now: float) -> None:
        """After a restart: what is on disk, and what was promised of it."""
        self._verified |= digests
        self._promised |= {digest: now + left for digest, left in promises.items() if digest in digests}
