"""The last minute of batches: how many prefill and decode tokens were computed for each adapter, by half seconds."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from caraserve.core.batch import ScheduledRow
from caraserve.engine.active_request import ActiveRequest

INTERVAL_S = 0.5
INTERVALS = 120  # that are kept: one minute
_MOST_NAMES = 64  # adapters counted by name in one interval; the others count together
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
        kept = [interval for interval in self._intervals if interval.number >= oldest]
        totals: dict[str | None, int] = {}
        for interval in kept:
            for name, (prefill, decode) in interval.tokens.items():
                totals[name] = totals.get(name, 0) + prefill + decode
        named = [name for name in totals if name != _OTHERS and may_show(name)]
        shown = sorted(named, key=lambda name: (-totals[name], name or ""))[:most]
        cells: dict[str | None, list[tuple[int, int, int]]] = {name: [] for name in (*shown, _OTHERS)}
        for interval in kept:
            at = min(interval.number - oldest, INTERVALS - 1)  # a batch may have ended after `now_s`
            all_prefill, all_decode = map(sum, zip(*interval.tokens.values(), strict=True))
            for name in shown:
                if (counts := interval.tokens.get(name)) is not None:
                    cells[name].append((at, counts[0], counts[1]))
                    all_prefill, all_decode = all_prefill - counts[0], all_decode - counts[1]
            if all_prefill or all_decode:
                cells[_OTHERS].append((at, all_prefill, all_decode))
        return [TimelineRow(name, tuple(cells[name])) for name in shown], TimelineRow(_OTHERS, tuple(cells[_OTHERS]))
