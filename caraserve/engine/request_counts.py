"""Counts requests by the name that they were sent to: several names may stand for one adapter."""

from dataclasses import dataclass
from math import log

_HALF_LIFE_S = 60.0
_FORGOTTEN = 0.01  # of a rate: seven minutes after a single request
_PRUNE_EVERY = 4096  # requests


@dataclass(slots=True)
class _Count:
    unfinished: int = 0
    rate: float = 0.0  # requests, each weighted by half for every 60 s since it came
    rated_s: float = 0.0

    def rate_at(self, now_s: float) -> float:
        return float(self.rate * 0.5 ** ((now_s - self.rated_s) / _HALF_LIFE_S))


class RequestCounts:
    """The unfinished requests and the recent rate of each name; None stands for the base model. Names that had no
    request for some minutes are forgotten."""

    def __init__(self) -> None:
        self._counts: dict[str | None, _Count] = {}
        self._until_prune = _PRUNE_EVERY

    def begin(self, name: str | None, now_s: float) -> None:
        """Counts a request that has come."""
        self._until_prune -= 1
        if self._until_prune == 0:
            self._prune(now_s)
        count = self._counts.setdefault(name, _Count())
        count.unfinished += 1
        count.rate, count.rated_s = count.rate_at(now_s) + 1.0, now_s

    def end(self, name: str | None) -> None:
        """Counts the end of a request."""
        self._counts[name].unfinished -= 1

    def unfinished(self, name: str | None) -> int:
        """Returns the unfinished requests of a name."""
        return count.unfinished if (count := self._counts.get(name)) is not None else 0

    def per_minute(self, name: str | None, now_s: float) -> float:
        """Returns the mean of recent minutes, from the rate: at n requests a minute it settles at n / ln 2."""
        count = self._counts.get(name)
        return 0.0 if count is None else 60.0 / _HALF_LIFE_S * log(2) * count.rate_at(now_s)

    def _prune(self, now_s: float) -> None:
        self._until_prune = _PRUNE_EVERY
        idle = [name for name, one in self._counts.items() if not one.unfinished and one.rate_at(now_s) < _FORGOTTEN]
        for name in idle:
            del self._counts[name]
