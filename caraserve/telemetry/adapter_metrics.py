"""Metrics by adapter: requests, time to first token and time per output token of the busiest adapters, and of all
others together under the name `other`.

A count never moves from one series to another, so rates stay right. An adapter without a series of its own counts in
`other`. After every 10,000 requests, adapters that had over 10 of them, and over twice as many as the idlest ones with
a series, take the places of these: the old series ends, the new one starts at zero.
"""

import heapq
from collections import Counter
from collections.abc import Iterator

from caraserve.core.request import Finish, FinishReason
from caraserve.telemetry.prometheus import Histogram, counter, histogram, label_set

OTHER = "other"
_MOST = 100
_WINDOW = 10_000  # requests between two choices of the busiest
_BUSIER = 2  # times as many requests, for a change that lasts
_FIRST_TOKEN_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25)

_FAMILIES = (
    counter("caraserve:adapter_requests_total", "Ended requests of the busiest adapters, and of all others."),
    histogram("caraserve:adapter_time_to_first_token_seconds", _FIRST_TOKEN_S, "Time to the first token, by adapter."),
    histogram(
        *("caraserve:adapter_time_per_output_token_seconds", _PER_TOKEN_S),
        "Mean time per token after the first, by adapter.",
    ),
)


class _AdapterSeries:
    """The series of one adapter. Their text is kept until a value changes: a hundred adapters have 2,000 lines."""

    def __init__(self, adapter: str, labels: str) -> None:
        self._labels = f"{label_set({'adapter_name': adapter})},{labels}"
        self._requests: dict[FinishReason, int] = {}
        self._first_token_s, self._per_token_s = Histogram(_FIRST_TOKEN_S), Histogram(_PER_TOKEN_S)
        self._texts: tuple[str, ...] = ()

    def observe(self, finish: Finish, first_token_s: float | None) -> None:
        self._texts = ()
        self._requests[finish.reason] = self._requests.get(finish.reason, 0) + 1
        if first_token_s is not None:
            self._first_token_s.observe(first_token_s)
        if finish.reason in ("stop", "length") and finish.completion_tokens > 1:
            self._per_token_s.observe(finish.phases.decode_ms / 1000 / (finish.completion_tokens - 1))

    def texts(self) -> tuple[str, ...]:
        """Returns the lines of each family."""
        if not self._texts:
            requests, first, each = (one.name for one in _FAMILIES)
            counts = [
                f'{requests}{{reason="{reason}",{self._labels}}} {count}\n' for reason, count in self._requests.items()
            ]
            self._texts = (
                "".join(counts),
                self._first_token_s.samples(first, self._labels),
                self._per_token_s.samples(each, self._labels),
            )
        return self._texts


class AdapterMetrics:
    """The series of the busiest adapters, and of the others."""

    def __init__(self, base_name: str, labels: str, most: int = _MOST, window: int = _WINDOW) -> None:
        """`base_name`: the name of the base model, which counts as an adapter. `labels`: of every series."""
        self._base_name, self._labels, self._most, self._window = base_name, labels, most, window
        self._own: dict[str, _AdapterSeries] = {}
        self._other = _AdapterSeries(OTHER, labels)
        self._recent: Counter[str] = Counter()  # requests since the last choice
        self._until_choice = window

    def observe(self, adapter: str | None, finish: Finish, first_token_s: float | None) -> None:
        """Counts an ended request. `first_token_s`: from its arrival; None: it had no token."""
        name = self._base_name if adapter is None else adapter
        series = self._own.get(name)
        if series is None and len(self._own) < self._most and name != OTHER:
            series = self._own[name] = _AdapterSeries(name, self._labels)
        (series or self._other).observe(finish, first_token_s)
        self._recent[name] += 1
        self._until_choice -= 1
        if self._until_choice == 0:
            self._choose()

    def families(self, labels: str) -> Iterator[str]:
        """Yields the families for GET /metrics."""
        texts = [series.texts() for series in (*self._own.values(), self._other)]
        for one, lines in zip(_FAMILIES, zip(*texts, strict=True), strict=True):
            yield one.heading() + "".join(lines)

    def _choose(self) -> None:
        """Gives the series of idle adapters to adapters that have been busier."""
        recent, self._recent, self._until_choice = self._recent, Counter(), self._window
        waiting = [name for name in recent if name not in self._own and name != OTHER]
        busiest = heapq.nlargest(self._most, waiting, key=recent.__getitem__)
        idlest = heapq.nsmallest(self._most, self._own, key=recent.__getitem__)
        for name, before in zip(busiest, idlest, strict=False):
            if recent[name] <= _BUSIER * recent[before] + self._window // 1000:
                return
            del self._own[before]
            self._own[name] = _AdapterSeries(name, self._labels)
