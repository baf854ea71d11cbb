"""Counts routed and forwarded requests for GET /metrics."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from caraserve.telemetry.prometheus import Histogram, family, label_set

_DECISION_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01)


@dataclass(slots=True)
class RoutingMetrics:
    """Counts of one instance. Peers' names are labels: at most 64 live ones, and those that have left."""

    received: int = 0  # from other instances, and answered here
    moved: int = 0  # waiting requests that went to another instance instead
    retried: int = 0  # attempts after the first
    unquoted: int = 0  # queries for a quote that were not answered in time
    refused: dict[str, int] = field(default_factory=dict)  # reason → requests of others that this instance refused
    forwarded: dict[str, int] = field(default_factory=dict)  # instance → requests that it answered
    unreached: dict[str, int] = field(default_factory=dict)  # instance → attempts without an answer
    lost: dict[str, int] = field(default_factory=dict)  # instance → streams that broke off with it
    decisions: Histogram = field(default_factory=lambda: Histogram(_DECISION_S))
    quotes: Histogram = field(default_factory=lambda: Histogram(_DECISION_S))
    latencies: dict[str, tuple[float, float]] = field(default_factory=dict)  # Σ predicted and observed s per token

    def observe_latency(self, name: str, predicted_ms: float, observed_ms: float) -> None:
        """Records the time per token of one answer, waiting included. Infinite predictions are left out."""
        if predicted_ms < float("inf"):
            predicted_s, observed_s = self.latencies.get(name, (0.0, 0.0))
            self.latencies[name] = predicted_s + predicted_ms / 1000, observed_s + observed_ms / 1000

    def families(self, labels: str) -> Iterator[str]:
        """Yields the metric families for GET /metrics. `labels`: those of every sample."""

        def counter(name: str, text: str, label: str, counts: dict[str, int] | dict[str, float]) -> str:
            samples = [(f"{label_set({label: of})},{labels}", value) for of, value in counts.items()]
            return family(f"caraserve:{name}_total", "counter", text, samples)

        yield counter("forwarded_requests", "Requests that another instance has answered.", "instance", self.forwarded)
        yield counter("unreached_instances", "Attempts that no answer came of.", "instance", self.unreached)
        yield counter("lost_streams", "Streams that ended because their instance did.", "instance", self.lost)
        yield counter("refused_requests", "Requests of other instances that went back.", "reason", self.refused)
        text = "Requests of other instances that were answered here."
        yield family("caraserve:received_requests_total", "counter", text, [(labels, self.received)])
        text = "Waiting requests that went to another instance."
        yield family("caraserve:moved_requests_total", "counter", text, [(labels, self.moved)])
        text = "Attempts to have a request answered, after its first."
        yield family("caraserve:retried_requests_total", "counter", text, [(labels, self.retried)])
        text = "Quotes that did not come in time."
        yield family("caraserve:missed_quotes_total", "counter", text, [(labels, self.unquoted)])
        text = "Time that choosing an instance took, without questions to others."
        yield family("caraserve:routing_decision_seconds", "histogram", text, [(labels, self.decisions)])
        text = "Time that other instances' quotes took."
        yield family("caraserve:routing_quotes_seconds", "histogram", text, [(labels, self.quotes)])
        for index, kind in enumerate(("predicted", "observed")):
            sums = {name: both[index] for name, both in self.latencies.items()}
            text = f"Time per token of requests routed by this instance, {kind}, summed over requests."
            yield counter(f"routed_{kind}_seconds_per_token", text, "instance", sums)


def increment(counts: dict[str, int], key: str) -> None:
    """Adds 1 to the count of `key`."""
    counts[key] = counts.get(key, 0) + 1
