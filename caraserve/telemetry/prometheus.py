"""Prometheus' text format, 0.0.4, as strings. For `metrics.py`.

Routers scrape twenty times a second on the event loop's thread, so a page has to cost a fraction of a millisecond;
prometheus-client's own writer takes several. Each family has its `# TYPE` line: a router that finds none reads zeros.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def label_set(values: Mapping[str, str]) -> str:
    """`name="value"` pairs as they stand between a sample's braces."""
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items()])


def family(name: str, kind: str, text: str, samples: Sequence[tuple[str, float]]) -> str:
    """A whole family of one sample each per label set. A counter's `name` ends in `_total`."""
    lines = "".join([f"{name}{{{labels}}} {value}\n" for labels, value in samples])
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{lines}"


class Histogram:
    """Counts by bucket. A tenth of prometheus-client's time for an observation, as it takes no locks."""

    __slots__ = ("_bounds", "_counts", "_names", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._names = [*(f"{float(bound)}" for bound in bounds), "+Inf"]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1  # bucket i holds values in (bound[i-1], bound[i]]
        self._sum += value

    def samples(self, name: str, labels: str) -> str:
        """The lines of one label set: cumulative buckets, their sum and their count."""
        total, lines = 0, []
        for bound, count in zip(self._names, self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}\n')
        return f"{''.join(lines)}{name}_sum{{{labels}}} {self._sum}\n{name}_count{{{labels}}} {total}\n"


def histograms(name: str, text: str, by_labels: Sequence[tuple[str, Histogram]]) -> str:
    """A whole family of histograms."""
    samples = "".join([histogram.samples(name, labels) for labels, histogram in by_labels])
    return f"# HELP {name} {text}\n# TYPE {name} histogram\n{samples}"
