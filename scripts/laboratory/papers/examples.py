"""Figures computed without a server: popularity of adapters, and the papers' examples of routing and placement."""

from collections.abc import Mapping

import numpy as np

from caraserve.bench.report.plots import Panel, Series
from caraserve.bench.workload.popularity import parse_popularity
from caraserve.bench.workload.traces import included_trace
from caraserve.cluster.placement.loraserve import make_plan
from caraserve.cluster.placement.plan import AdapterDemand, Server
from caraserve.cluster.routing.cost import Arrival, Backlog, estimate
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.placement_plan import PlacementPlan
from scripts.laboratory.papers.figures import FigureData, PaperOptions, Value

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


_PLACEMENTS = ("s-lora-random", "s-lora-contiguous", "loraserve")
_SERVERS = tuple(Server(f"server {number + 1}", 10**12) for number in range(4))
# Eight adapters of four ranks; those of small ranks are asked for more. Operating points: tokens/s within the SLO.
_DEMAND = ((8, 900.0), (8, 500.0), (16, 300.0), (16, 300.0), (64, 200.0), (64, 100.0), (128, 150.0), (128, 50.0))
_POINTS = {8: 1000.0, 16: 900.0, 64: 600.0, 128: 400.0}


def placement_example(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Places eight adapters on four servers, and compares the busiest server with the mean, and mixed ranks."""
    adapters = [
        AdapterDemand(f"adapter {number + 1}", rank, rank << 20, tokens)
        for number, (rank, tokens) in enumerate(_DEMAND)
    ]
    values, loads, ranks = [], [], []
    for name in _PLACEMENTS:
        plan = make_plan(name, adapters, _SERVERS, _POINTS, 1)
        assert plan is not None
        load, hosted = _by_server(plan, adapters)
        loads.append(Series(name, tuple(load.values())))
        ranks.append(Series(name, tuple(float(len(each)) for each in hosted.values())))
        mean = sum(load.values()) / len(load)
        values.append(Value(f"{name}: busiest server ÷ mean", max(load.values()) / mean))
        values.append(Value(f"{name}: ranks on a server, mean", sum(map(len, hosted.values())) / len(hosted), ""))
    names = tuple(server.name for server in _SERVERS)
    panels = (
        Panel("Load", "share of a server's operating point", tuple(loads), categories=names),
        Panel("Different ranks", "ranks", tuple(ranks), categories=names),
    )
    setting = (
        "Eight adapters of ranks 8, 16, 64 and 128 on four servers; loads are relative to each rank's operating point."
    )
    return FigureData("simulated", (setting,), tuple(values), panels)


def _by_server(plan: PlacementPlan, adapters: list[AdapterDemand]) -> tuple[dict[str, float], dict[str, set[int]]]:
    """Returns each server's load relative to its operating points, and the ranks that it hosts."""
    load = {server.name: 0.0 for server in _SERVERS}
    hosted: dict[str, set[int]] = {server.name: set() for server in _SERVERS}
    for adapter in adapters:
        for share in plan.shares[adapter.name]:
            load[share.instance] += share.fraction * adapter.tokens_per_s / _POINTS[adapter.rank]
            hosted[share.instance].add(adapter.rank)
    return load, hosted
