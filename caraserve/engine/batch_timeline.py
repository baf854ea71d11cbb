"""The last minute of batches: how many prefill and decode tokens were computed for each adapter, by half seconds."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from caraserve.core.batch import ScheduledRow
from caraserve.engine.active_request import ActiveRequest

INTERVAL_S = 0.5
INTERVALS = 120  # that are kept: one minute
_MOST_NAMES = 256  # adapters counted by name in one interval; the others count together
_OTHERS = ""  # no adapter's name


def position(time_s: float, now_s: float) -> float:
    """Returns the interval in which a time lies, with its fraction; negative for one before the oldest interval."""
    return time_s / INTERVAL_S - _oldest(now_s)


def _oldest(now_s: float) -> int:
    return int(now_s / INTERVAL_S) - INTERVALS + 1


@dataclass(slots=True)
class _Interval:
    """The tokens of one interval by adapter, None for the base model: [prefill, decode]."""

    number: int
    tokens: dict[str | None, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One adapter's tokens, as (interval, prefill, decode). Interval 0 is the oldest of `INTERVALS`, the last is the
    present. `adapter`: None for the base model."""

    adapter: str | None
    cells: tuple[tuple[int, int, int], ...]


class BatchTimeline:
    """Counts the tokens of all batches, side batches included. Recording takes 0.3 µs a row."""

    def __init__(self) -> None:
        self._intervals: deque[_Interval] = deque(maxlen=INTERVALS)

    def record(self, rows: Sequence[tuple[ActiveRequest, ScheduledRow]], ended_s: float) -> None:
        """Counts the rows of a batch that has ended at `ended_s` on the monotonic clock."""
        number = int(ended_s / INTERVAL_S)
        if not self._intervals or number > self._intervals[-1].number:
            self._intervals.append(_Interval(number))
        tokens = self._intervals[-1].tokens  # a side batch that ended earlier counts where it is processed
        for active, row in rows:
            inputs = active.request.inputs
            counts = tokens.get(inputs.adapter)
            if counts is None:
                name = inputs.adapter if len(tokens) < _MOST_NAMES else _OTHERS
                counts = tokens.setdefault(name, [0, 0])
            counts[row.start >= active.request.prompt_tokens] += row.count

    def rows(
        self, now_s: float, most: int, may_show: Callable[[str | None], bool]
    ) -> tuple[list[TimelineRow], TimelineRow]:
        """Returns the `most` adapters with the most tokens, in that order, and all others together. Adapters that
        `may_show` excludes are among the others."""
        oldest = _oldest(now_s)
        cells: dict[str | None, list[tuple[int, int, int]]] = {}
        for interval in self._intervals:
            if interval.number >= oldest:
                for name, (prefill, decode) in interval.tokens.items():
                    at = min(interval.number - oldest, INTERVALS - 1)  # a batch may have ended after `now_s`
                    cells.setdefault(name, []).append((at, prefill, decode))
        totals = {name: sum(prefill + decode for _, prefill, decode in row) for name, row in cells.items()}
        named = [name for name in cells if name != _OTHERS and may_show(name)]
        shown = sorted(named, key=lambda name: (-totals[name], name or ""))[:most]
        others: dict[int, tuple[int, int]] = {}
        for name in cells.keys() - set(shown):
            for at, prefill, decode in cells[name]:
                before = others.get(at, (0, 0))
                others[at] = before[0] + prefill, before[1] + decode
        rest = tuple((at, prefill, decode) for at, (prefill, decode) in sorted(others.items()))
        return [TimelineRow(name, tuple(cells[name])) for name in shown], TimelineRow(_OTHERS, rest)
