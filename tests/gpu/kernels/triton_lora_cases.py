"""Compares prefill LoRA with plain matmuls; run by test_triton_cases.py in Triton's interpreter, or on a GPU."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, PANEL, RANK_STEP
from caraserve.gpu.kernels.lora import (
    PLANES,
    Segments,
    SiteTables,
    cut_segments,
    lora_expand,
    lora_shrink,
    most_segments,
)
from caraserve.model.dtype import Dtype
from caraserve.util.units import align_up
from tests.gpu.honest_dots import honest_dots

pytestmark = pytest.mark.usefixtures(honest_dots.__name__)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}
Cut = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass
class Adapters:
    """Slots of weights in the product's layout, and as plain matrices: {(projection, slot): (A, B, scale)}; factors and
    biases of the outputs, [2, outputs], of slots that have them."""

    tables: SiteTables
    plain: dict[tuple[int, int], tuple[Tensor, Tensor, float]]
    vectors: dict[tuple[int, int], Tensor]
    keep: list[Tensor]


def packed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Packs A [rank, in] and B [rank, out] as core/lora_layout.py defines; all required padding is zero."""
    (rank, inputs), outputs = a.shape, b.shape[1]
    padded = align_up(rank, RANK_STEP)
    rows = torch.zeros(padded, align_up(inputs, A_COLUMNS), dtype=a.dtype)
    rows[:rank, :inputs] = a
    wide = torch.zeros(padded, align_up(outputs, PANEL), dtype=b.dtype)
    wide[:rank, :outputs] = b
    panels = wide.view(padded, -1, PANEL).transpose(0, 1).contiguous()  # [out / 64, padded rank, 64]
    return rows.to(DEVICE), panels.to(DEVICE)


def adapters(inputs: int, widths: tuple[int, ...], ranks: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> Adapters:
    """Returns random adapters. `ranks` and `dtypes` by slot; slot 0 is the base model."""
    generator = torch.Generator().manual_seed(len(ranks) + inputs)
    shape = (len(widths), len(ranks))
    a_at, b_at, vectors_at = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    rank_at = torch.zeros(shape, dtype=torch.int32)
    scale_at = torch.full(shape, float("nan"))
    plain, vectors, keep = {}, {}, []
    for slot, by_projection in enumerate(ranks):
        for projection, rank in enumerate(by_projection):
            if rank == 0:
                continue
            a = torch.randn(rank, inputs, generator=generator).to(dtypes[slot])
            b = torch.randn(rank, widths[projection], generator=generator).to(dtypes[slot])
            scale = 0.5 + 0.25 * slot
            plain[projection, slot] = (a, b, scale)
            pair = packed(a, b)
            keep += pair
            a_at[projection, slot], b_at[projection, slot] = pair[0].data_ptr(), pair[1].data_ptr()
            rank_at[projection, slot], scale_at[projection, slot] = rank, scale
            if slot % 2 == 0:
                both = torch.randn(2, align_up(widths[projection], PANEL), generator=generator)
                vectors[projection, slot] = both[:, : widths[projection]]
                keep.append(both.to(DEVICE))
                vectors_at[projection, slot] = keep[-1].data_ptr()
    codes = torch.tensor([CODES[dtype].value for dtype in dtypes], dtype=torch.int32)
    tables = SiteTables(*(table.to(DEVICE) for table in (a_at, b_at, rank_at, scale_at, codes, vectors_at)))
    return Adapters(tables, plain, vectors, keep)


def expected(x: Tensor, y: Tensor, slots: np.ndarray, known: Adapters, widths: tuple[int, ...]) -> Tensor:
    result = y.double()
    before = 0
    for projection, width in enumerate(widths):
        for token, slot in enumerate(slots.tolist()):
            if (projection, slot) in known.plain:
                a, b, scale = known.plain[projection, slot]
                result[token, before : before + width] += scale * (x[token].double() @ a.double().T @ b.double())
                if (projection, slot) in known.vectors:
                    factor, bias = known.vectors[projection, slot].double()
                    result[token, before : before + width] *= factor
                    result[token, before : before + width] += bias
        before += width
    return result


def run(x: Tensor, y: Tensor, cut: Cut, known: Adapters, widths: tuple[int, ...], ranks: int, spare: int = 2) -> Tensor:
    """Returns `y` with LoRA added. `spare` segments have no rows; memory that must not be read is NaN."""
    order, first, rows, slot = (torch.from_numpy(np.ascontiguousarray(part)) for part in cut)
    fill = [torch.cat([part, torch.zeros(spare, dtype=torch.int32)]).to(DEVICE) for part in (first, rows, slot)]
    part = torch.full((PLANES, len(x), len(widths), ranks), float("nan"), device=DEVICE)
    shrunk = torch.full(part.shape[1:], float("nan"), dtype=x.dtype, device=DEVICE)
    out = y.clone().to(DEVICE)
    segments = Segments(order.to(DEVICE), *fill)
    lora_shrink(x.to(DEVICE), part, shrunk, segments, known.tables)
    columns = tuple(sum(widths[:projection]) for projection in range(len(widths)))
    lora_expand(out, shrunk, segments, known.tables, columns, widths)
    return out.cpu()


def batch(tokens: int, inputs: int, widths: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=generator) / inputs**0.5
    return x.to(dtype), torch.randn(tokens, sum(widths), generator=generator).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 2e-2), (torch.bfloat16, 2e-1)])
@pytest.mark.parametrize(
    ("inputs", "widths", "ranks"),
    [
        (80, (144, 48, 48), [(0, 0, 0), (8, 8, 8), (64, 0, 24), (5, 72, 0)]),
        (300, (70,), [(0,), (16,), (1,), (40,)]),
        (32, (130, 3, 33, 64, 5, 70), [(0,) * 6, (8, 0, 8, 8, 1, 8), (0,) * 6, (128, 16, 0, 8, 40, 24)]),
    ],
)
def test_prefill_lora_is_two_matmuls(
    inputs: int, widths: tuple[int, ...], ranks: list[tuple[int, ...]], dtype: torch.dtype, tolerance: float
) -> None:
    known = adapters(inputs, widths, ranks, [dtype, torch.float32, torch.bfloat16, torch.float16])
    slots = np.array([1] * 3 + [0] * 2 + [2] * 70 + [3] * 5 + [1] * 2, np.int32)
    x, y = batch(len(slots), inputs, widths, dtype)
    result = run(x, y, cut_segments(slots), known, widths, max(map(max, ranks)))
    torch.testing.assert_close(result.double(), expected(x, y, slots, known, widths), atol=tolerance, rtol=tolerance)
    assert torch.equal(result[slots == 0], y[slots == 0])


def test_a_tokens_bits_do_not_depend_on_its_batch() -> None:
    widths, ranks = (96, 64), [(0, 0), (8, 64), (24, 8), (64, 0)]
    known = adapters(112, widths, ranks, [torch.float16] * 4)
    slots = np.array([3, 1, 2, 1, 0] * 30, np.int32)
    x, y = batch(len(slots), 112, widths, torch.float16)
    together = run(x, y, cut_segments(slots), known, widths, 64)
    for token in (0, 1, 2, 78, 149):
        one = slice(token, token + 1)
        alone = run(x[one], y[one], cut_segments(slots[one]), known, widths, 64)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("outcome", [0, 1])
def test_rows_computed_by_workers_are_not_changed(outcome: int) -> None:
    known = adapters(48, (64,), [(0,), (8,), (16,)], [torch.float32] * 3)
    slots = np.array([1, 2, 1], np.int32)
    x, y = batch(3, 48, (64,), torch.float32)
    both = run(x, y, cut_segments(slots), known, (64,), 16)
    assert not torch.equal(both, y)
    known.tables = replace(known.tables, gate=torch.tensor([outcome], dtype=torch.int32, device=DEVICE))
    gated = run(x, y, cut_segments(slots), known, (64,), 16)
    assert torch.equal(gated, y if outcome else both)


def test_segments_cover_each_adapted_token_once() -> None:
    generator = np.random.default_rng(1)
    for tokens, adapters_ in ((1, 1), (64, 1), (65, 1), (500, 7), (37, 37)):
        slots = generator.integers(0, adapters_ + 1, tokens).astype(np.int32)
        order, first, rows, slot = cut_segments(slots)
        assert len(rows) <= most_segments(tokens, adapters_)
        assert all(1 <= count <= 64 for count in rows)
        named = [
            (int(token), int(which))
            for start, count, which in zip(first, rows, slot, strict=True)
            for token in order[start : start + count]
        ]
        assert sorted(named) == [(token, int(which)) for token, which in enumerate(slots) if which > 0]


def test_a_batch_of_base_rows_has_no_segments() -> None:
    assert [len(part) for part in cut_segments(np.zeros(9, np.int32))] == [0, 0, 0, 0]
