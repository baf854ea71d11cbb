"""Tests of a simulated cluster: policies route requests, each request ends once, and equal seeds give equal runs."""

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.bench.records import PlannedRequest, Workload
from caraserve.bench.report.plots import can_draw
from caraserve.bench.simulator.instance import MS
from caraserve.bench.simulator.machines import Machine, paper_machine, without_adapters
from caraserve.bench.simulator.simulation import Setting, Simulation
from caraserve.bench.simulator.sweep import Goal, SweepSpec, base, digest, find_all, summarize
from caraserve.bench.workload.arrivals import parse_arrivals
from caraserve.bench.workload.build import WorkloadSpec, build
from caraserve.bench.workload.lengths import parse_lengths
from caraserve.bench.workload.popularity import parse_popularity
from caraserve.cli.main import main
from caraserve.cluster.placement.plan import homes
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.policies import ROUTINGS
from caraserve.core.machine_profile import load
from tests.bench.simulator.reference import Plain, play

MACHINE = replace(paper_machine("padded"), max_running=32, kv_tokens=20_000)


def workload(rate: float = 30.0, duration_s: float = 15.0, seed: int = 0, adapters: int = 40) -> Workload:
    """Returns a workload of conversations with adapters of four ranks."""
    return build(
        WorkloadSpec(
            parse_lengths("lmsys"),
            parse_arrivals("poisson"),
            rate,
            parse_popularity("zipf:0.9"),
            adapters,
            (8, 16, 32, 64),
            duration_s=duration_s,
            seed=seed,
        )
    )


LOAD = workload(duration_s=8.0)


def run(
    routing: str, load: Workload = LOAD, machines: tuple[Machine, ...] = (MACHINE,) * 5, **more: object
) -> Simulation:
    setting = Setting(machines, routing, 60.0, first_plan_s=2.0, plan_s=4.0, **more)  # type: ignore[arg-type]
    simulation = Simulation(setting, load, log=[])
    simulation.run()
    return simulation


# --- against the plain reference ---


@settings(max_examples=60)
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
    """Returns deliveries from the log, and the times of first tokens and ends from the requests."""
    assert simulation._log is not None
    log = [event for event in simulation._log if event[1] == "delivery"]
    for request in simulation.requests:
        place = simulation.served_by[request.index]
        log += [(request.first, "first", request.index, place), (request.done, "done", request.index, place)]
    return log


@pytest.mark.parametrize("routing", sorted({*ROUTINGS} - {"dlora"}))  # what it moves leaves other marks where it was
def test_every_instance_serves_its_requests_like_the_plain_reference(routing: str) -> None:
    simulation = run(routing)
    for number, _ in enumerate(simulation.nodes):
        mine = [one for one in simulation.requests if simulation.served_by[one.index] == number]
        delivered = {index: time for time, what, index, _ in simulation._log or () if what == "delivery"}
        plain = [Plain(one.index, delivered[one.index], one.ready, one.rank, one.prompt, one.output) for one in mine]
        play(MACHINE, plain)
        assert [(one.first, one.done) for one in mine] == [(one.first, one.done) for one in plain]


# --- what holds of every run ---


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_request_ends_once_and_nothing_is_left(routing: str) -> None:
    simulation = run(routing)
    assert simulation.lost == []
    for node in simulation.nodes:
        node.batches.check()
    for request in simulation.requests:
        assert request.arrived < request.first <= request.done
    tokens = sum(request.output for request in simulation.requests)
    assert sum(node.batches.tokens for node in simulation.nodes) == tokens
    found = summarize(simulation, routing, 60.0)
    assert found.events > found.steps
    assert found.events > tokens


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_run_makes_no_reference_cycles_and_turns_garbage_collection_on_again(routing: str) -> None:
    simulation = Simulation(Setting((MACHINE,) * 5, routing, 60.0, first_plan_s=2.0, plan_s=4.0), LOAD)
    gc.collect()
    gc.freeze()  # what imports and other tests have made need not be searched again
    try:
        simulation.run()
        assert gc.isenabled()
        assert gc.collect() == 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("routing", ["auto", "dlora", "random", "rank-aware"])
def test_a_seed_gives_the_same_run_and_another_seed_another(routing: str) -> None:
    first, again, other = run(routing), run(routing), run(routing, seed=1)
    assert first._log == again._log
    assert digest(first) == digest(again)
    assert digest(first) != digest(other)


def test_requests_in_the_system_are_their_rate_times_their_time_in_it() -> None:
    simulation = run("auto")
    spans = [(one.arrived, one.done) for one in simulation.requests]
    start, end = 0, max(done for _, done in spans)
    changes = sorted([(arrived, 1) for arrived, _ in spans] + [(done, -1) for _, done in spans])
    area = count = before = 0
    for time, change in changes:
        area += count * (time - before)
        count, before = count + change, time
    mean_in_system = area / (end - start)
    rate = len(spans) / (end - start)
    mean_time = sum(done - arrived for arrived, done in spans) / len(spans)
    assert mean_in_system == pytest.approx(rate * mean_time, rel=1e-9)


def test_with_equal_ranks_padding_makes_no_difference() -> None:
    load = replace(LOAD, ranks=(32,) * len(LOAD.ranks))
    unpadded = replace(MACHINE, model=replace(MACHINE.model, padded=False))
    for routing in ("random", "most-idle", "rank-aware"):
        assert digest(run(routing, load)) == digest(run(routing, load, (unpadded,) * 5))


def test_requests_for_the_base_model_do_not_depend_on_the_cost_of_adapters() -> None:
    bare = Workload(tuple(replace(request, adapter=None) for request in LOAD.requests), ())
    assert digest(run("round-robin", bare)) == digest(run("round-robin", bare, (without_adapters(MACHINE),) * 5))


# --- adapters ---


def test_a_missing_adapter_is_fetched_once_and_the_request_waits_for_it() -> None:
    links = LinkSpeeds(fetch_latency_ms=100.0)
    requests = tuple(PlannedRequest(index, 0.001 * index, 0, 10, 5) for index in range(8))
    simulation = run("round-robin", Workload(requests, (64,)), (replace(MACHINE, links=links),) * 4, routers=1)
    lacking = [number for number, node in enumerate(simulation.nodes) if node.cache.fetches]
    assert len(lacking) == 2  # two have it from the start
    assert all(simulation.nodes[number].cache.fetches == 1 for number in lacking)
    for request in simulation.requests:
        waited_ms = (request.ready - request.arrived) / MS
        assert (waited_ms > 90) == (simulation.served_by[request.index] in lacking)


def test_a_full_host_cache_evicts_fetched_adapters_but_none_placed_at_the_start() -> None:
    small = replace(MACHINE, host_adapter_bytes=4 * 64 * MACHINE.rank_bytes)
    load = replace(workload(adapters=12), ranks=(64,) * 12)
    simulation = run("random", load, (small,) * 8, copies=3)
    assert sum(node.cache.evictions for node in simulation.nodes) > 0
    names = [f"adapter-{adapter:05}" for adapter in range(12)]
    for adapter, places in enumerate(homes(names, [node.name for node in simulation.nodes], 3).tolist()):
        assert all(adapter in simulation.nodes[place].cache.host for place in places)


def test_plans_follow_demand() -> None:
    hot = tuple(replace(request, adapter=3) for request in LOAD.requests)  # all of rank 64
    simulation = run("auto", replace(LOAD, requests=hot))
    plan = simulation._views.plan
    assert plan is not None
    assert set(plan.classes.values()) == {64}
    assert simulation.counts.plans > 1
    assert len(plan.instances("adapter-00003")) == 5


def test_moves_that_have_not_been_made_are_also_in_the_next_plan() -> None:
    simulation = Simulation(Setting((MACHINE,) * 5, "auto", 60.0), LOAD)
    planner = simulation._planner
    planner.begin()
    wanted = []
    for second in (1, 2):  # with the same demand
        for request in simulation.requests:
            planner.observe(request)
        planner.replan(1000 * second * MS)
        wanted.append([sorted(moves) for moves in planner._moves])
    assert wanted[0] == wanted[1]
    assert any(wanted[0])


# --- sweeps ---


def test_policies_do_not_depend_on_the_number_of_processes() -> None:
    study = SweepSpec((MACHINE,), 3, Setting((), "auto", 60.0), Goal(attainment=0.5), most_instances=12)
    load = workload(duration_s=6.0)
    alone = list(find_all(study, load, ("random", "auto"), 1))
    spread = list(find_all(study, load, ("random", "auto"), 2))
    assert alone == spread
    for one in alone:
        assert one.needed is not None
        sizes = {tried.instances: tried.attainment >= 0.5 for tried in one.tried}
        assert sizes[one.needed]
        assert one.needed == 1 or not sizes[one.needed - 1]


def test_a_goal_that_is_not_met_has_no_least_size() -> None:
    study = SweepSpec((MACHINE,), 2, Setting((), "auto", 1e-3), Goal(attainment=0.5), most_instances=4)
    (found,) = find_all(study, workload(duration_s=3.0), ("random",), 1)
    assert found.needed is None
    assert [tried.instances for tried in found.tried] == [2, 3, 4]


def test_the_slo_is_a_multiple_of_the_base_runs_time_per_token() -> None:
    study = SweepSpec((MACHINE,), 5, Setting((), "auto", float("inf")))
    bare = base(study, LOAD, 1.5)
    assert bare.slo_ms == pytest.approx(1.5 * bare.tpt_mean_ms)
    assert 0.9 < bare.attainment <= 1.0


# --- the command ---

QUICK = ("--instances", "3", "--adapters", "30", "--request-rate", "12", "--duration-s", "6", "--processes", "1")


def command(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Runs the command in a process with this seed of string hashes."""
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    told = [sys.executable, "-m", "caraserve", "bench", "cluster", *QUICK, *arguments]
    return subprocess.run(told, capture_output=True, text=True, timeout=120, check=False, env=env)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Runs the command in this process and returns the document it prints."""
    assert main(["bench", "cluster", *QUICK, *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def test_the_command_gives_the_same_figures_in_every_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    documents = []
    for hash_seed in ("1", "2"):
        folder = tmp_path_factory.mktemp("report")
        done = command("--save", str(folder), hash_seed=hash_seed)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout.splitlines()[-1])
        assert json.loads((folder / "cluster.json").read_text()) == document
        assert (folder / "latencies.png").exists() == can_draw()
        documents.append(document)
    assert documents[0] == documents[1]
    assert [one["routing"] for one in documents[0]["runs"]] == list(ROUTINGS)
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


def test_with_enough_copies_every_instance_has_every_adapter() -> None:
    simulation = run("dlora", copies=9)
    assert all(len(node.cache.host) == 40 and node.cache.fetches == 0 for node in simulation.nodes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--routing", "best"), "no routing policy"),
        (("--kernel", "measured"), "--profile"),
        (("--max-concurrency", "3"), "--max-concurrency"),
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
