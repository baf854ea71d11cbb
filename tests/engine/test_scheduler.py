"""Planning an iteration: decode first, then prefill chunks, within budgets; who is preempted without blocks."""

import pytest

from caraserve.core.backend import Limits
from caraserve.core.request import GenerateRequest, Phase, Request, SamplingParams
from caraserve.engine.scheduler import (
    PROMPT_LOGPROBS_CHUNK_TOKENS,
    Scheduled,
    SchedulerOutput,
    plan_iteration,
    plan_side_batch,
)
from caraserve.kv.block_pool import BlockPool


def limits(step_tokens: int = 64, blocks: int = 100) -> Limits:
    return Limits(
        num_blocks=blocks,
        block_tokens=16,
        num_slots=8,
        adapter_slots=4,
        max_step_tokens=step_tokens,
        max_context=400,
        embedding_size=1,
    )


def request(
    slot: int,
    prompt: int,
    computed: int = 0,
    outputs: int = 0,
    *,
    tenant: str = "t",
    priority: int = 0,
    embeds: bool = False,
    **params: object,
) -> Request:
    asked = GenerateRequest(
        request_id=f"r{slot}",
        prompt_ids=tuple(range(prompt)),
        adapter=None,
        params=SamplingParams(**({"max_tokens": 50} | params)),  # type: ignore[arg-type]
        arrival_s=0.0,
        tenant=tenant,
        priority=priority,
        embeds=embeds,
    )
    made = Request(asked, seed=0, phase=Phase.PREFILL, slot=slot)
    made.computed, made.launched_outputs = computed, outputs
    return made


def holding(pool: BlockPool, made: Request, count: int) -> Request:
    made.blocks = pool.take(count) or []
    return made


def rows(decision: SchedulerOutput) -> list[tuple[int, int, int, bool]]:
    return [(e.row.slot, e.row.start, e.row.count, e.row.samples) for e in decision.scheduled]


def plan(
    running: list[Request], pool: BlockPool, limit: Limits, slots: list[int] | None = None, served: int | None = None
) -> SchedulerOutput:
    return plan_iteration(running, slots or [0] * len(running), pool, limit, served)


def test_decodes_go_before_prefills_and_chunks_fill_the_rest() -> None:
    pool = BlockPool(100)
    prefilling, decoding = request(0, 200), holding(pool, request(1, 20, computed=20, outputs=1), 2)
    assert rows(plan([prefilling, decoding], pool, limits(64))) == [(0, 0, 63, False), (1, 20, 1, True)]


def test_the_last_chunk_of_a_prompt_samples() -> None:
    pool = BlockPool(100)
    assert rows(plan([request(0, 100, computed=60)], pool, limits(64))) == [(0, 60, 40, True)]


@pytest.mark.parametrize(("computed", "embeds"), [(30, False), (60, True)])
def test_the_last_chunk_of_a_prompt_embeds_it_and_nothing_follows(computed: int, embeds: bool) -> None:
    made = request(0, 100, computed=computed, embeds=True, max_tokens=0)
    (entry,) = plan([made], BlockPool(100), limits(64)).scheduled
    assert (entry.row.embeds, entry.row.samples) == (embeds, False)
    made.computed = 100
    assert plan([made], BlockPool(100), limits(64)).scheduled == ()


def test_rows_are_ordered_by_adapter_slot_then_admission() -> None:
    decision = plan([request(0, 4), request(1, 4), request(2, 4)], BlockPool(9), limits(), slots=[2, 1, 2])
    assert [entry.row.slot for entry in decision.scheduled] == [1, 0, 2]


def test_no_token_is_launched_past_max_tokens() -> None:
    pool = BlockPool(9)
    done = holding(pool, request(0, 10, computed=12, outputs=3, max_tokens=3), 1)
    assert plan([done], pool, limits()).scheduled == ()


def test_rows_that_score_their_prompt_are_short() -> None:
    decision = plan([request(0, 300, prompt_logprobs=0)], BlockPool(100), limits(256))
    assert decision.scheduled[0].row.count == PROMPT_LOGPROBS_CHUNK_TOKENS
    assert decision.scheduled[0].row.prompt_logprobs == 0


def test_blocks_are_granted_for_the_tokens_computed() -> None:
    pool = BlockPool(100)
    decision = plan([request(0, 40)], pool, limits())
    assert len(decision.scheduled[0].blocks) == 3
    assert pool.used == 3


def test_the_latest_arrival_is_preempted_for_an_earlier_ones_token() -> None:
    pool = BlockPool(4)
    first = holding(pool, request(0, 32, computed=32, outputs=1), 2)
    last = holding(pool, request(1, 31, computed=31, outputs=1), 2)
    decision = plan([first, last], pool, limits(blocks=4))
    assert decision.preempted == (last,)
    assert rows(decision) == [(0, 32, 1, True)]


def test_the_earliest_is_never_preempted() -> None:
    pool = BlockPool(2)
    first = holding(pool, request(0, 32, computed=32, outputs=1), 2)
    decision = plan([first], pool, limits(blocks=2))
    assert decision.preempted == decision.scheduled == ()


@pytest.mark.parametrize(
    ("tenants", "priorities", "preempted"),
    [
        ("ttt", (0, 0, 0), 2),
        ("ttt", (0, 5, 0), 1),  # the second has a later priority than the last
        ("ttt", (9, 0, 0), 2),  # the first is never preempted
        ("tut", (0, 5, 0), 2),  # another tenant's priorities are compared with its own alone
    ],
)
def test_of_the_last_requests_tenant_the_request_of_highest_priority_value_is_preempted(
    tenants: str, priorities: tuple[int, ...], preempted: int
) -> None:
    pool = BlockPool(6)
    running = [
        holding(pool, request(slot, 32, computed=32, outputs=1, tenant=tenant, priority=priority), 2)
        for slot, (tenant, priority) in enumerate(zip(tenants, priorities, strict=True))
    ]
    assert plan(running, pool, limits(blocks=6), served=1).preempted == (running[preempted],)


def test_only_served_requests_get_rows_and_the_others_keep_their_blocks() -> None:
    pool = BlockPool(100)
    first, other = request(0, 40), holding(pool, request(1, 20, computed=20, outputs=1), 2)
    decision = plan([first, other], pool, limits(), served=1)
    assert rows(decision) == [(0, 0, 40, True)]
    assert decision.preempted == ()


def test_requests_that_are_not_served_are_preempted_when_blocks_run_out_the_last_first() -> None:
    pool = BlockPool(6)
    first, second, third = (holding(pool, request(slot, 32, computed=32, outputs=1), 2) for slot in range(3))
    decision = plan([first, second, third], pool, limits(blocks=6), served=2)
    assert rows(decision) == [(0, 32, 1, True), (1, 32, 1, True)]
    assert decision.preempted == (third,)


@pytest.mark.parametrize("step_tokens", [1, 7, 64])
def test_an_iteration_never_exceeds_its_tokens(step_tokens: int) -> None:
    running = [request(slot, 30 + slot) for slot in range(6)]
    decision = plan(running, BlockPool(100), limits(step_tokens))
    assert sum(entry.row.count for entry in decision.scheduled) == step_tokens


def test_while_the_pool_can_grow_a_request_without_blocks_is_left_out_and_none_is_preempted() -> None:
    pool = BlockPool(4)
    first = holding(pool, request(0, 32, computed=32, outputs=1), 2)
    last = holding(pool, request(1, 31, computed=31, outputs=1), 2)
    decision = plan_iteration([first, last], [0, 0], pool, limits(blocks=4), growable=1)
    assert rows(decision) == [(1, 31, 1, True)]
    assert (decision.preempted, decision.lacking) == ((), 1)


def test_free_blocks_stay_reserved_for_a_request_that_is_left_out() -> None:
    """Otherwise other requests would take them in every iteration."""
    pool = BlockPool(3)
    first, second = request(0, 64), request(1, 16)
    decision = plan_iteration([first, second], [0, 0], pool, limits(128, blocks=3), growable=9)
    assert (rows(decision), decision.lacking, pool.used) == ([], 2, 0)


def test_where_the_pool_cannot_grow_enough_the_latest_is_preempted() -> None:
    pool = BlockPool(5)
    first = holding(pool, request(0, 80, computed=32), 2)
    last = holding(pool, request(1, 31, computed=31, outputs=1), 2)
    decision = plan_iteration([first, last], [0, 0], pool, limits(blocks=5), served=1, growable=1)
    assert decision.preempted == (last,)
    assert rows(decision) == [(0, 32, 48, True)]


def test_a_request_that_is_left_out_is_not_preempted_for_another() -> None:
    """Both lack a block, and the pool grows by one: the second request is preempted, not the first."""
    pool = BlockPool(7)
    first = holding(pool, request(0, 30, computed=30, outputs=1), 2)
    second = holding(pool, request(1, 32, computed=32, outputs=1), 2)
    third = holding(pool, request(2, 48, computed=48, outputs=1), 3)
    decision = plan_iteration([first, second, third], [0] * 3, pool, limits(blocks=7), growable=1)
    assert rows(decision) == [(0, 30, 1, True)]
    assert decision.preempted == (third,)


def test_a_side_batch_has_the_rest_of_a_prompt_up_to_the_step_limit() -> None:
    pool = BlockPool(100)
    whole = plan_side_batch(request(0, 40, computed=16), 3, pool, limits())
    assert isinstance(whole, Scheduled)
    assert (whole.row.start, whole.row.count, whole.row.adapter_slot, whole.row.samples) == (16, 24, 3, True)
    piece = plan_side_batch(request(1, 100), 3, pool, limits())
    assert isinstance(piece, Scheduled)
    assert (piece.row.count, piece.row.samples) == (64, False)


def test_no_request_is_preempted_for_a_side_batch() -> None:
    pool = BlockPool(3)
    holding(pool, request(0, 32, computed=32, outputs=1), 2)
    assert plan_side_batch(request(1, 40), 3, pool, limits()) == 2
    assert pool.available == 1


# --- drafts ---


def drafted(
    request: Request, others: list[Request], pool: BlockPool, limit: Limits, count: int = 6
) -> tuple[SchedulerOutput, int]:
    """Plans one iteration with `count` drafts of a request. Returns the plan, and how many were taken."""
    running = [request, *others]
    decision = plan_iteration(running, [0] * len(running), pool, limit, drafts={request: tuple(range(count))})
    entry = next(entry for entry in decision.scheduled if entry.request is request)
    assert entry.row.drafts == tuple(range(len(entry.row.drafts)))
    assert (entry.row.count, entry.row.samples) == (1 + len(entry.row.drafts), True)
    return decision, len(entry.row.drafts)


@pytest.mark.parametrize(
    ("kind", "step_tokens", "taken"),
    [
        ({}, 64, 6),
        ({}, 4, 3),  # tokens of the iteration
        ({"outputs": 47}, 64, 2),  # tokens of the answer, of 50
        ({"prompt": 396, "computed": 396}, 64, 2),  # the context, of 400 tokens
    ],
)
def test_drafts_are_taken_as_far_as_tokens_are_left(kind: dict[str, int], step_tokens: int, taken: int) -> None:
    outputs = kind.get("outputs", 1)
    made = request(0, **({"prompt": 20, "computed": 19 + outputs, "outputs": outputs} | kind))
    pool = BlockPool(100)
    assert drafted(holding(pool, made, 30), [], pool, limits(step_tokens))[1] == taken


def test_blocks_are_granted_for_drafts() -> None:
    pool = BlockPool(100)
    decision, taken = drafted(holding(pool, request(0, 30, computed=30, outputs=1), 2), [], pool, limits())
    assert taken == 6
    assert [len(entry.blocks) for entry in decision.scheduled] == [1]


def test_no_request_is_preempted_or_waits_for_a_block_for_drafts() -> None:
    """Two blocks are free, of which each request may need one."""
    pool = BlockPool(6)
    first = holding(pool, request(0, 30, computed=30, outputs=1), 2)
    last = holding(pool, request(1, 32, computed=32, outputs=1), 2)
    decision, taken = drafted(first, [last], pool, limits(blocks=6))
    assert (taken, decision.preempted) == (1, ())
    assert [len(entry.blocks) for entry in decision.scheduled] == [0, 1]
