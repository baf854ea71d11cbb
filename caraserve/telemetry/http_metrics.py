"""Metrics of HTTP requests, with the names and labels of prometheus-fastapi-instrumentator, which vLLM's server uses.

Like there, a size is what the header Content-Length says, and 0 for a stream; a duration includes all of a stream.
"""

from collections.abc import Iterator

from caraserve.telemetry.prometheus import Histogram, Sample, SizeSummary, family, label_set

_MANY_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
_FEW_BOUNDS_S = (0.1, 0.5, 1)


class HttpMetrics:
    """Counts requests by handler, method and class of status."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, int], int] = {}  # the last: the hundreds of the status
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._all_seconds = Histogram(_MANY_BOUNDS_S)
        self._sizes: dict[str, tuple[SizeSummary, SizeSummary]] = {}  # of requests and responses

    def observe(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Counts an ended request. `handler`: its route's pattern, and `method`: one of few, never a client's text."""
        key = handler, method, status // 100
        self._counts[key] = self._counts.get(key, 0) + 1
        if (by_handler := self._seconds.get(key[:2])) is None:
            by_handler = self._seconds[key[:2]] = Histogram(_FEW_BOUNDS_S)
        by_handler.observe(seconds)
        self._all_seconds.observe(seconds)
        if (sizes := self._sizes.get(handler)) is None:
            sizes = self._sizes[handler] = SizeSummary(), SizeSummary()
        sizes[0].observe(request_bytes)
        sizes[1].observe(response_bytes)

    def families(self, labels: str) -> Iterator[str]:
        """Yields the families for GET /metrics. They have no `labels`, as dashboards for that library expect."""
        counts: list[Sample] = [
            (label_set({"handler": handler, "method": method, "status": f"{hundreds}xx"}), count)
            for (handler, method, hundreds), count in self._counts.items()
        ]
        yield family("http_requests_total", "counter", "Requests by handler, method and class of status.", counts)
        for at, what in enumerate(("request", "response")):
            sizes = [(label_set({"handler": handler}), both[at]) for handler, both in self._sizes.items()]
            yield family(f"http_{what}_size_bytes", "summary", f"Content-Length of each {what}, by handler.", sizes)
        seconds = [
            (label_set({"handler": handler, "method": method}), one) for (handler, method), one in self._seconds.items()
        ]
        name = "http_request_duration"
        yield family(f"{name}_highr_seconds", "histogram", "Time of all requests.", [("", self._all_seconds)])
        yield family(f"{name}_seconds", "histogram", "Time of requests, by handler and method.", seconds)
