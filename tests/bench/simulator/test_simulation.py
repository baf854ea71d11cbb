"""Tests of a simulated cluster: policies route requests, each request ends once, and equal seeds give equal runs."""

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.bench.records import PlannedRequest, Workload
from caraserve.bench.report.plots import can_draw
from caraserve.bench.simulator import simulation as simulation_module
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.fleet import make_fleet
from caraserve.bench.simulator.setting import ClusterSetting, SimulatedMachine, paper_machine, without_adapters
from caraserve.bench.simulator.simulation import Simulation
from caraserve.bench.simulator.sweep import (
    FleetSpec,
    Goal,
    base,
    digest,
    find_all,
    profiled_points,
    simulate,
    summarize,
)
from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.bench.workload.lengths import parse_lengths
from caraserve.bench.workload.popularity import parse_popularity
from caraserve.cli.main import main
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.placement_plan import homes
from caraserve.config import ROUTINGS
from caraserve.core.machine_profile import load
from caraserve.errors import ConfigError
from tests.bench.simulator.one_instance import check_empty
from tests.bench.simulator.reference import Plain, play

MACHINE = replace(paper_machine("padded"), max_running=32, kv_tokens=20_000)


def load_spec(rate: float = 30.0, duration_s: float = 15.0, adapters: int = 40) -> WorkloadSpec:
    """Returns the specification of conversations with adapters of four ranks."""
    return WorkloadSpec(
        parse_lengths("lmsys"),
        parse_arrivals("poisson"),
        rate,
        parse_popularity("zipf:0.9"),
        adapters,
        (8, 16, 32, 64),
        duration_s=duration_s,
    )


LOAD = build(load_spec(duration_s=8.0))


def run(
    routing: str, load: Workload = LOAD, machines: tuple[SimulatedMachine, ...] = (MACHINE,) * 5, **more: object
) -> Simulation:
    setting = ClusterSetting(machines, routing, 60.0, first_plan_s=2.0, plan_s=4.0, **more)  # type: ignore[arg-type]
    simulation = Simulation(setting, load)
    simulation.run()
    return simulation


# --- against the plain reference ---


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(-1, 3), st.integers(1, 60), st.integers(1, 25)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 2),  # each has every adapter: two copies are made
    st.sampled_from([0.0, 20.0]),
)
def test_round_robin_has_the_event_log_of_the_plain_reference(
    rows: list[tuple[int, int, int, int]], instances: int, load_ms: float
) -> None:
    rows.sort()
    ranks = (8, 16, 32, 64)
    planned = [PlannedRequest(i, at / 1000, None if a < 0 else a, p, o) for i, (at, a, p, o) in enumerate(rows)]
    machine = replace(
        MACHINE, links=LinkSpeeds(load_latency_ms=load_ms), max_running=3, kv_tokens=300, host_adapter_bytes=1 << 62
    )
    simulation = run("round-robin", Workload(tuple(planned), ranks), (machine,) * instances, routers=1)

    # In turn from the first on; the router serves its own without a hop. One link per instance loads in order.
    served: list[list[Plain]] = [[] for _ in range(instances)]
    there: list[dict[int, int]] = [{} for _ in range(instances)]
    free = [0] * instances
    for index, (at, adapter, prompt, output) in enumerate(rows):
        place = index % instances
        delivered = ready = at * MS + (round(0.6 * MS) if place else 0)
        if adapter >= 0:
            if adapter not in there[place]:
                there[place][adapter] = free[place] = max(delivered, free[place]) + round(load_ms * MS)
            ready = max(delivered, there[place][adapter])
        rank = 0 if adapter < 0 else ranks[adapter]
        served[place].append(Plain(index, delivered, ready, rank, prompt, output))
    expected = []
    for place, mine in enumerate(served):
        play(machine, mine)
        for one in mine:
            expected += [(one.delivered, "delivery", one.index, place), (one.first, "first", one.index, place)]
            expected.append((one.done, "done", one.index, place))
    assert sorted(events(simulation)) == sorted(expected)


def events(simulation: Simulation) -> list[tuple[int, str, int, int]]:
    """Returns the times of deliveries, first tokens and ends of all requests, with their instances."""
    return [
        (int(request[field]), kind, index, int(request["place"]))
        for index, request in enumerate(simulation.requests)
        for kind, field in (("delivery", "delivered"), ("first", "first"), ("done", "done"))
    ]


# --- what holds of every run ---


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_request_ends_once_as_by_the_plain_reference_and_nothing_is_left(routing: str) -> None:
    simulation = run(routing)
    requests = simulation.requests
    check_empty(simulation.fleet.batches)
    assert not simulation.fleet.caches.entries["uses"].any()
    times = [requests[name] for name in ("arrived", "delivered", "ready", "admitted", "first", "done")]
    assert all((before <= after).all() for before, after in pairwise(times))
    tokens = requests["output"].sum()
    assert simulation.fleet.batches.instances["tokens"].sum() == tokens
    found = summarize(simulation, routing, 60.0)
    assert found.lost == 0
    assert found.events > max(found.steps, tokens)
    for number in range(5 if routing != "dlora" else 0):  # what that moves leaves other marks where it was
        mine = requests[requests["place"] == number]
        rows = mine[["delivered", "ready", "rank", "prompt", "output"]].tolist()
        plain = [Plain(index, *row) for index, row in enumerate(rows)]
        play(MACHINE, plain)
        assert mine[["first", "done"]].tolist() == [(one.first, one.done) for one in plain]


@pytest.mark.parametrize("routing", ["auto", "dlora"])  # with plans, and with rebalancing
def test_a_run_makes_no_reference_cycles_and_turns_garbage_collection_on_again(routing: str) -> None:
    run(routing)  # loads the compiled code
    simulation = Simulation(ClusterSetting((MACHINE,) * 5, routing, 60.0, first_plan_s=2.0, plan_s=4.0), LOAD)
    gc.collect()
    simulation.run()
    assert gc.isenabled()
    assert gc.collect() == 0


@pytest.mark.parametrize("routing", ["auto", "dlora", "random", "rank-aware"])
def test_a_seed_gives_the_same_run_and_another_seed_another(routing: str) -> None:
    first, again, other = run(routing), run(routing), run(routing, seed=1)
    assert first.requests.tobytes() == again.requests.tobytes()
    assert digest(first) == digest(again)
    assert digest(first) != digest(other)


def test_a_fleet_has_no_more_routers_and_copies_than_instances() -> None:
    assert digest(run("random", routers=9)) == digest(run("random"))
    simulation = run("dlora", copies=9)
    assert simulation.fleet.caches.entries["in_host"].all()
    assert not simulation.fleet.batches.instances["fetches"].any()


def test_padding_needs_different_ranks_and_the_cost_of_adapters_requests_for_them() -> None:
    equal = replace(LOAD, ranks=(32,) * len(LOAD.ranks))
    unpadded = replace(MACHINE, model=replace(MACHINE.model, padded=False))
    for routing in ("random", "most-idle", "rank-aware"):
        assert digest(run(routing, equal)) == digest(run(routing, equal, (unpadded,) * 5))
    bare = Workload(tuple(replace(request, adapter=None) for request in LOAD.requests), ())
    assert digest(run("round-robin", bare)) == digest(run("round-robin", bare, (without_adapters(MACHINE),) * 5))


# --- adapters ---


def test_a_missing_adapter_is_fetched_once_and_the_request_waits_for_it() -> None:
    links = LinkSpeeds(fetch_latency_ms=100.0)
    requests = tuple(PlannedRequest(index, 0.001 * index, 0, 10, 5) for index in range(8))
    simulation = run("round-robin", Workload(requests, (64,)), (replace(MACHINE, links=links),) * 4, routers=1)
    fetches = simulation.fleet.batches.instances["fetches"]
    assert sorted(fetches) == [0, 0, 1, 1]  # two have it from the start
    waited_ms = (simulation.requests["ready"] - simulation.requests["arrived"]) / MS
    assert ((waited_ms > 90) == (fetches[simulation.requests["place"]] > 0)).all()


def test_a_full_host_cache_evicts_fetched_adapters_but_none_placed_at_the_start() -> None:
    small = replace(MACHINE, host_adapter_bytes=4 * 64 * MACHINE.rank_bytes)
    load = replace(build(load_spec(adapters=12)), ranks=(64,) * 12)
    simulation = run("random", load, (small,) * 8, copies=3)
    assert simulation.fleet.batches.instances["evictions"].sum() > 0
    in_host = simulation.fleet.caches.entries["in_host"]
    for adapter, places in enumerate(homes(simulation.adapters, simulation.names, 3)):
        assert in_host[adapter, places].all()


def test_plans_follow_demand() -> None:
    hot = tuple(replace(request, adapter=3) for request in LOAD.requests)  # all of rank 64
    simulation = run("auto", replace(LOAD, requests=hot))
    plan = simulation.planner.plan
    assert plan is not None
    assert set(plan.classes.values()) == {64}
    assert simulation.fleet.counts["plans"] > 1
    assert len(plan.instances("adapter-00003")) == 5


def test_moves_that_have_not_been_made_are_also_in_the_next_plan() -> None:
    simulation = Simulation(ClusterSetting((MACHINE,) * 5, "auto", 60.0), LOAD)
    fleet = simulation.planner.begin(simulation.fleet)
    wanted = []
    for second in (1, 2):  # with the same demand
        np.add.at(fleet.demand_tokens, simulation.requests["adapter"], simulation.requests["output"])
        fleet = simulation.planner.replan(fleet, 1000 * second * MS, np.random.default_rng(0))
        ends = fleet.batches.instances["moves_end"].tolist()
        wanted.append([sorted(fleet.moves[start:end].tolist()) for start, end in pairwise([0, *ends])])
    assert wanted[0] == wanted[1]
    assert any(wanted[0])


def test_arrays_that_are_full_grow_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = {routing: digest(run(routing)) for routing in ("auto", "dlora")}
    monkeypatch.setattr(simulation_module, "make_fleet", partial(make_fleet, routes=1, sent=1))
    for routing, expected in roomy.items():
        simulation = run(routing)
        assert len(simulation.fleet.routes) > 1
        assert digest(simulation) == expected


# --- sweeps ---


def test_policies_do_not_depend_on_the_number_of_processes() -> None:
    fleet = FleetSpec((MACHINE,), 3, ClusterSetting((), "auto", 60.0), Goal(attainment=0.5), most_instances=12)
    load = build(load_spec(duration_s=6.0))
    alone = list(find_all(fleet, load, ("random", "auto"), 1))
    spread = list(find_all(fleet, load, ("random", "auto"), 2))
    assert alone == spread
    for one in alone:
        assert one.needed is not None
        sizes = {tried.instances: tried.attainment >= 0.5 for tried in one.tried}
        assert sizes[one.needed]
        assert one.needed == 1 or not sizes[one.needed - 1]


def test_a_goal_that_is_not_met_has_no_least_size() -> None:
    fleet = FleetSpec((MACHINE,), 2, ClusterSetting((), "auto", 1e-3), Goal(attainment=0.5), most_instances=4)
    (found,) = find_all(fleet, build(load_spec(duration_s=3.0)), ("random",), 1)
    assert found.needed is None
    assert [tried.instances for tried in found.tried] == [2, 3, 4]


def test_the_slo_is_a_multiple_of_the_base_runs_time_per_token() -> None:
    fleet = FleetSpec((MACHINE,), 5, ClusterSetting((), "auto", float("inf")))
    bare = base(fleet, LOAD, 1.5)
    assert bare.slo_ms == pytest.approx(1.5 * bare.tpt_mean_ms)
    assert 0.9 < bare.attainment <= 1.0


def test_the_results_of_instances_add_up_to_those_of_the_run() -> None:
    found = summarize(run("rank-aware"), "rank-aware", 60.0)
    assert len(found.by_instance) == 5
    assert sum(one.requests for one in found.by_instance) == found.requests - found.lost
    assert np.mean([one.utilisation for one in found.by_instance]) == pytest.approx(found.utilisation)
    assert np.mean([one.adapters_held for one in found.by_instance]) == found.adapters_held_mean
    tails = [one.ttft_p95_ms for one in found.by_instance]
    assert min(tails) <= found.ttft_p95_ms <= max(tails)
    for one in found.by_instance:
        assert max(one.queued_p95_ms, one.prefill_p95_ms) <= one.ttft_p95_ms
        assert one.adapters_most >= one.adapters_held


def test_profiled_points_are_the_load_at_which_the_tail_meets_the_slo() -> None:
    points = profiled_points(MACHINE, LOAD, 1000.0)
    assert list(points) == [8, 16, 32, 64]
    assert points[8] > points[16] > points[32] > points[64] > 0
    assert profiled_points(MACHINE, LOAD, 5000.0)[8] > points[8]
    fleet = FleetSpec((MACHINE,), 3, ClusterSetting((), "auto", float("inf")), profiles_points=True)
    (found,) = simulate(fleet, load_spec(duration_s=3.0), ("loraserve",))
    assert found.policies[0].at_size.lost == 0
    with pytest.raises(ConfigError, match="all at once"):
        profiled_points(MACHINE, replace(LOAD, requests=LOAD.requests[:1] * 0), 1000.0)


@pytest.mark.parametrize("slow", [8, 32])
def test_plans_give_most_instances_to_the_rank_with_the_lowest_operating_point(slow: int) -> None:
    ranks = (8, 16, 32, 64)
    requests = tuple(PlannedRequest(index, 0.02 * index, index % 4, 10, 20) for index in range(80))  # of each as many
    points = {rank: 100.0 if rank == slow else 1e4 for rank in ranks}
    setting = ClusterSetting((MACHINE,) * 6, "loraserve", float("inf"), first_plan_s=1.0, operating_points=points)
    simulation = Simulation(setting, Workload(requests, ranks))
    simulation.run()
    plan = simulation.planner.plan
    assert plan is not None
    assert plan.epoch == 2  # made from the demand
    shares = {rank: plan.shares[name] for name, rank in zip(simulation.adapters, ranks, strict=True)}
    assert len(shares[slow]) == 5
    assert [share.fraction for share in shares[slow]] == pytest.approx([0.2] * 5, abs=0.02)
    assert all(len(shares[rank]) < 3 for rank in ranks if rank != slow)


def test_a_fleet_is_simulated_with_the_operating_points_of_its_setting() -> None:
    digests = set()
    for points in (None, {8: 1.0, 16: 1e4, 32: 1e4, 64: 1e4}):
        setting = ClusterSetting((), "auto", float("inf"), first_plan_s=0.2, operating_points=points)
        (found,) = simulate(FleetSpec((MACHINE,), 3, setting), load_spec(duration_s=3.0), ("loraserve",))
        digests.add(found.policies[0].at_size.digest)
    assert len(digests) == 2


# --- the papers' scheduler ---


def test_a_central_scheduler_sees_every_request_that_it_has_sent() -> None:
    requests = tuple(PlannedRequest(index, 0.0, 0, 10, 5) for index in range(15))  # all at once
    simulation = run("most-idle", Workload(requests, (8,)), scheduler="central")
    assert np.bincount(simulation.requests["place"]).tolist() == [3] * 5
    assert simulation.fleet.counts["hops"] == simulation.fleet.counts["quotes"] == 0


def test_under_a_central_scheduler_requests_wait_neither_for_a_hop_nor_for_an_adapter() -> None:
    links = LinkSpeeds(fetch_latency_ms=100.0)
    simulation = run("rank-aware", machines=(replace(MACHINE, links=links),) * 5, scheduler="central")
    assert simulation.fleet.caches.entries["in_host"].all()
    assert (simulation.requests["ready"] == simulation.requests["arrived"]).all()


def test_a_central_scheduler_takes_the_least_cost() -> None:
    """Toppings' Algorithm 1: with padded kernels ranks are kept apart as far as instances are idle."""
    requests = tuple(PlannedRequest(index, 0.2 * index, index % 2, 10, 400) for index in range(4))
    simulation = run("rank-aware", Workload(requests, (8, 128)), (MACHINE,) * 2, scheduler="central")
    first, second, third, fourth = simulation.requests["place"].tolist()
    assert (first, second) == (third, fourth)
    assert first != second


# --- the command ---

QUICK = ("--instances", "3", "--adapters", "30", "--request-rate", "12", "--duration-s", "6", "--processes", "1")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Runs the command in this process and returns the document it prints."""
    assert main(["bench", "cluster", *QUICK, *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def test_the_command_gives_the_same_figures_in_every_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    documents = []
    for hash_seed in ("1", "2"):
        folder = tmp_path_factory.mktemp("report")
        command = [sys.executable, "-m", "caraserve", "bench", "cluster", *QUICK, "--save", str(folder)]
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
        document = json.loads(done.stdout.splitlines()[-1])
        assert json.loads((folder / "cluster.json").read_text()) == document
        assert (folder / "latencies.png").exists() == can_draw()
        documents.append(document)
    assert documents[0] == documents[1]
    assert [one["routing"] for one in documents[0]["fleets"][0]["runs"]] == list(ROUTINGS)
    assert str(tmp_path_factory.getbasetemp()) not in json.dumps(documents[0])


@pytest.mark.parametrize("kernel", [None, "padded"])
def test_the_padded_kernel_is_optional_and_has_a_note_that_no_server_has_it(
    kernel: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    document = printed(capsys, "--routing", "random", *(("--kernel", kernel) if kernel else ()))
    assert [machine["padded"] for machine in document["machines"]] == [kernel == "padded"]
    assert any("no server here has that kernel" in note for note in document["notes"]) == (kernel == "padded")
    assert any("nothing of it was measured" in note for note in document["notes"])


def test_a_profiled_machine_has_the_profiles_times(capsys: pytest.CaptureFixture[str]) -> None:
    profile = Path(__file__).parents[2] / "profile.json"
    document = printed(capsys, "--routing", "random", "--profile", str(profile))
    assert document["machines"][0]["gamma_ms"] == load(profile).decode.gamma_ms
    assert any("disk and network are assumed" in note for note in document["notes"])


def test_sizes_and_rates_are_simulated_in_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("--instances", "2", "3", "--request-rate", "8", "12", "--scheduler", "central", "--plan-s", "2")
    document = printed(capsys, "--routing", "loraserve", "--padded-prompts", *sweep)
    found = [(one["instances"], one["rate"], one["requests"]) for one in document["fleets"]]
    assert found == [(2, 8, 48), (3, 8, 48), (2, 12, 72), (3, 12, 72)]
    assert document["machines"][0]["prefill_token_rank_max_ms"] > 0
    assert any("the papers' assumptions" in note for note in document["notes"])
    for one in document["fleets"]:
        assert len(one["runs"][0]["by_instance"]) == one["instances"]
        assert one["slo_ms"] == pytest.approx(1.5 * one["base"]["tpt_mean_ms"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--routing", "best"), "no routing policy"),
        (("--kernel", "measured"), "--profile"),
        (("--max-concurrency", "3"), "--max-concurrency"),
        (("--scheduler", "central", "--routers", "1"), "--routers"),
        (("--padded-prompts", "--profile", "x.json"), "--padded-prompts"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: int | str | None = main(["bench", "cluster", *QUICK, *arguments])
    except SystemExit as end:  # argparse's
        code = end.code
    assert code == 2
    assert words in capsys.readouterr().err
