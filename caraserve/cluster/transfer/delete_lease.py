"""Decides when this instance may delete an adapter: only while another holder has promised to keep its own copy.

The replicated registry alone is not enough: two instances, each seeing the other's copy in a stale view, would delete
both.

    delete request ──► a holder promises to keep its bytes for `ttl_s` ──► this instance deletes within that time

A holder promises nothing while it waits for a promise itself, so two that would both delete refuse each other, and
both keep. The requesting instance counts the time from its request, the holder from its answer, so the time of the
former ends first on clocks of equal speed. No I/O, no clock.
"""

from collections.abc import Iterable

_USED_SHARE = 0.8  # of a promise's time: clocks run at slightly different speeds


class DeleteLeases:
    """The verified adapters of one instance, by digest, and its promises to keep them."""

    def __init__(self) -> None:
        self._verified: set[str] = set()
        self._promised: dict[str, float] = {}  # digest → until when
        self._asked: dict[str, tuple[int, float]] = {}  # digest → number of the delete request, until when
        self._number = 0

    def digests(self) -> list[str]:
        """Returns all verified digests."""
        return list(self._verified)

    def has(self, digest: str) -> bool:
        """Whether all bytes of an adapter are here and were verified."""
        return digest in self._verified

    def verified(self, digest: str) -> None:
        """Adds an adapter whose bytes have all arrived with the right hash. Only now may it be advertised."""
        self._verified.add(digest)

    def lost(self, digest: str) -> None:
        """Removes an adapter whose bytes turned out to be gone or wrong, and a promise to keep it with it."""
        self._verified.discard(digest)
        self._promised.pop(digest, None)
        self._asked.pop(digest, None)

    def promise(self, digest: str, ttl_s: float, now: float) -> bool:
        """Promises another instance to keep an adapter for `ttl_s`. Returns False if that cannot be promised."""
        if digest not in self._verified or digest in self._asked:
            return False
        self._promised[digest] = max(self._promised.get(digest, now), now + ttl_s)
        return True

    def start_delete(self, digest: str, ttl_s: float, now: float) -> int | None:
        """Starts a delete request. Returns its number, or None while this instance has promised to keep the adapter."""
        if digest not in self._verified or now < self._promised.get(digest, now):
            return None
        self._number += 1
        self._asked[digest] = self._number, now + _USED_SHARE * ttl_s
        return self._number

    def finish_delete(self, digest: str, number: int, kept: bool, now: float) -> bool:
        """Takes a holder's answer to a delete request. Returns True if the adapter must be deleted now."""
        asked, until_s = self._asked.get(digest, (None, now))
        if asked != number:
            return False  # to an earlier request, whose promise may have ended
        del self._asked[digest]
        if not kept or now >= until_s:
            return False
        self._verified.discard(digest)
        self._promised.pop(digest, None)
        return True

    def restore(self, digests: Iterable[str], ttl_s: float, now: float) -> None:
        """Restores the digests on disk after a start, each promised for `ttl_s`."""
        for digest in digests:
            self._verified.add(digest)
            self._promised[digest] = now + ttl_s
