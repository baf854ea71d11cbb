"""Measures how long it takes to plan and launch an iteration, and how long before the end of the one under way that has
to begin.

The earlier it begins, the more requests arrive too late for it, and wait for one more iteration. If it begins too late,
the device waits. It begins late enough for requests and, nearly always, early enough for the device. Where now and then
a launch takes far longer than usual, as on a machine that is busy with other things, no lead would help that is worth
having: iterations are planned as soon as possible then, until the device has waited for no more than 0.5 % of its time.
"""

from collections import deque
from collections.abc import Collection

_RECENT = 32  # of one kind that are kept
_LEAST = 4  # of one kind that must be known
_SHARE = 0.95  # of them that a lead would have been enough for, before its margin
_MARGIN = 1.25
_MOST_WAITED = 0.005  # of the device's time, over about …
_WAITS = 256  # … so many iterations
_SIZES_PER_DOUBLING = 2  # in which numbers of rows are told apart


class LaunchTimes:
    """Recent times that planning and launching took, by kind; by how much planning began later than it was due; and by
    how much iterations ended earlier than predicted. All in seconds."""

    def __init__(self) -> None:
        self._took_s: dict[tuple[bool, int], deque[float]] = {}  # by whether there are prompts, and the class of rows
        self._late_s: deque[float] = deque([0.0] * _RECENT, _RECENT)
        self._early_s = {False: deque[float](maxlen=_RECENT), True: deque[float](maxlen=_RECENT)}
        self._waited_s = self._passed_s = 0.0  # of the device, the older the less

    def lead_s(self, rows: int, *, has_prompts: bool, after_prompts: bool) -> float | None:
        """Returns how long before the predicted end of an iteration the one that follows it is to be planned. None: as
        soon as possible, because too little is known, or the device has waited too long. `rows`, `has_prompts`: of the
        one to plan; `after_prompts`: whether the one that ends has prompts."""
        if self._waited_s > _MOST_WAITED * self._passed_s:
            return None
        took_s, early_s = self._took(_kind(rows, has_prompts)), self._early_s[after_prompts]
        if len(took_s) < _LEAST or len(early_s) < _LEAST:
            return None
        return _MARGIN * (_enough(self._late_s) + _enough(took_s)) + _enough(early_s)

    def observe_wake(self, late_s: float) -> None:
        """Records by how much planning began later than it was due. 0 where it is not waited for: or a few large values
        would prevent that any is measured again."""
        self._late_s.append(late_s)

    def observe_launch(self, rows: int, took_s: float, *, has_prompts: bool) -> None:
        """Records the time from the begin of planning until the device had the launch."""
        self._took_s.setdefault(_kind(rows, has_prompts), deque(maxlen=_RECENT)).append(took_s)

    def observe_wait(self, waited_s: float, passed_s: float) -> None:
        """Records for how long the device waited for an iteration's launch, and the iteration's time with this wait."""
        self._waited_s += waited_s - self._waited_s / _WAITS
        self._passed_s += passed_s - self._passed_s / _WAITS

    def observe_end(self, early_s: float, *, has_prompts: bool) -> None:
        """Records by how much an iteration ended earlier than predicted; negative: later."""
        self._early_s[has_prompts].append(max(0.0, early_s))

    def _took(self, kind: tuple[bool, int]) -> Collection[float]:
        """Returns the times of a kind, or of the nearest one of which there are enough."""
        if len(took_s := self._took_s.get(kind, ())) >= _LEAST:
            return took_s
        known = [other for other, times in self._took_s.items() if other[0] == kind[0] and len(times) >= _LEAST]
        return self._took_s[min(known, key=lambda other: abs(other[1] - kind[1]))] if known else ()


def size_class(size: int, per_doubling: int) -> int:
    """Returns the class of a size of at least 1, of which there are so many from each power of two to the next."""
    return int((size**per_doubling).bit_length())


def _kind(rows: int, has_prompts: bool) -> tuple[bool, int]:
    return has_prompts, size_class(rows, _SIZES_PER_DOUBLING)


def _enough(values: Collection[float]) -> float:
    return sorted(values)[int(_SHARE * len(values))]
