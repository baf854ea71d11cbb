"""LoRAServe's example of placements: load and ranks of each server under three placements, by the server's own code."""

from collections.abc import Mapping

from caraserve.bench.papers.command import PaperOptions
from caraserve.bench.papers.result import FigureData, Panel, Series, Value
from caraserve.cluster.placement.loraserve import make_plan
from caraserve.cluster.placement.plan import AdapterDemand, Server
from caraserve.cluster.routing.placement_plan import PlacementPlan

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
