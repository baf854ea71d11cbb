"""Tests that a simulated instance, which advances runs of iterations in one step, equals one that goes one by one."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.bench.simulator.instance import FOREVER, MS, BatchSimulator, IterationRun, SimRequest
from caraserve.bench.simulator.machines import Machine, paper_machine
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from tests.bench.simulator.reference import Plain, play

PADDED = PerfModel(0.05, 0.1, 3.0, True, 2.0, 0.1, 0.001)
MACHINE = Machine(PADDED, LinkSpeeds(), max_running=3, max_step_tokens=16, kv_tokens=60)

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda tenths: tenths * MS // 2),  # arrives; many coincide
        st.sampled_from([0, 0, 3 * MS, 5 * MS]),  # and waits for its adapter
        st.sampled_from([0, 8, 64]),
        st.integers(1, 40),
        st.integers(1, 20),
    ),
    min_size=1,
    max_size=8,
)
MACHINES = st.builds(
    lambda padded, running, ahead, kv: replace(
        MACHINE, model=replace(PADDED, padded=padded), max_running=running, launches_ahead=ahead, kv_tokens=kv
    ),
    st.booleans(),
    st.integers(1, 6),
    st.integers(0, 2),
    st.sampled_from([60, 100, 10_000]),
)


def simulated(
    machine: Machine, rows: list[tuple[int, int, int, int, int]], looks: list[int]
) -> tuple[list[SimRequest], list[IterationRun]]:
    """Delivers requests in order of time; also reads the state at other times, which must change nothing."""
    trace: list[IterationRun] = []
    batches = BatchSimulator(machine, trace)
    requests = [SimRequest(index, row[0], 0, *row[2:]) for index, row in enumerate(rows)]
    events = [(row[0], index) for index, row in enumerate(rows)] + [(look, -1) for look in looks]
    for time, index in sorted(events, key=lambda event: (event[0], event[1] >= 0, event[1])):
        batches.advance(time)
        if index >= 0:
            batches.deliver(requests[index], time, time + rows[index][1])
        batches.backlog()
    batches.advance(FOREVER - 1)
    batches.check()
    return requests, trace


def one_by_one(trace: list[IterationRun]) -> list[tuple[int, int, int, int]]:
    return [
        (run.start + index * run.each, run.each, run.decoding, run.prompt_tokens)
        for run in trace
        for index in range(run.times)
    ]


@settings(max_examples=300)
@given(MACHINES, REQUESTS, st.lists(st.integers(0, 300 * MS), max_size=5))
def test_every_iteration_equals_the_plain_references(
    machine: Machine, rows: list[tuple[int, int, int, int, int]], looks: list[int]
) -> None:
    rows = sorted(rows)
    plain = [Plain(index, row[0], row[0] + row[1], *row[2:]) for index, row in enumerate(rows)]
    iterations = play(machine, plain)
    requests, trace = simulated(machine, rows, looks)
    assert [(one.first, one.done) for one in requests] == [(one.first, one.done) for one in plain]
    assert one_by_one(trace) == iterations


def test_a_run_ends_where_a_request_joins() -> None:
    machine = replace(MACHINE, model=PerfModel(0, 0, 10.0, False, 10.0, 0, 0), max_running=9, kv_tokens=1000)
    (first, second), trace = simulated(machine, [(0, 0, 8, 4, 10), (15 * MS, 0, 8, 4, 2)], [])
    # One iteration of prefill; two of decoding, the second of which had been launched; the newcomer; the rest.
    assert [(run.times, run.decoding, run.prompt_tokens) for run in trace] == [
        (1, 0, 4),
        (2, 1, 0),
        (1, 1, 4),
        (1, 2, 0),
        (5, 1, 0),
    ]
    assert (second.first, second.done, first.done) == (40 * MS, 50 * MS, 100 * MS)


def test_an_iteration_with_prefill_and_decode_has_the_fixed_time_once() -> None:
    assert PADDED.iteration_ms(2, 72, 64, 10, 80) == PADDED.decode_ms(2, 72, 64) + PADDED.prefill_ms(10, 80) - 2.0
    assert PADDED.iteration_ms(2, 72, 64, 0, 0) == PADDED.decode_ms(2, 72, 64)
    assert PADDED.iteration_ms(0, 0, 0, 10, 80) == PADDED.prefill_ms(10, 80)


def test_the_papers_machine_has_the_times_in_the_papers() -> None:
    for kernel, (first_ms, second_ms) in {"padded": (34.8, 35.8), "unpadded": (35.3, 35.9)}.items():
        model = paper_machine(kernel).model  # type: ignore[arg-type]
        assert round(model.decode_ms(24, 24 * 32, 32), 6) == first_ms
        assert round(model.decode_ms(16, 16 * 64, 64), 6) == second_ms
        assert round(model.prefill_ms(256, 0), 6) == 44.0
        assert round(model.prefill_ms(1000, 0), 6) == 90.0
        large = model.prefill_ms(2000, 2000 * 128) / model.prefill_ms(2000, 2000 * 8)
        assert 2.5 < large < 2.7


def test_a_stuck_request_can_be_taken_back() -> None:
    batches = BatchSimulator(replace(MACHINE, kv_tokens=30))
    running, stuck = SimRequest(0, 0, 0, 8, 10, 10), SimRequest(1, 0, 0, 64, 10, 10)
    for request in (running, stuck):
        batches.deliver(request, 0, 0)
    assert batches.stuck() == []  # its turn has not come
    batches.advance(20 * MS)
    assert batches.stuck() == [stuck]
    assert batches.backlog().kv_free_tokens < 0
    batches.take_back(stuck)
    assert batches.backlog()[:3] == (1, 8, 8)
    batches.advance(FOREVER - 1)
    batches.check()
    assert running.done > 0
    assert stuck.done == -1
