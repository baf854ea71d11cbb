"""Measures the time of routing: a prediction, a candidate's estimate, a decision over a cluster, a placement plan.

    .venv/bin/python scripts/bench/routing.py

Times are the least mean of many short rounds on one core, so that other programs have little effect. A decision is
timed twice: with views of earlier decisions, as between two heartbeats, and with new views. The last line of stdout is
one JSON document.
"""

import argparse
import json
import random
import timeit
from collections.abc import Callable
from dataclasses import replace
from math import inf

from caraserve.cluster.placement.loraserve import place
from caraserve.cluster.placement.plan import AdapterDemand, Server
from caraserve.cluster.routing.cost import Arrival, Backlog, LinkSpeeds, Tier
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.policies import policy
from caraserve.cluster.routing.router import Fleet, Instance, Policy, apply_quotes

_RANKS = (8, 16, 32, 64)
_POINTS = {8: 2000.0, 16: 1900.0, 32: 1700.0, 64: 1300.0}  # tokens/s
_MODEL = PerfModel(0.004, 0.05, 20.0, True, 8.0, 0.06, 0.0002)


def _instance(name: str, chance: random.Random) -> Instance:
    counts, queued = {rank: chance.randrange(8) for rank in _RANKS}, chance.randrange(3)
    ranks = sum(rank * count for rank, count in counts.items()), max(rank for rank, count in counts.items() if count)
    backlog = Backlog(sum(counts.values()), *ranks, 100 * queued, 3000 * queued, 1e6, 5e5)
    return Instance(name, _MODEL, backlog, LinkSpeeds(0.1, 20e6, 2e6, 1.0, 1e6))


def _us(action: Callable[[], object], number: int, rounds: int) -> float:
    return 1e6 * min(timeit.repeat(action, number=number, repeat=rounds)) / number


def _each_us(action: Callable[[Fleet], object], made: Callable[[], Fleet], number: int, rounds: int) -> float:
    """Returns the least mean time of a call that gets a new fleet each time; making the fleets is not timed."""
    least_s = inf
    for _ in range(rounds):
        fleets = [made() for _ in range(number)]
        least_s = min(least_s, timeit.timeit(lambda fleets=fleets: action(fleets.pop()), number=number))  # type: ignore[misc]
    return 1e6 * least_s / number


def main() -> None:
    """Measures all of them, and prints a line for each and one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=60)
    parser.add_argument("--adapters", type=int, default=40_000)
    args = parser.parse_args()
    chance = random.Random(0)
    demands = [
        AdapterDemand(f"adapter-{index}", rank := chance.choice(_RANKS), rank * 1_600_000, 4000 / (index + 1))
        for index in range(args.adapters)
    ]
    servers = [Server(f"instance-{index:02d}", 300 * 10**9) for index in range(args.instances)]
    plan = place(demands, servers, _POINTS, 1)
    again = [AdapterDemand(d.name, d.rank, d.num_bytes, d.tokens_per_s * chance.uniform(0.98, 1.02)) for d in demands]
    tiers = {"adapter-0": dict.fromkeys(plan.instances("adapter-0"), Tier.HOST)}
    instances = [_instance(server.name, chance) for server in servers]
    arrival = Arrival("adapter-0", demands[0].rank, 300, 200.0, demands[0].num_bytes, 60.0)

    def fresh() -> Fleet:
        return Fleet.of(servers[0].name, map(replace, instances), tiers, plan)

    fleet = fresh()
    times_us = {
        "decode prediction": _us(lambda: _MODEL.decode_ms(24, 768, 32), 500, 200),
        "prefill prediction": _us(lambda: _MODEL.prefill_ms(512, 8192), 500, 200),
        "estimate of a candidate": _us(lambda: instances[0].estimate(arrival, Tier.HOST, 1.0), 200, 200),
        "plan, first": _us(lambda: place(demands, servers, _POINTS, 1), 1, 7),
        "plan, kept": _us(lambda: place(again, servers, _POINTS, 2, plan), 1, 7),
    }
    for name, slo_ms, what in (
        ("rank-aware", 60.0, "all ranked"),
        ("auto", 60.0, "within its copies"),
        ("auto", 1.0, "past the SLO, all ranked"),
        ("loraserve", 60.0, "drawn"),
        ("most-idle", 60.0, "counted"),
    ):
        chosen, wanted = policy(name), replace(arrival, slo_ms=slo_ms)

        def decide(seen: Fleet, chosen: Policy = chosen, wanted: Arrival = wanted) -> object:
            return apply_quotes(chosen.propose(wanted, seen, chance), {})

        times_us[f"decision, {name}, {what}"] = _us(lambda decide=decide: decide(fleet), 20, 200)  # type: ignore[misc]
        times_us[f"decision, {name}, {what}, new views"] = _each_us(decide, fresh, 5, 200)
    for what, time_us in times_us.items():
        print(f"{what}: {time_us:.2f} µs")
    rounded = {what: round(time_us, 3) for what, time_us in times_us.items()}
    print(json.dumps({"benchmark": "routing", "instances": args.instances, "adapters": args.adapters, "us": rounded}))


if __name__ == "__main__":
    main()
