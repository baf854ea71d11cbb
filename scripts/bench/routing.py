"""What routing costs: one prediction, one candidate's estimate, one decision over a fleet, one plan.

    .venv/bin/python scripts/bench/routing.py

Times are the least mean of several rounds, on one core. The last line of stdout is one JSON document.
"""

import argparse
import json
import random
import timeit
from collections.abc import Callable

from caraserve.cluster.assignment import AdapterDemand, Server
from caraserve.cluster.cost import Arrival, Backlog, Links, Tier
from caraserve.cluster.perf_model import PerfModel
from caraserve.cluster.placement import place
from caraserve.cluster.policies import policy
from caraserve.cluster.router import Fleet, Instance, propose, settle

_RANKS = (8, 16, 32, 64)
_POINTS = {8: 2000.0, 16: 1900.0, 32: 1700.0, 64: 1300.0}  # tokens/s
_MODEL = PerfModel(0.004, 0.05, 20.0, True, 8.0, 0.06, 0.0002)


def _instance(name: str, chance: random.Random) -> Instance:
    counts = {rank: chance.randrange(8) for rank in _RANKS}
    requests, queued = sum(counts.values()), chance.randrange(3)
    ranks = tuple(counts.items())
    backlog = Backlog(max(0, requests - queued), min(queued, requests), ranks, 100 * queued, 3000 * queued, 1e6, 5e5)
    return Instance(name, _MODEL, backlog, Links(0.1, 20e6, 2e6, 1.0, 1e6))


def _us(action: Callable[[], object], number: int) -> float:
    return 1e6 * min(timeit.repeat(action, number=number, repeat=7)) / number


def main() -> None:
    """Measures, prints a line for each and one JSON document."""
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
    instances = tuple(_instance(server.name, chance) for server in servers)
    fleet = Fleet(servers[0].name, instances, tiers, plan)
    arrival = Arrival("adapter-0", demands[0].rank, 300, 200.0, demands[0].num_bytes, 60.0)
    times_us = {
        "decode prediction": _us(lambda: _MODEL.decode_ms(24, 768, 32), 20_000),
        "prefill prediction": _us(lambda: _MODEL.prefill_ms(512, 8192), 20_000),
        "estimate of a candidate": _us(lambda: fleet.instances[0].estimate(arrival, Tier.HOST, 1.0), 5_000),
        "plan, first": _us(lambda: place(demands, servers, _POINTS, 1), 1),
        "plan, kept": _us(lambda: place(again, servers, _POINTS, 2, plan), 1),
    }
    for name in ("rank-aware", "auto", "loraserve", "most-idle"):
        chosen = policy(name)
        times_us[f"decision, {name}"] = _us(
            lambda chosen=chosen: settle(propose(chosen, arrival, fleet, chance), {}),  # type: ignore[misc]
            500,
        )
    for what, time_us in times_us.items():
        print(f"{what}: {time_us:.2f} µs")
    rounded = {what: round(time_us, 3) for what, time_us in times_us.items()}
    print(json.dumps({"benchmark": "routing", "instances": args.instances, "adapters": args.adapters, "us": rounded}))


if __name__ == "__main__":
    main()
