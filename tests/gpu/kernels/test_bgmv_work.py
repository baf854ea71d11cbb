"""Work items of a decode batch's LoRA: each part is in one item, and items have about equal sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from caraserve.core.lora_layout import RANK_STEP
from caraserve.gpu.kernels import bgmv_work
from caraserve.gpu.kernels.bgmv_work import (
    COUNT,
    FIRST,
    GROUP_COUNT,
    GROUP_ROW,
    PLACE,
    PLANES,
    SLOT,
    WorkItems,
    adapter_items,
)
from caraserve.model.dtype import Dtype

SLOTS = 6
Ints = NDArray[np.int64]
Batch = tuple[list[int], Ints, Ints, tuple[int, ...]]
ITEM_BYTES = 16 << 10


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draws adapter slots of rows, ranks by projection and slot, dtypes of slots, outputs of projections."""
    row_slots = draw(st.lists(st.integers(0, SLOTS - 1), max_size=24))
    projections = draw(st.integers(1, 3))
    rank = st.integers(0, 32).map(lambda groups: groups * RANK_STEP)
    ranks = np.array([[0, *draw(st.lists(rank, min_size=SLOTS - 1, max_size=SLOTS - 1))] for _ in range(projections)])
    dtypes = np.array(draw(st.lists(st.sampled_from([0, 1, 2]), min_size=SLOTS, max_size=SLOTS)))
    outputs = tuple(draw(st.lists(st.integers(1, 1500), min_size=projections, max_size=projections)))
    return row_slots, ranks, dtypes, outputs


def plan_items(row_slots: NDArray[np.int32], ranks: Ints, dtypes: Ints, outputs: tuple[int, ...]) -> WorkItems:
    adapters = [
        adapter_items(slot, ranks[:, slot].tolist(), Dtype(dtype), outputs) for slot, dtype in enumerate(dtypes)
    ]
    return bgmv_work.plan_items(row_slots, adapters)


def rows_of(plan: WorkItems, item: list[int]) -> list[int]:
    group = plan.groups[item[PLACE] >> 8].tolist()
    rows: list[int] = group[GROUP_ROW : GROUP_ROW + group[GROUP_COUNT]]
    return rows


def per_load(dtype: int) -> int:
    return 4 if dtype == Dtype.F32.value else 8


def covered(row_slots: list[int], ranks: Ints, dtypes: Ints, outputs: tuple[int, ...]) -> tuple[Ints, list[Ints]]:
    """Returns how often each (row, projection, plane, rank row) is shrunk and each (row, projection, column)
    expanded."""
    plan = plan_items(np.array(row_slots, np.int32), ranks, dtypes, outputs)
    shrunk = np.zeros((len(row_slots), len(outputs), PLANES, int(ranks.max(initial=0))), int)
    expanded = [np.zeros((len(row_slots), -(-columns // 8) * 8), int) for columns in outputs]
    for item in plan.shrink.tolist():
        projection = item[PLACE] & 0xFF
        for row in rows_of(plan, item):
            assert row_slots[row] == item[SLOT]
            shrunk[row, projection, item[COUNT], item[FIRST] : item[FIRST] + per_load(dtypes[item[SLOT]])] += 1
    for item in plan.expand.tolist():
        projection, width = item[PLACE] & 0xFF, per_load(dtypes[item[SLOT]])
        for row in rows_of(plan, item):
            assert row_slots[row] == item[SLOT]
            expanded[projection][row, item[FIRST] * width : (item[FIRST] + item[COUNT]) * width] += 1
    return shrunk, expanded


@given(batches())
def test_every_rank_row_and_every_column_is_in_one_item(batch: Batch) -> None:
    row_slots, ranks, _, outputs = batch
    shrunk, expanded = covered(*batch)
    for row, slot in enumerate(row_slots):
        for projection, columns in enumerate(outputs):
            rank = ranks[projection, slot]
            assert (shrunk[row, projection, :, :rank] == 1).all()
            assert (shrunk[row, projection, :, rank:] == 0).all()
            assert (expanded[projection][row, :columns] == (rank > 0)).all()


@given(batches())
def test_an_expand_item_has_a_thread_for_each_of_its_vectors(batch: Batch) -> None:
    row_slots, ranks, dtypes, outputs = batch
    for item in plan_items(np.array(row_slots, np.int32), ranks, dtypes, outputs).expand.tolist():
        rank = ranks[item[PLACE] & 0xFF, item[SLOT]]
        assert 0 < item[COUNT] * (rank // RANK_STEP) <= bgmv_work.THREADS


@pytest.mark.parametrize("dtype", Dtype)
def test_items_read_about_the_same_bytes_at_any_rank(dtype: Dtype) -> None:
    """Except for the last item of a projection. A shrink item is a plane of K of eight rank rows, of four in fp32."""
    outputs = 1 << 16
    for rank in range(8, 520, 8):
        plan = plan_items(np.array([1], np.int32), np.array([[0, rank]]), np.full(2, dtype.value), (outputs,))
        read = plan.expand[:-1, COUNT] * 16 * rank
        assert (read <= ITEM_BYTES).all()
        assert (read >= ITEM_BYTES * (0.85 if rank <= 128 else 0.65)).all()
        assert len(plan.shrink) * (32 // dtype.itemsize // 2) == rank * PLANES


@given(batches())
def test_lists_are_never_longer_than_most_items(batch: Batch) -> None:
    row_slots, ranks, dtypes, outputs = batch
    plan = plan_items(np.array(row_slots, np.int32), ranks, dtypes, outputs)
    most = bgmv_work.most_items(len(row_slots), max(int(ranks.max()), RANK_STEP), outputs, Dtype.F32)
    assert len(plan.shrink) <= most[0]
    assert len(plan.expand) <= most[1]


def test_up_to_four_rows_of_one_adapter_share_a_read() -> None:
    row_slots = np.array([2, 1, 2, 0, 2, 2, 1, 2], np.int32)
    plan = plan_items(row_slots, np.array([[0, 8, 8]]), np.ones(3, int), (64,))
    assert [(item[SLOT], rows_of(plan, item)) for item in plan.expand.tolist()] == [
        (1, [1, 6]),
        (2, [0, 2, 4, 5]),
        (2, [7]),
    ]


def test_mixed_ranks_need_as_many_items_as_each_rank_alone() -> None:
    """No adapter is padded to the largest rank."""
    ranks, rows = np.array([[0, 8, 64, 128, 16]]), np.arange(1, 5, dtype=np.int32)
    mixed = plan_items(rows, ranks, np.ones(5, int), (4096,))
    alone = [plan_items(rows[row : row + 1], ranks, np.ones(5, int), (4096,)) for row in range(4)]
    assert len(mixed.shrink) == sum(len(plan.shrink) for plan in alone) == 4 * ranks.sum() // 8
    assert len(mixed.expand) == sum(len(plan.expand) for plan in alone) == 4096 * ranks.sum() * 2 // ITEM_BYTES


def test_a_row_whose_slot_has_no_adapter_raises() -> None:
    with pytest.raises(AssertionError, match="no adapter"):
        bgmv_work.plan_items(np.array([1], np.int32), [None, None])
