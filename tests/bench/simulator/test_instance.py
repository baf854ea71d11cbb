"""Tests that a simulated instance, which advances runs of iterations in one step, equals one that goes one by one, and
has the rows of the engine's scheduler in every iteration."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.setting import SimulatedMachine, paper_machine
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.core.backend import Limits
from caraserve.core.request import GenerateRequest, Phase, Request, SamplingParams
from caraserve.engine.scheduler import plan_iteration
from caraserve.kv.block_pool import BlockPool
from tests.bench.simulator.one_instance import OneInstance
from tests.bench.simulator.reference import Plain, play

PADDED = PerfModel(0.05, 0.1, 3.0, True, 2.0, 0.1, 0.001)
MACHINE = SimulatedMachine(PADDED, LinkSpeeds(), max_running=3, max_step_tokens=16, kv_tokens=60)

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
    lambda padded, prompts_ms, beside_ms, running, ahead, kv: replace(
        MACHINE,
        model=replace(PADDED, padded=padded, prefill_token_rank_max_ms=prompts_ms),
        beside_prompt_ms=beside_ms,
        max_running=running,
        launches_ahead=ahead,
        kv_tokens=kv,
    ),
    st.booleans(),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 0.5]),
    st.integers(1, 6),
    st.integers(0, 2),
    st.sampled_from([60, 100, 10_000]),
)


def simulated(
    machine: SimulatedMachine, rows: list[tuple[int, int, int, int, int]], looks: list[int]
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int, int]]]:
    """Delivers requests in order of time; also advances to other times, which must change nothing.

    Returns (first token, end) of each request, and every iteration as `play` does.
    """
    instance = OneInstance(machine, [row[2:] for row in rows])
    events = [(row[0], index) for index, row in enumerate(rows)] + [(look, -1) for look in looks]
    for time, index in sorted(events, key=lambda event: (event[0], event[1] >= 0, event[1])):
        instance.advance(time)
        if index >= 0:
            instance.deliver(index, time, time + rows[index][1])
    instance.finish()
    return instance.times(), instance.iterations()


@settings(max_examples=150)
@given(MACHINES, REQUESTS, st.lists(st.integers(0, 300 * MS), max_size=5))
def test_every_iteration_equals_the_plain_references(
    machine: SimulatedMachine, rows: list[tuple[int, int, int, int, int]], looks: list[int]
) -> None:
    rows = sorted(rows)
    plain = [Plain(index, row[0], row[0] + row[1], *row[2:]) for index, row in enumerate(rows)]
    iterations = play(machine, plain)
    times, found = simulated(machine, rows, looks)
    assert times == [(one.first, one.done) for one in plain]
    assert found == iterations


def test_a_run_ends_where_a_request_joins() -> None:
    machine = replace(MACHINE, model=PerfModel(0, 0, 10.0, False, 10.0, 0, 0), max_running=9, kv_tokens=1000)
    instance = OneInstance(machine, [(8, 4, 10), (8, 4, 2)])
    for index, time in enumerate((0, 15 * MS)):
        instance.advance(time)
        instance.deliver(index, time, time)
    instance.finish()
    # One iteration of prefill; two of decoding, the second of which had been launched; the newcomer; the rest.
    assert [run[2:] for run in instance.runs] == [(1, 0, 4), (2, 1, 0), (1, 1, 4), (1, 2, 0), (5, 1, 0)]
    assert instance.times() == [(10 * MS, 100 * MS), (40 * MS, 50 * MS)]


def test_an_iteration_with_prefill_and_decode_reads_the_weights_once() -> None:
    assert PADDED.iteration_ms(2, 72, 64, 10, 80) == PADDED.decode_ms(2, 72, 64) + PADDED.prefill_ms(10, 80) - 3.0
    assert PADDED.iteration_ms(2, 72, 64, 1, 0) == PADDED.decode_ms(2, 72, 64), "a prompt never saves time"
    assert PADDED.iteration_ms(2, 72, 64, 0, 0) == PADDED.decode_ms(2, 72, 64)
    assert PADDED.iteration_ms(0, 0, 0, 10, 80) == PADDED.prefill_ms(10, 80)


def test_padded_prompts_cost_what_the_largest_rank_of_their_iteration_does() -> None:
    padded, apart = (paper_machine("padded", pads_prompts=pads).model for pads in (True, False))
    assert padded.prefill_ms(2000, 2000 * 8, 8) == pytest.approx(apart.prefill_ms(2000, 2000 * 8, 8))
    assert padded.prefill_ms(2000, 2000 * 128, 128) == pytest.approx(apart.prefill_ms(2000, 2000 * 128, 128))
    mixed = 1000 * 8 + 1000 * 128
    assert padded.prefill_ms(2000, mixed, 128) == padded.prefill_ms(2000, 2000 * 128, 128)
    assert apart.prefill_ms(2000, mixed, 128) < 0.8 * apart.prefill_ms(2000, 2000 * 128, 128)


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
    instance = OneInstance(replace(MACHINE, kv_tokens=30), [(8, 10, 10), (64, 10, 10)])
    instance.deliver(0, 0, 0)
    instance.deliver(1, 0, 0)
    assert instance.advance(0) == 0  # the turn of the second has not come
    assert instance.advance(20 * MS) == 1
    assert instance.backlog().kv_free_tokens < 0
    instance.take_back(1)
    assert instance.backlog()[:3] == (1, 8, 8)
    instance.finish()
    (_, done), (first, never) = instance.times()
    assert done > 0
    assert (first, never) == (-1, -1)


# --- against the scheduler of the engine ---

ENGINES_MACHINE = replace(paper_machine("unpadded"), max_running=6, max_step_tokens=32, launches_ahead=0)
LIMITS = Limits(
    num_blocks=1000,
    block_tokens=16,
    num_slots=6,
    adapter_slots=2,
    max_step_tokens=32,
    max_context=400,
    embedding_size=1,
)


def engine_request(index: int, prompt: int, output: int) -> Request:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    asked = GenerateRequest(f"r{index}", tuple(range(prompt)), None, params, 0.0)
    return Request(asked, seed=0, phase=Phase.PREFILL, slot=index)


def scheduled(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Returns (start, decoding requests, prompt tokens) of every iteration that the scheduler plans."""
    to_come = [(at, engine_request(index, prompt, output)) for index, (at, prompt, output) in enumerate(rows)]
    pool, running, iterations, now = BlockPool(LIMITS.num_blocks), [], [], 0
    while to_come or running:
        came = [entry for entry in to_come if entry[0] < now]
        if not running and not came:
            came = to_come[:1]
            now = came[0][0]
        for entry in came[: LIMITS.num_slots - len(running)]:
            running.append(entry[1])
            to_come.remove(entry)
        decision = plan_iteration(running, [0] * len(running), pool, LIMITS)
        decoding = sum(entry.request.computed >= entry.request.prompt_tokens for entry in decision.scheduled)
        tokens = sum(entry.row.count for entry in decision.scheduled) - decoding
        iterations.append((now, decoding, tokens))
        now += max(1, round(ENGINES_MACHINE.model.iteration_ms(decoding, 0, 0, tokens, 0) * MS))
        for entry in decision.scheduled:
            entry.request.blocks += entry.blocks
            entry.request.computed += entry.row.count
            entry.request.launched_outputs += entry.row.samples
        for request in [one for one in running if one.launched_outputs == one.inputs.params.max_tokens]:
            running.remove(request)
            pool.release(request.blocks)
    return iterations


def simulated_alone(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    instance = OneInstance(ENGINES_MACHINE, [(0, prompt, output) for _, prompt, output in rows])
    for index, (at, _, _) in enumerate(rows):
        instance.advance(at)
        instance.deliver(index, at, at)
    instance.finish()
    return [(start, decoding, tokens) for start, _, decoding, tokens in instance.iterations()]


@given(
    st.lists(
        st.tuples(st.integers(0, 400).map(lambda ms: ms * MS), st.integers(1, 80), st.integers(1, 12)),
        min_size=1,
        max_size=6,
        unique_by=lambda row: row[0],
    )
)
def test_iterations_have_the_rows_that_the_scheduler_plans(rows: list[tuple[int, int, int]]) -> None:
    rows.sort()
    assert simulated_alone(rows) == scheduled(rows)
