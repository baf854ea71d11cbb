"""Pings that we send for others: whose they are, and when to say that no answer came. Pure."""

_FIRST = 2**40  # our own probes have numbers below
_MAX_OPEN = 256


class Relays:
    """The open ones, each for `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._open: dict[int, tuple[str, int, float]] = {}
        self._number = _FIRST

    def start(self, asker: str, asked: int, now: float) -> int | None:
        """The number to ping with, for a question of that number; None when too many are open."""
        if len(self._open) >= _MAX_OPEN:
            return None
        self._number += 1
        self._open[self._number] = (asker, asked, now + self._wait_s)
        return self._number

    def answered(self, number: int) -> tuple[str, int]:
        """Who asked, and by what number; nobody, if that was no ping for another or is over."""
        return self._open.pop(number, ("", 0, 0.0))[:2]

    def expired(self, now: float) -> list[tuple[str, int]]:
        """Those without an answer: who asked, and by what number."""
        numbers = [number for number, (_, _, until) in self._open.items() if now > until]
        return [self._open.pop(number)[:2] for number in numbers]
