"""What adapters change in the embedding and the head: LoRA is added, or rows are replaced.

The tables have two sides: the embedding, then the head. A and B are laid out as in core/lora_layout.py. Batches of such
adapters are launched kernel by kernel, so these kernels are in no captured graph.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, MAX_RANK, MAX_ROWS, PANEL, RANK_STEP
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.model.dtype import Dtype
from caraserve.util.units import ceil_div

_COLUMNS = 2 * PANEL  # of an embedding, or of logits, per program
_ROWS = 16  # rows of A per program
_INPUTS = 256  # numbers of a row that a program multiplies at a time

_PANEL = tl.constexpr(PANEL)
_STEP = tl.constexpr(RANK_STEP)
_F32 = tl.constexpr(Dtype.F32.value)
_BF16 = tl.constexpr(Dtype.BF16.value)


@dataclass(frozen=True, slots=True)
class VocabularyTables:
    """By side and adapter slot: addresses, and what is changed. In device memory, for a multiple of 16 slots."""

    a: Tensor  # int64 [2, slots] of A, or of the new rows
    b: Tensor  # int64 [2, slots]
    rank: Tensor  # int32 [2, slots] padded, as the new rows are; 0: nothing is changed
    rows: Tensor  # int32 [2, slots] how many rows are replaced; 0: LoRA is added
    scale: Tensor  # float32 [2, slots]
    tokens: Tensor  # int32 [2, slots, MAX_ROWS] whose rows are replaced
    dtype: Tensor  # int32 [slots] value of the adapter's `Dtype`


@triton.jit
def _times_b(left, address, rank, column, inside, WEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiplies left[rank], at an address, by B[rank, column]."""
    b = tl.multiple_of(address.to(tl.pointer_type(WEIGHT)), 64) + column // _PANEL * rank * _PANEL + column % _PANEL
    row, total = tl.arange(0, _STEP), tl.zeros(column.shape, tl.float32)
    for first in range(0, rank, _STEP):
        factors = tl.load(left + first + row).to(tl.float32)
        weights = tl.load(b[None, :] + (first + row)[:, None] * _PANEL, mask=inside[None, :], other=0.0)
        total += tl.sum(factors[:, None] * weights.to(tl.float32), 0)
    return total


@triton.jit
def _embedding_lora(a, b, rank, token, column, inside, WEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    return _times_b(a.to(tl.pointer_type(WEIGHT)) + token * rank, b, rank, column, inside, WEIGHT)


@triton.jit
def _embedding_row(a, row, column, inside, width, WEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(a.to(tl.pointer_type(WEIGHT)) + row * width + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def change_embedding_kernel(  # type: ignore[no-untyped-def]
    hidden, history, positions, token_slot, token_position, token_adapter,
    a_table, b_table, rank_table, rows_table, scale_table, tokens_table, dtype_table,
    embed_scale, hidden_stride, history_stride, positions_stride, width,
    ROWS: tl.constexpr, A_STEP: tl.constexpr, HAS_POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program changes BLOCK columns of one token's embedding."""
    number, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    adapter, position = tl.load(token_adapter + number), tl.load(token_position + number)
    rank = tl.load(rank_table + adapter)
    if (rank > 0) & (position >= 0):
        token = tl.load(history + tl.load(token_slot + number).to(tl.int64) * history_stride + position).to(tl.int64)
        inside, at = (column < width) & (token >= 0), hidden + number * hidden_stride + column
        rows, code = tl.load(rows_table + adapter), tl.load(dtype_table + adapter)
        a, b = tl.load(a_table + adapter), tl.load(b_table + adapter)
        if rows > 0:
            place = tl.arange(0, ROWS)
            changed = tl.load(tokens_table + adapter * ROWS + place, mask=place < rows, other=-1)
            row = tl.max(tl.where(changed == token, place, -1), 0).to(tl.int64)
            inside = inside & (row >= 0)
            padded = tl.cdiv(width, A_STEP) * A_STEP
            if code == _F32:
                result = _embedding_row(a, row, column, inside, padded, tl.float32)
            elif code == _BF16:
                result = _embedding_row(a, row, column, inside, padded, tl.bfloat16)
            else:
                result = _embedding_row(a, row, column, inside, padded, tl.float16)
            result = result * embed_scale
            if HAS_POSITIONS:
                result += tl.load(positions + position.to(tl.int64) * positions_stride + column, mask=inside, other=0.0)
        else:
            token = tl.maximum(token, 0)
            if code == _F32:
                result = _embedding_lora(a, b, rank, token, column, inside, tl.float32)
            elif code == _BF16:
                result = _embedding_lora(a, b, rank, token, column, inside, tl.bfloat16)
            else:
                result = _embedding_lora(a, b, rank, token, column, inside, tl.float16)
            base = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            result = base + result * (tl.load(scale_table + adapter) * embed_scale)
        tl.store(at, result.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _products(x, address, row, rank, width, padded, WEIGHT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiplies x[width], at an address, by rows of A."""
    a = tl.multiple_of(address.to(tl.pointer_type(WEIGHT)), 64) + row[:, None] * padded
    total = tl.zeros(row.shape, tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        values = tl.load(x + column, mask=column < width, other=0.0).to(tl.float32)
        weights = tl.load(a + column[None, :], mask=(row < rank)[:, None] & (column < width)[None, :], other=0.0)
        total += tl.sum(weights.to(tl.float32) * values[None, :], 1)
    return total


@triton.jit
def head_products_kernel(  # type: ignore[no-untyped-def]
    x, products, logits, bias, output_token, token_adapter,
    a_table, rank_table, rows_table, tokens_table, dtype_table,
    x_stride, logits_stride, width,
    RANKS: tl.constexpr, A_STEP: tl.constexpr, HAS_BIAS: tl.constexpr, MOST_ROWS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program multiplies one output's row by ROWS rows of A, or by new rows, whose products are logits."""
    output, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.load(output_token + output)
    adapter = tl.load(token_adapter + token, mask=token >= 0, other=0)
    rank = tl.load(rank_table + adapter)
    if tl.program_id(1) * ROWS < rank:
        rows, code, a = tl.load(rows_table + adapter), tl.load(dtype_table + adapter), tl.load(a_table + adapter)
        at, padded = x + output * x_stride, tl.cdiv(width, A_STEP) * A_STEP
        if code == _F32:
            total = _products(at, a, row, rank, width, padded, tl.float32, BLOCK)
        elif code == _BF16:
            total = _products(at, a, row, rank, width, padded, tl.bfloat16, BLOCK)
        else:
            total = _products(at, a, row, rank, width, padded, tl.float16, BLOCK)
        if rows == 0:
            tl.store(products + output * RANKS + row, total, mask=row < rank)
        else:
            changed = tl.load(tokens_table + adapter * MOST_ROWS + row, mask=row < rows, other=0)
            if HAS_BIAS:
                total += tl.load(bias + changed, mask=row < rows, other=0.0).to(tl.float32)
            to = logits + output * logits_stride + changed
            tl.store(to, total.to(logits.dtype.element_ty), mask=row < rows)


@triton.jit
def head_expand_kernel(  # type: ignore[no-untyped-def]
    products, logits, output_token, token_adapter, b_table, rank_table, rows_table, scale_table, dtype_table,
    logits_stride, vocab, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program adds the LoRA of BLOCK logits of one output."""
    output, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(output_token + output)
    adapter = tl.load(token_adapter + token, mask=token >= 0, other=0)
    rank = tl.load(rank_table + adapter)
    if (rank > 0) & (tl.load(rows_table + adapter) == 0):
        inside, left = column < vocab, products + output * RANKS
        code, b = tl.load(dtype_table + adapter), tl.load(b_table + adapter)
        if code == _F32:
            total = _times_b(left, b, rank, column, inside, tl.float32)
        elif code == _BF16:
            total = _times_b(left, b, rank, column, inside, tl.bfloat16)
        else:
            total = _times_b(left, b, rank, column, inside, tl.float16)
        at = logits + output * logits_stride + column
        result = tl.load(at, mask=inside, other=0.0).to(tl.float32) + total * tl.load(scale_table + adapter)
        tl.store(at, result.to(logits.dtype.element_ty), mask=inside)


def change_embeddings(
    hidden: Tensor,
    history: Tensor,
    tokens: TokenTables,
    adapters: Tensor,
    tables: VocabularyTables,
    scale: float = 1.0,
    positions: Tensor | None = None,
) -> None:
    """Changes embeddings, [tokens, width], that `embed` has written with the same arguments, by the adapter of each
    token. `adapters`: int32 [tokens], slots."""
    count, width = hidden.shape
    change_embedding_kernel[(count, ceil_div(width, _COLUMNS))](
        hidden, history, hidden if positions is None else positions, tokens.slot, tokens.position, adapters,
        tables.a[0], tables.b[0], tables.rank[0], tables.rows[0], tables.scale[0], tables.tokens[0], tables.dtype,
        scale, hidden.stride(0), history.stride(0), 0 if positions is None else positions.stride(0), width,
        ROWS=MAX_ROWS, A_STEP=A_COLUMNS, HAS_POSITIONS=positions is not None, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip


def change_logits(
    logits: Tensor,
    x: Tensor,
    products: Tensor,
    output_tokens: Tensor,
    adapters: Tensor,
    tables: VocabularyTables,
    bias: Tensor | None = None,
) -> None:
    """Changes logits, [outputs, vocab], the head's product of `x` [outputs, width] and its `bias`, by the adapter of
    each output.

    products: float32 [at least outputs, MAX_RANK], overwritten; output_tokens: int32 [outputs], numbers of tokens in
    the batch; adapters: int32 [tokens], slots.
    """
    (count, vocab), width = logits.shape, x.shape[1]
    head_products_kernel[(count, MAX_RANK // _ROWS)](
        x, products, logits, logits if bias is None else bias, output_tokens, adapters,
        tables.a[1], tables.rank[1], tables.rows[1], tables.tokens[1], tables.dtype,
        x.stride(0), logits.stride(0), width,
        RANKS=MAX_RANK, A_STEP=A_COLUMNS, HAS_BIAS=bias is not None, MOST_ROWS=MAX_ROWS, ROWS=_ROWS, BLOCK=_INPUTS,
        num_warps=4,
    )  # fmt: skip
    head_expand_kernel[(count, ceil_div(vocab, _COLUMNS))](
        products, logits, output_tokens, adapters, tables.b[1], tables.rank[1], tables.rows[1], tables.scale[1],
        tables.dtype, logits.stride(0), vocab, RANKS=MAX_RANK, BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
