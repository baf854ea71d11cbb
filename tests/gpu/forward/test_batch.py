"""The batch's arrays: which LoRA kernels compute which tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from caraserve.core.batch import ScheduledRow
from caraserve.core.outputs import outputs_of
from caraserve.gpu.forward.batch import BatchWriter
from caraserve.gpu.kernels.bgmv_work import MOST_ROWS
from caraserve.gpu.memory.pass_shape import Capacity

ROWS, TOKENS, ADAPTERS = 64, 512, 4
rows_of_batches = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 1, 1, 2, 7]), st.integers(0, ADAPTERS)), min_size=1, max_size=ROWS
)


@given(rows_of_batches)
def test_each_token_of_an_adapter_is_computed_once_and_many_decoding_rows_of_one_in_segments(
    batch: list[tuple[int, int]],
) -> None:
    rows = tuple(ScheduledRow(slot, 5, count, adapter, samples=True) for slot, (count, adapter) in enumerate(batch))
    writer = BatchWriter(Capacity(TOKENS, ROWS, TOKENS, 64, ADAPTERS))
    words = writer.empty()
    filled = writer.fill(words, rows, outputs_of(rows, np.full(ROWS, 5, np.int64)), ())
    places = {name: words[place] for name, place in writer._places.items()}
    shape, by_bgmv = filled.shape, filled.bgmv_slots
    by_segment = np.zeros(shape.tokens, np.int32)
    for segment in range(shape.segments):
        first, count = places["segment_first"][segment], places["segment_rows"][segment]
        tokens = places["order"][first : first + count]
        assert not by_segment[tokens].any()
        by_segment[tokens] = places["segment_slot"][segment]
    adapters = np.repeat([row.adapter_slot for row in rows], [row.count for row in rows])
    decoding = np.repeat([row.count == 1 for row in rows], [row.count for row in rows])
    many = np.bincount(adapters[decoding], minlength=ADAPTERS + 1) > MOST_ROWS
    in_segments = ~decoding | many[adapters]
    assert np.array_equal(by_segment, np.where(in_segments, adapters, 0))
    assert np.array_equal(by_bgmv, np.where(in_segments, 0, adapters))
    assert shape.has_items == by_bgmv.any()
