"""Figures computed from a load or from the cost function alone: popularity of adapters, the routing example."""

from collections.abc import Mapping

import numpy as np

from caraserve.bench.workload.popularity import parse_popularity
from caraserve.bench.workload.traces import included_trace
from caraserve.cluster.routing.cost import Arrival, Backlog, estimate
from caraserve.cluster.routing.perf_model import PerfModel
from scripts.laboratory.papers.command import PaperOptions
from scripts.laboratory.papers.result import FigureData, Panel, Series, Value

_ADAPTERS, _GROUPS, _SHOWN = (128, 256, 512), 200, 64
_DRAWS = 200_000
_RANKS = (8, 16, 32, 64, 128)
_SLO_MS = 36.0
_PREFILL = (10.0, 0.1, 0.0)  # ms, ms a token, ms a token and rank: the example has no prefill times, and needs none


def adapter_popularity(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Draws random groups of functions of the included trace, and returns each group's calls by function, most
    first: the mean over groups."""
    rng = np.random.default_rng(options.seed)
    series, values = [], []
    for adapters in _ADAPTERS:
        groups = (included_trace().group(rng, adapters).calls.sum(axis=1, dtype=np.int64) for _ in range(_GROUPS))
        shares = np.mean([np.sort(calls)[::-1] / calls.sum() for calls in groups], axis=0)
        shown = tuple(round(float(share), 6) for share in shares[:_SHOWN])
        series.append(Series(f"{adapters} adapters", shown, tuple(range(1, _SHOWN + 1))))
        top = 100 * float(shares[:10].sum())
        values.append(Value(f"{adapters} adapters: requests for the 10 most asked for", top, "%"))
    panel = Panel("Probability of an adapter", "share of requests", tuple(series), "adapter, most asked for first")
    setting = f"The mean of {_GROUPS} random groups of {included_trace().source}, one day."
    return FigureData("simulated", (setting,), tuple(values), (panel,))


def rank_popularity(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Draws requests of the synthetic loads and counts them by rank, at the start, half-way and at the end of a run."""
    panels, values = [], []
    at_share = np.linspace(0.0, 1.0, _DRAWS)
    for name in ("uniform", "shifting-skew", "exponential"):
        rng = np.random.default_rng(options.seed)
        drawn = parse_popularity(name).deal(rng, _DRAWS, at_share, _RANKS)
        parts = np.array_split(drawn, 10)
        shown = {"start": parts[0], "middle": parts[5], "end": parts[-1]}
        series = tuple(
            Series(when, tuple(float(np.mean(part == index)) for index in range(len(_RANKS))))
            for when, part in shown.items()
        )
        panels.append(Panel(name, "share of requests", series, "rank", categories=tuple(map(str, _RANKS))))
        values.append(Value(f"{name}: rank {_RANKS[-1]} at the start", 100 * (series[0].y[-1] or 0.0), "%"))
    return FigureData(
        "simulated", (f"{_DRAWS:,} requests, five adapters, one of each rank.",), tuple(values), tuple(panels)
    )


def routing_example(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Prices one request of rank 64 on both instances of the example, under both kernels, by Algorithm 1."""
    # Lines of Eq. 2 through the figure's two latencies: 24 requests of rank 32, and 16 of rank 64. The paper prints one
    # digit; with padding, 34.84 and 35.75 print alike and give the 36 ms on instance 2 that its text has.
    kernels = {"padded": _line(34.84, 35.75, padded=True), "unpadded": _line(35.3, 35.9, padded=False)}
    batches = (Backlog(24, 24 * 32, 32), Backlog(16, 16 * 64, 64))
    request = Arrival("adapter", rank=64, prompt_tokens=100, output_tokens=100.0, slo_ms=_SLO_MS)
    values, series = [], []
    for name, model in kernels.items():
        costs = [estimate(model, batch, request, 0.0, False, 0.0) for batch in batches]
        after_ms = [model.decode_ms(one.requests + 1, one.rank_sum + 64, 64) for one in batches]
        values.append(Value(f"{name}: instance chosen", 1.0 + costs.index(min(costs)), ""))
        series.append(Series(name, tuple(after_ms)))
    panel = Panel("Decode latency with the request", "ms", tuple(series), categories=("instance 1", "instance 2"))
    setting = f"Algorithm 1 with an SLO of {_SLO_MS:g} ms; lines of Eq. 2 through the latencies that the figure prints."
    return FigureData("simulated", (setting,), tuple(values), (panel,))


def _line(first_ms: float, second_ms: float, *, padded: bool) -> PerfModel:
    alpha_ms = (second_ms - first_ms) / (16 * 64 - 24 * 32)
    return PerfModel(alpha_ms, 0.0, first_ms - alpha_ms * 24 * 32, padded, *_PREFILL)
