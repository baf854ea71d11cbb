"""Tests that simulated routers see what the server's rules say: late heartbeats, plus what each has sent since."""

from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.bench.records import Workload
from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.fleet import with_room
from caraserve.bench.simulator.setting import ClusterSetting, paper_machine
from caraserve.bench.simulator.simulation import Simulation
from caraserve.cluster.routing.cost import Arrival, Backlog
from caraserve.cluster.routing.router import SentRequests
from tests.bench.simulator.compiled_steps import BEAT, LOOK, SEND, see

NODES = 2  # each of which routes
STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 3, 3, 40, 40, 60, 2100]).map(lambda ms: ms * MS),  # since the last step
        st.sampled_from([SEND, SEND, BEAT, LOOK]),
        st.integers(0, NODES - 1),  # who sends or looks
        st.integers(0, NODES - 1),  # to whom, or whose heartbeat
        st.sampled_from([0, 8, 64]),
        st.integers(1, 500),
        st.floats(1, 300),
    ),
    min_size=6,
    max_size=30,
)


@settings(max_examples=150)
@given(STEPS)
def test_views_are_late_heartbeats_and_what_the_router_has_sent_since(
    steps: list[tuple[int, int, int, int, int, int, float]],
) -> None:
    machine = paper_machine("unpadded")
    fleet = Simulation(ClusterSetting((machine,) * NODES, "random", 60.0), Workload((), ())).fleet
    for _ in range(3):
        fleet = with_room(fleet)  # for all heartbeats of a case
    states = [
        Backlog(kv_tokens=machine.kv_tokens, kv_free_tokens=machine.kv_tokens, queue_room=machine.max_queue)
    ] * NODES
    for number in range(NODES):
        fleet.published[number] = states[number]
    published, ledgers = [*states], [SentRequests() for _ in range(NODES)]
    under_way: list[tuple[int, int, Backlog]] = []
    now = 0
    for elapsed, step, router, number, rank, prompt, output in steps:
        now += elapsed
        if step == SEND:
            route = fleet.routes[0]
            route["router"], route["rank"], route["prompt_tokens"], route["output_tokens"] = (
                router,
                rank,
                prompt,
                output,
            )
            ledgers[router].add(str(number), Arrival("a", rank, prompt, output), now * 1e-9)
        elif step == BEAT:
            one = fleet.batches.instances[number]
            one["num_decoding"] += 1  # a request that never ends
            one["rank_sum"] += rank
            states[number] = states[number]._replace(requests=int(one["num_decoding"]), rank_sum=int(one["rank_sum"]))
            under_way.append((now + 2 * MS, number, states[number]))
        see(fleet, step, router, number, now)
        if step != LOOK:
            continue
        while under_way and under_way[0][0] <= now:
            at, sender, state = under_way.pop(0)
            published[sender] = state
            for ledger in ledgers:
                ledger.on_heartbeat(str(sender), at * 1e-9)
        for other in range(NODES):
            seen = ledgers[router].backlog(str(other), published[other], now * 1e-9)
            expected = states[other] if other == router else seen
            assert tuple(fleet.seen[other].tolist()) == expected
