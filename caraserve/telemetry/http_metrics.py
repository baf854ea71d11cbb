"""Metrics of HTTP requests, with the names and labels of prometheus-fastapi-instrumentator, which vLLM's server uses.

Like there, a size is what the header Content-Length says, and 0 for a stream; a duration includes all of a stream.
"""

from collections.abc import Iterator

from caraserve.telemetry.prometheus import FamilyTable, counter, histogram, summary

_MANY_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
_FAMILIES = (
    counter("http_requests_total", "Requests by handler, method and class of status.", "handler", "method", "status"),
    summary("http_request_size_bytes", "Content-Length of each request, by handler.", "handler"),
    summary("http_response_size_bytes", "Content-Length of each response, by handler.", "handler"),
    histogram("http_request_duration_highr_seconds", _MANY_BOUNDS_S, "Time of all requests."),
    histogram(
        *("http_request_duration_seconds", (0.1, 0.5, 1), "Time of requests, by handler and method."),
        *("handler", "method"),
    ),
)


class HttpMetrics:
    """Counts requests by handler, method and class of status."""

    def __init__(self) -> None:
        self._table = FamilyTable(_FAMILIES)

    def observe(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Counts an ended request. `handler`: its route's pattern, and `method`: one of few, never a client's text."""
        self._table.add("http_requests_total", 1, handler, method, f"{status // 100}xx")
        histogram_of = self._table.histogram
        histogram_of("http_request_duration_seconds", handler, method).observe(seconds)
        histogram_of("http_request_duration_highr_seconds").observe(seconds)
        histogram_of("http_request_size_bytes", handler).observe(request_bytes)
        histogram_of("http_response_size_bytes", handler).observe(response_bytes)

    def families(self, labels: str) -> Iterator[str]:
        """Yields the families for GET /metrics. They have no `labels`, as dashboards for that library expect."""
        return self._table.render()
