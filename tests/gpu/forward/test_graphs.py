"""Buckets of captured graphs: every choice covers its batch, and memory is bounded."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.core.batch import Batch, ScheduledRow
from caraserve.gpu.forward.graphs import Bucket, GraphSet, bucket_of, buckets, shape_for
from caraserve.gpu.kernels.bgmv_work import MOST_ROWS
from caraserve.gpu.kernels.lora import cut_segments
from caraserve.gpu.memory.pass_shape import Capacity, all_groups
from tests.gpu.small_model import SPEC, mixed_plan

ROWS, TOKENS = 100, 1500
ALL, QKV = all_groups(SPEC), SPEC.attention_inputs


def graphs(budget: int = 10**9, bytes_each: int = 1, *, merging: bool = False) -> GraphSet:
    return GraphSet(ROWS, TOKENS, budget, bytes_each, merging)


def captured(made: GraphSet) -> GraphSet:
    for bucket in made.to_capture():
        assert made.captured(bucket, made.expected_bytes)
    return made


def plan(*counts: int, adapter: int = 0, merged: int | None = None) -> Batch:
    rows = tuple(ScheduledRow(slot, 5, count, adapter, samples=True) for slot, count in enumerate(counts))
    return Batch((), (), rows, merged)


# --- the bucket that a batch needs ---


def test_a_batch_is_decode_only_if_every_row_has_one_token() -> None:
    assert bucket_of(plan(1, 1, 1), (), ALL, QKV) == Bucket(is_mixed=False, size=3, lora=False)
    assert bucket_of(plan(1, 7), (), ALL, QKV) == Bucket(is_mixed=True, size=8, lora=False)
    assert bucket_of(plan(1, 2), (), ALL, QKV) == Bucket(is_mixed=True, size=3, lora=False)


def test_arriving_and_merged_adapters_need_other_buckets() -> None:
    assert bucket_of(plan(1, adapter=3), (), ALL, QKV) == Bucket(is_mixed=False, size=1, lora=True)
    assert bucket_of(plan(9, adapter=3), {3}, ALL, QKV) == Bucket(is_mixed=True, size=9, lora=True, gated=True)
    assert bucket_of(plan(9, adapter=3), {4}, ALL, QKV) == Bucket(is_mixed=True, size=9, lora=True)
    assert bucket_of(plan(1, adapter=3, merged=3), {3}, ALL, QKV) == Bucket(
        is_mixed=False, size=1, lora=False, merged=True
    )


def test_a_batch_with_every_token_scored_takes_no_graph() -> None:
    scored = ScheduledRow(0, 0, 4, 0, samples=False, prompt_logprobs=0)
    assert bucket_of(Batch((), (), (scored,)), (), ALL, QKV) is None


# --- the graph that it takes ---


def test_the_smallest_graph_that_serves_is_chosen_and_without_lora_for_base_rows() -> None:
    made = captured(graphs())
    assert made.choose(Bucket(is_mixed=False, size=9, lora=False)) == Bucket(is_mixed=False, size=12, lora=False)
    assert made.choose(Bucket(is_mixed=False, size=9, lora=True)) == Bucket(is_mixed=False, size=12, lora=True)
    assert made.choose(Bucket(is_mixed=False, size=ROWS, lora=True)) == Bucket(is_mixed=False, size=ROWS, lora=True)
    assert made.choose(Bucket(is_mixed=True, size=65, lora=True)) == Bucket(is_mixed=True, size=96, lora=True)
    wanted = Bucket(is_mixed=True, size=TOKENS, lora=True, gated=True)
    assert made.choose(wanted) == wanted


def test_adapters_of_q_k_and_v_take_graphs_without_the_other_modules() -> None:
    made = captured(graphs())
    wanted = bucket_of(plan(1, 1, adapter=3), (), {0}, QKV)
    assert wanted == Bucket(is_mixed=False, size=2, lora=True, qkv_only=True)
    assert made.choose(wanted) == wanted
    assert bucket_of(plan(1, 1, adapter=3), (), {0, 3}, QKV) == Bucket(is_mixed=False, size=2, lora=True)
    alone = graphs()
    alone.captured(Bucket(is_mixed=False, size=4, lora=True, qkv_only=True), 1)
    assert alone.choose(Bucket(is_mixed=False, size=2, lora=True)) is None
    assert alone.choose(Bucket(is_mixed=False, size=2, lora=False)) is not None


def test_graphs_of_q_k_and_v_have_their_groups_in_all_layers_of_any_plan() -> None:
    mixed, capacity = mixed_plan(), Capacity(64, 8, 64, 16, 4)
    bucket = Bucket(is_mixed=False, size=4, lora=True, qkv_only=True)
    named = {mixed.group_shapes[shape].widths for shape in shape_for(mixed, bucket, capacity, 100).groups}
    assert named == {layer.groups[0].widths for layer in mixed.layers}
    assert shape_for(mixed, replace(bucket, qkv_only=False), capacity, 100).groups == all_groups(mixed)


def test_a_decode_batch_with_many_rows_of_an_adapter_takes_a_graph_with_the_kernels_of_prompts() -> None:
    made = captured(graphs())
    rows = plan(*[1] * 9, adapter=3)
    wanted = bucket_of(rows, (), ALL, QKV, segmented=True)
    assert wanted == Bucket(is_mixed=False, size=9, lora=True, segmented=True)
    assert made.choose(wanted) == Bucket(is_mixed=False, size=16, lora=True, segmented=True)
    assert made.choose(Bucket(is_mixed=False, size=9, lora=True)) == Bucket(is_mixed=False, size=12, lora=True)
    mixed = bucket_of(plan(7, *[1] * 9, adapter=3), (), ALL, QKV, segmented=True)
    assert mixed == Bucket(is_mixed=True, size=16, lora=True)  # has them in any case
    assert not [bucket for bucket in buckets(8, TOKENS) if bucket.segmented]


@given(st.lists(st.integers(MOST_ROWS + 1, ROWS), min_size=1, max_size=11), st.integers(0, 30))
def test_a_graph_has_room_for_the_segments_of_any_decode_batch(adapters: list[int], others: int) -> None:
    slots = np.repeat(np.arange(len(adapters)) + 1, adapters).astype(np.int32)
    size = len(slots) + others
    capacity = Capacity(2048, 2048, 2048, 64, 40)
    room = shape_for(SPEC, Bucket(is_mixed=False, size=size, lora=True, segmented=True), capacity, 100)
    assert len(cut_segments(slots)[1]) <= room.segments


def test_a_large_batch_is_not_padded_by_much() -> None:
    made = captured(graphs())
    assert made.choose(Bucket(is_mixed=True, size=700, lora=False)) == Bucket(is_mixed=True, size=768, lora=False)
    assert made.choose(Bucket(is_mixed=True, size=550, lora=False)) is None
    waiting = Bucket(is_mixed=True, size=640, lora=True, qkv_only=True, gated=True)
    assert made.choose(Bucket(is_mixed=True, size=600, lora=False)) == waiting


@pytest.mark.parametrize("qkv_only", [False, True])
def test_any_batch_that_waits_for_layers_has_a_graph_for_its_modules_without_much_padding(qkv_only: bool) -> None:
    made = captured(graphs())
    for size in range(1, TOKENS + 1):
        chosen = made.choose(Bucket(is_mixed=True, size=size, lora=True, qkv_only=qkv_only, gated=True))
        assert chosen is not None
        assert chosen.qkv_only == qkv_only
        assert chosen.size <= max(64, (4 / 3 if size > 512 else 2) * size)


def test_another_graph_serves_if_the_best_one_is_not_captured() -> None:
    made = graphs()
    made.captured(Bucket(is_mixed=False, size=16, lora=True), 1)
    made.captured(Bucket(is_mixed=True, size=64, lora=True, gated=True), 1)
    base = Bucket(is_mixed=False, size=12, lora=False)
    assert made.choose(base) == Bucket(is_mixed=False, size=16, lora=True)
    assert made.choose(Bucket(is_mixed=True, size=50, lora=False)) == Bucket(
        is_mixed=True, size=64, lora=True, gated=True
    )
    assert made.choose(Bucket(is_mixed=False, size=30, lora=True)) == Bucket(
        is_mixed=True, size=64, lora=True, gated=True
    )
    assert made.choose(Bucket(is_mixed=False, size=1, lora=True)) is None  # sixteen times the rows
    assert made.choose(Bucket(is_mixed=True, size=65, lora=False)) is None


def test_a_batch_that_waits_for_layers_takes_gated_graphs_only() -> None:
    made = graphs()
    made.captured(Bucket(is_mixed=True, size=64, lora=True), 1)
    assert made.choose(Bucket(is_mixed=True, size=64, lora=True, gated=True)) is None
    made.captured(Bucket(is_mixed=True, size=64, lora=False), 1)
    assert made.choose(Bucket(is_mixed=True, size=64, lora=False, merged=True)) is None


def test_a_batch_over_the_limits_raises() -> None:
    made = captured(graphs())
    with pytest.raises(AssertionError, match="exceeds"):
        made.choose(Bucket(is_mixed=False, size=ROWS + 1, lora=False))
    with pytest.raises(AssertionError, match="exceeds"):
        made.choose(Bucket(is_mixed=True, size=TOKENS + 1, lora=False))


wanted_buckets = st.builds(
    lambda mixed, rows, tokens, lora, gated: Bucket(
        is_mixed=mixed, size=tokens if mixed else rows, lora=lora or gated, gated=gated
    ),
    st.booleans(),
    st.integers(1, ROWS),
    st.integers(1, TOKENS),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(wanted_buckets, min_size=1, max_size=30), st.integers(1, 80))
def test_every_choice_covers_its_batch_and_memory_stays_within_its_budget(wanted: list[Bucket], budget: int) -> None:
    made = captured(graphs(budget))
    assert made.num_bytes <= budget
    for shape in wanted:
        chosen = made.choose(shape)
        if chosen is not None:
            assert chosen in made.to_capture()
            assert chosen.serves(shape)
            assert chosen.size >= shape.size
            assert chosen.lora >= shape.lora
            assert chosen.gated >= shape.gated


def test_a_graph_that_exceeds_the_memory_left_is_not_kept() -> None:
    made, bucket = graphs(100), Bucket(is_mixed=False, size=1, lora=True)
    assert not made.captured(bucket, 101)
    assert made.choose(bucket) is None
    assert made.captured(bucket, 100)
    assert made.choose(bucket) == bucket


# --- the order of captures ---


def test_all_graphs_that_fit_are_captured_those_of_large_prompts_last_and_the_largest_of_both_first() -> None:
    chosen = graphs().to_capture()
    assert set(chosen) == set(buckets(ROWS, TOKENS))
    first, late = ([bucket.size for bucket in chosen if bucket.is_late is is_late] for is_late in (False, True))
    assert [bucket.size for bucket in chosen] == sorted(first, reverse=True) + sorted(late, reverse=True)
    assert {bucket.is_late for bucket in chosen if not bucket.is_mixed} == {False}
    assert (max(first), min(late)) == (256, 384)


def test_where_not_all_graphs_fit_every_other_size_of_mixed_ones_is_left_out() -> None:
    every = list(buckets(ROWS, TOKENS))
    chosen = graphs(len(every) - 1).to_capture()
    kinds = {(bucket.is_mixed, replace(bucket, size=0)) for bucket in every}
    assert {(bucket.is_mixed, replace(bucket, size=0)) for bucket in chosen} == kinds
    sizes = {bucket.size for bucket in chosen if bucket.gated}
    assert sizes == {128, 384, 640, 1024, TOKENS}
    assert {bucket for bucket in chosen if not bucket.is_mixed} == {bucket for bucket in every if not bucket.is_mixed}


def test_decode_graphs_come_first_when_memory_is_short() -> None:
    decode = {bucket for bucket in buckets(ROWS, TOKENS) if not bucket.is_mixed}
    chosen = graphs(len(decode)).to_capture()
    assert set(chosen) == decode
    assert graphs(0).to_capture() == []


def test_buckets_end_at_the_limits_and_include_no_useless_variant() -> None:
    every = list(buckets(ROWS, TOKENS))
    assert len(every) == len(set(every))
    assert max(bucket.size for bucket in every if bucket.is_mixed) == TOKENS
    assert max(bucket.size for bucket in every if not bucket.is_mixed) == ROWS
    assert not [bucket for bucket in every if bucket.gated and not bucket.lora]
    assert not [bucket for bucket in every if bucket.merged]
    assert [bucket for bucket in buckets(ROWS, TOKENS, merging=True) if bucket.merged and not bucket.lora]
    # Mixed buckets also serve decoding rows that wait for layers.
    assert max(bucket.size for bucket in buckets(8, 1) if bucket.is_mixed) == 8


def test_in_merged_mode_base_and_merged_weights_have_their_own_graphs() -> None:
    made = captured(graphs(merging=True))
    for merged in (False, True):
        wanted = Bucket(is_mixed=True, size=128, lora=False, merged=merged)
        assert made.choose(wanted) == wanted
