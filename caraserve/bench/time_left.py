"""How long a benchmark of several runs takes, and how much of that is left."""

from collections.abc import Callable
from dataclasses import dataclass, field

_BETWEEN_S = 5.0  # of a run beside its load: adapters are requested, the machine becomes calm, last answers end


@dataclass(slots=True)
class TimeLeft:
    """Predicts the end of runs, first by their loads, then by the time that those before took.

    `load_s`: for how long a run sends requests, None if that depends on the answers. `start_s`: the time in which all
    servers start. `now`: a clock in seconds.
    """

    variants: int
    repeats: int
    load_s: float | None
    start_s: float
    now: Callable[[], float]
    _done: int = 0
    _begun_s: float = field(init=False)
    _ended_s: float = field(init=False)  # when the last of the runs that are done ended

    def __post_init__(self) -> None:
        self._begun_s = self._ended_s = self.now()

    def run_ended(self) -> None:
        """Counts a run as done."""
        self._done += 1
        self._ended_s = self.now()

    def outline(self) -> str:
        """Returns what will be run and how long it takes, for a line before the first run."""
        runs = self.variants * self.repeats
        text = f"{_counted(self.variants, 'mode')}, {_counted(self.repeats, 'repeat')}: {_counted(runs, 'run')}"
        if self.load_s is None:
            return f"{text}, as long as this machine needs; the time that is left is known after the first."
        expected = shown_duration(runs * (self.load_s + _BETWEEN_S) + self.start_s)
        return f"{text} of {shown_duration(self.load_s)} each, together about {expected}."

    def position(self) -> str:
        """Returns which run is under way, and how long all that are left take."""
        repeat, run = divmod(self._done, self.variants)
        left_s = self._left_s()
        text = f"run {run + 1} of {self.variants} in repeat {repeat + 1} of {self.repeats}"
        return text if left_s is None else f"{text}, about {shown_duration(left_s)} left"

    def _left_s(self) -> float | None:
        """Returns the rest of the run under way, none if it takes longer than expected, and all later runs."""
        if self._done:
            each_s, start_s = (self._ended_s - self._begun_s) / self._done, 0.0
        elif self.load_s is not None:
            each_s, start_s = self.load_s + _BETWEEN_S, self.start_s
        else:
            return None
        later = self.variants * self.repeats - self._done - 1
        return max(0.0, each_s - (self.now() - self._ended_s)) + start_s + later * each_s


def shown_duration(seconds: float) -> str:
    """Formats a time: `45 s`, `12 min`, `1 h 30 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
