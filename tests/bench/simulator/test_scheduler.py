"""Tests that the simulated instance batches as the engine's scheduler does: the same rows in every iteration."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from caraserve.bench.simulator.compiled import MS
from caraserve.bench.simulator.setting import paper_machine
from caraserve.core.backend import Limits
from caraserve.core.request import GenerateRequest, Phase, Request, SamplingParams
from caraserve.engine.scheduler import plan_iteration
from caraserve.kv.block_pool import BlockPool
from tests.bench.simulator.one_instance import OneInstance

MACHINE = replace(paper_machine("unpadded"), max_running=6, max_step_tokens=32, launches_ahead=0)
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
        now += max(1, round(MACHINE.model.iteration_ms(decoding, 0, 0, tokens, 0) * MS))
        for entry in decision.scheduled:
            entry.request.blocks += entry.blocks
            entry.request.computed += entry.row.count
            entry.request.launched_outputs += entry.row.samples
        for request in [one for one in running if one.launched_outputs == one.inputs.params.max_tokens]:
            running.remove(request)
            pool.release(request.blocks)
    return iterations


def simulated(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    instance = OneInstance(MACHINE, [(0, prompt, output) for _, prompt, output in rows])
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
    assert simulated(rows) == scheduled(rows)
