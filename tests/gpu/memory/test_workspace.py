"""A lane's workspace, and its parts for each pass."""

import pytest
import torch

from caraserve.gpu.attention.triton import ATTENTION, SPLIT_TOKENS, SplitScratch
from caraserve.gpu.memory import workspace
from caraserve.gpu.memory.pass_shape import Capacity, PassShape
from caraserve.gpu.memory.workspace import Workspace, make_workspace
from caraserve.model.plan import DecoderPlan
from tests.gpu.small_model import SPEC
from tests.plans.made_up import PLANS

ROWS, MOST_CONTEXT = 40, 8 * SPLIT_TOKENS
HEADS = next((one.heads, one.head_dim) for one in SPEC.attentions)
ONE_SPLIT_BYTES = 4 * HEADS[0] * (HEADS[1] + 2)


def made(plan: DecoderPlan = SPEC, dtype: torch.dtype = torch.float32) -> Workspace:
    capacity = Capacity(tokens=64, rows=ROWS, outputs=500, tile_tokens=16, adapters=8)
    return make_workspace(plan, dtype, capacity, 16, MOST_CONTEXT, torch.device("cpu"), ATTENTION.decode)


def parts(space: Workspace, rows: int, context: int) -> list[tuple[int, int]]:
    found = space.decode_parts(PassShape(rows, rows, 0, rows, 0, False, context, frozenset()), HEADS)
    for part, scratch in found:
        assert isinstance(scratch, SplitScratch)
        whole = space.scratch[HEADS]
        assert isinstance(whole, SplitScratch)
        assert scratch.best.shape == (part.stop - part.start, HEADS[0], -(-context // SPLIT_TOKENS))
        assert scratch.sums.data_ptr() == whole.sums.data_ptr()
    return [(part.start, part.stop) for part, _ in found]


def test_all_rows_decode_at_once_if_the_scratch_fits() -> None:
    assert parts(made(), ROWS, MOST_CONTEXT) == [(0, ROWS)]
    assert parts(made(), 3, 1) == [(0, 3)]


def test_long_contexts_are_computed_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_SCRATCH_BYTES", 20 * 8 * ONE_SPLIT_BYTES)
    space = made()
    assert space.scratch[HEADS].rows_at(MOST_CONTEXT) == 16
    assert parts(space, ROWS, MOST_CONTEXT) == [(0, 16), (16, 32), (32, 40)]
    assert parts(space, ROWS, MOST_CONTEXT // 2) == [(0, 32), (32, 40)]
    assert parts(space, ROWS, SPLIT_TOKENS) == [(0, ROWS)]


def test_sixteen_rows_fit_whatever_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_SCRATCH_BYTES", 1)
    assert parts(made(), 17, MOST_CONTEXT) == [(0, 16), (16, 17)]


def test_a_batch_without_decoding_rows_has_no_decode_parts() -> None:
    assert parts(made(), 0, 0) == []


def test_a_pass_takes_the_first_rows() -> None:
    space = made()
    first = space.activations.first(5)
    for shape, part, inputs, outputs in zip(SPEC.group_shapes, space.parts, first.inputs, first.outputs, strict=True):
        assert part.shape == (4, 64, len(shape.widths), 16)
        assert inputs.shape == (5, shape.inputs)
        assert outputs.shape == (5, sum(shape.widths))
    assert first.hidden.data_ptr() == space.activations.hidden.data_ptr()


def test_rows_of_every_width_begin_at_multiples_of_sixteen_bytes() -> None:
    space = made(PLANS["experts"](), torch.bfloat16)
    widths = {outputs.shape[1]: outputs.stride(0) for outputs in space.activations.outputs}
    assert widths[8 + 1 + 80 + 80] == 176  # a router, a gate of one column, a shared expert's gate and up
    assert all(stride % 8 == 0 for stride in widths.values())


def test_experts_have_room_for_the_largest_layer() -> None:
    room = made(PLANS["experts"](), torch.bfloat16).experts
    assert room is not None
    assert (room.chosen.numel(), room.inner.numel(), room.done.numel()) == (64 * 3, 64 * 3 * 48, 64 * 3 * 96)
    assert made().experts is None


def test_logits_take_bounded_memory() -> None:
    assert made().logits.shape == (256, SPEC.vocab_size)
