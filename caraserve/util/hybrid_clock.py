"""A hybrid logical clock: times in ms since 1970, with 16 bits below that count within one ms."""

_COUNTER_BITS = 16


def hlc_of(wall_ms: int) -> int:
    """Returns the earliest hybrid time of a wall clock's ms since 1970."""
    return wall_ms << _COUNTER_BITS


def wall_ms_of(hlc: int) -> int:
    """Returns the ms since 1970 of a hybrid time."""
    return hlc >> _COUNTER_BITS


class HybridClock:
    """A clock that stays close to the wall clock, never repeats, and never falls behind an observed time."""

    def __init__(self) -> None:
        self._last = 0

    def next(self, wall_ms: int) -> int:
        """Returns a time later than all returned and observed before."""
        self._last = max(hlc_of(wall_ms), self._last + 1)
        return self._last

    def observe(self, hlc: int) -> None:
        """Records the time of another instance's entry."""
        self._last = max(self._last, hlc)
