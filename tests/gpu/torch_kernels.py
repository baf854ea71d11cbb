"""Replaces the Triton kernels by torch and numpy on the host, for tests of everything around them.

Triton's interpreter takes a hundred times as long. triton_*_cases.py check the Triton kernels themselves.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, PANEL
from caraserve.gpu.attention.base import LayerAttention, Scratch
from caraserve.gpu.attention.triton import TritonDecode, TritonPrefill
from caraserve.gpu.forward import decoder, lora_pass
from caraserve.gpu.forward.batch import NO_TOKEN
from caraserve.gpu.kernels.grouped import GroupedMatrix
from caraserve.gpu.kernels.heads import Heads
from caraserve.gpu.kernels.lora import Segments, SiteTables
from caraserve.gpu.kernels.lora_sums import LoraSums
from caraserve.gpu.kernels.norms import NormWeights
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.gpu.kernels.vocabulary import VocabularyTables
from caraserve.gpu.linear import fp8, grouped, int8, quantized
from caraserve.gpu.linear.base import TORCH_CODES
from caraserve.gpu.weights import TORCH_DTYPES
from caraserve.model.dtype import Code, Dtype
from caraserve.model.plan import Activation
from caraserve.util.units import align_up
from tests.gpu_device import plain_layers
from tests.gpu_device.grouped_codes import plain_values
from tests.gpu_device.nearest_codes import nearest_codes
from tests.gpu_device.plain_layers import attend

_LAYERS = "embed", "multiply_by_gate", "apply_experts", "cap_logits", "apply_delta_net"


@contextmanager
def torch_kernels() -> Iterator[None]:
    """Makes passes use these instead of Triton's kernels, on one thread of torch: more would only wait for one
    another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in _LAYERS:
            patch.setattr(decoder, name, getattr(plain_layers, name))
        for name in (
            *("add_and_norm", "rotate_and_append", "activate"),
            *("change_embeddings", "change_logits", "embed_grouped"),
        ):
            patch.setattr(decoder, name, globals()[name])
        patch.setattr(TritonDecode, "attend", attend_decode)
        patch.setattr(TritonPrefill, "attend", attend_prefill)
        for name in ("lora_shrink", "lora_expand"):
            patch.setattr(lora_pass, name, globals()[name])
        for name in ("round_rows", "multiply", "dequantise"):
            patch.setattr(quantized, name, globals()[name])
        for module in (fp8, int8):
            patch.setattr(module, "scale_rows", scale_rows)
        patch.setattr(fp8, "halve_rows", halve_rows)
        patch.setattr(grouped, "multiply", multiply_grouped)
        patch.setattr(grouped, "dequantise", dequantise_grouped)
        yield
    torch.set_num_threads(threads)


def attend_decode(
    _: TritonDecode,
    q: Tensor,
    cache: PagedCache,
    tokens: TokenTables,
    row_token: Tensor,
    out: Tensor,
    scratch: Scratch,
    how: LayerAttention,
) -> None:
    for row in row_token.tolist():
        if row != NO_TOKEN:
            attend(q, cache, tokens, row, 1, out, how)


def attend_prefill(
    _: TritonPrefill,
    q: Tensor,
    cache: PagedCache,
    tokens: TokenTables,
    tile_first: Tensor,
    tile_tokens: Tensor,
    out: Tensor,
    how: LayerAttention,
) -> None:
    for first, count in zip(tile_first.tolist(), tile_tokens.tolist(), strict=True):
        if count:
            attend(q, cache, tokens, first, count, out, how)


def lora_shrink(x: Tensor, part: Tensor, shrunk: Tensor, segments: Segments, tables: SiteTables) -> None:
    for rows, slot in _segments(segments, tables):
        for projection in range(shrunk.shape[1]):
            rank = int(tables.rank[projection, slot])
            if rank:
                inputs = x.shape[1]
                address, dtype = int(tables.a[projection, slot]), Dtype(int(tables.dtype[slot]))
                a = _at(address, (rank, align_up(inputs, A_COLUMNS)), dtype)[:, :inputs]
                shrunk[rows, projection, :rank] = x[rows].float() @ a.T


def lora_expand(
    y: Tensor,
    shrunk: Tensor,
    segments: Segments,
    tables: SiteTables,
    columns: tuple[int, ...],
    outputs: tuple[int, ...],
) -> None:
    for rows, slot in _segments(segments, tables):
        for projection, (column, width) in enumerate(zip(columns, outputs, strict=True)):
            rank = int(tables.rank[projection, slot])
            if rank:
                address, dtype = int(tables.b[projection, slot]), Dtype(int(tables.dtype[slot]))
                delta = shrunk[rows, projection, :rank] @ _panels(address, width, rank, dtype)
                out = y[rows, column : column + width] + float(tables.scale[projection, slot]) * delta
                if vectors := int(tables.vectors[projection, slot]):
                    factor, bias = _at(vectors, (2, align_up(width, PANEL)), Dtype.F32)[:, :width]
                    out = out * factor + bias
                y[rows, column : column + width] = out.to(y.dtype)


def add_and_norm(
    hidden: Tensor,
    delta: Tensor | None,
    out: Tensor | None,
    pre: NormWeights | None,
    post: NormWeights | None = None,
    multiplier: float = 1.0,
    scalar: float = 1.0,
    rows: Tensor | None = None,
    lora: LoraSums | None = None,
) -> None:
    if lora is not None:
        assert delta is not None
        (role,) = lora.places
        delta = with_lora(delta, lora, role)
    plain_layers.add_and_norm(hidden, delta, out, pre, post, multiplier, scalar, rows)


def rotate_and_append(
    projected: Tensor, tokens: TokenTables, cache: PagedCache, heads: Heads, lora: LoraSums | None = None
) -> None:
    for role in () if lora is None else lora.places:
        first, count = getattr(heads, role), heads.heads if role == "q" else heads.kv_heads
        columns = projected[:, first : first + count * heads.head_dim]
        columns.copy_(with_lora(columns, lora, role))
    plain_layers.rotate_and_append(projected, tokens, cache, heads)


def activate(
    gate: Tensor | None,
    up: Tensor,
    out: Tensor,
    kind: Activation,
    row_gate: Tensor | None = None,
    lora: LoraSums | None = None,
) -> None:
    if lora is not None:
        gate, up = None if gate is None else with_lora(gate, lora, "gate"), with_lora(up, lora, "up")
    plain_layers.activate(gate, up, out, kind, row_gate)


def with_lora(product: Tensor, lora: LoraSums, role: str) -> Tensor:
    """Returns a projection's product, [tokens, outputs], with the LoRA whose sums are kept apart; bit by bit what
    bgmv_expand would leave in memory, but for sums in double precision that round twice."""
    result, (site, first), width = product.clone(), lora.places[role], product.shape[1]
    for token, slot in enumerate(lora.slots[: len(product)].tolist()):
        if int(lora.tables.rank[site, slot]) == 0:
            continue
        total = lora.sums[token, first : first + width].double()
        row = (product[token].double() + float(lora.tables.scale[site, slot]) * total).float()
        if vectors := int(lora.tables.vectors[site, slot]):
            factor, bias = _at(vectors, (2, align_up(width, PANEL)), Dtype.F32)[:, :width].double()
            row = (row.double() * factor + bias).float()
        result[token] = row.to(product.dtype)
    return result


def change_embeddings(
    hidden: Tensor,
    history: Tensor,
    tokens: TokenTables,
    adapters: Tensor,
    tables: VocabularyTables,
    scale: float = 1.0,
    positions: Tensor | None = None,
) -> None:
    for number, row in enumerate(hidden):
        adapter, position = int(adapters[number]), int(tokens.position[number])
        rank, dtype = int(tables.rank[0, adapter]), Dtype(int(tables.dtype[adapter]))
        if rank == 0 or position == NO_TOKEN or (token := int(history[int(tokens.slot[number]), position])) < 0:
            continue
        a, count = int(tables.a[0, adapter]), int(tables.rows[0, adapter])
        if count:
            if token in (changed := tables.tokens[0, adapter, :count].tolist()):
                rows = _at(a, (rank, align_up(len(row), A_COLUMNS)), dtype)[:, : len(row)]
                row.copy_(rows[changed.index(token)] * scale + (0.0 if positions is None else positions[position]))
        else:
            left = _at(a + token * rank * dtype.itemsize, (rank,), dtype)
            delta = left @ _panels(int(tables.b[0, adapter]), len(row), rank, dtype)
            row.add_(delta * float(tables.scale[0, adapter]) * scale)


def change_logits(
    logits: Tensor,
    x: Tensor,
    products: Tensor,
    output_tokens: Tensor,
    adapters: Tensor,
    tables: VocabularyTables,
    bias: Tensor | None = None,
) -> None:
    for output, row in enumerate(logits):
        token, inputs = int(output_tokens[output]), x.shape[1]
        adapter = int(adapters[token]) if token != NO_TOKEN else 0
        rank, dtype = int(tables.rank[1, adapter]), Dtype(int(tables.dtype[adapter]))
        if rank == 0:
            continue
        a = _at(int(tables.a[1, adapter]), (rank, align_up(inputs, A_COLUMNS)), dtype)[:, :inputs]
        found, count = a @ x[output].float(), int(tables.rows[1, adapter])
        if count:
            changed = tables.tokens[1, adapter, :count].long()
            row[changed] = (found[:count] + (0.0 if bias is None else bias[changed].float())).to(row.dtype)
        else:
            delta = found @ _panels(int(tables.b[1, adapter]), len(row), rank, dtype)
            row.add_(delta * float(tables.scale[1, adapter]))


def _panels(address: int, width: int, rank: int, dtype: Dtype) -> Tensor:
    """Returns B at an address, [rank, width]."""
    panels = _at(address, (align_up(width, PANEL) // PANEL, rank, PANEL), dtype)
    return panels.transpose(0, 1).reshape(rank, -1)[:, :width]


def round_rows(
    x: Tensor, codes: Tensor, scales: Tensor, code: Code, given: Tensor | None = None, *, as_numbers: bool = False
) -> bool:
    values, own = nearest_codes(x, code, given)
    is_marked = codes.dtype is torch.int8  # rows that are not finite, by their scales
    if is_marked:
        own = torch.where(values.isfinite().all(1), own if given is None else 1.0, torch.nan)
    has_scales = given is None or is_marked
    if has_scales:
        scales[: len(x)] = own
    codes.copy_(values * own[:, None] if as_numbers else values)
    return has_scales


def halve_rows(x: Tensor, halves: Tensor, scales: Tensor) -> None:
    exponent = x.float().abs().amax(1).clamp(min=2.0**-112).log2().floor() - 14
    scales.copy_(torch.exp2(exponent))
    halves.copy_(x.float() / scales[:, None])


def multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scale: Tensor,
    code: Code,
    capability: int,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    values = weight.view(TORCH_CODES[code]).float()
    out.copy_(_scaled(x.float() @ values.T, scale, x_scale, bias))


def scale_rows(
    sums: Tensor, out: Tensor, scale: Tensor, x_scale: Tensor | None = None, bias: Tensor | None = None
) -> None:
    out.copy_(_scaled(sums.float(), scale, x_scale, bias))


def dequantise(codes: Tensor, scale: Tensor, numbers: Tensor, code: Code, capability: int) -> None:
    numbers.copy_(codes.view(TORCH_CODES[code]).float() * scale[:, None])


def multiply_grouped(x: Tensor, weight: GroupedMatrix, out: Tensor, bias: Tensor | None = None) -> None:
    sums = x.float() @ plain_values(weight).to(x.dtype).float().T
    out.copy_(sums if bias is None else sums + bias.float())


def dequantise_grouped(weight: GroupedMatrix, numbers: Tensor) -> None:
    numbers.copy_(plain_values(weight))


def embed_grouped(history: Tensor, weight: GroupedMatrix, tokens: TokenTables, hidden: Tensor) -> None:
    plain_layers.embed(history, plain_values(weight).to(hidden.dtype), tokens, hidden)


def _scaled(sums: Tensor, scale: Tensor, x_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = sums * scale if x_scale is None else sums * scale * x_scale[:, None]
    return scaled if bias is None else scaled + bias.float()


def _segments(segments: Segments, tables: SiteTables) -> Iterator[tuple[list[int], int]]:
    """Yields (rows, adapter slot) of the segments that are computed on the device."""
    parts = zip(segments.first.tolist(), segments.rows.tolist(), segments.slot.tolist(), strict=True)
    for first, count, slot in parts:
        if count and (tables.gate is None or int(tables.gate) == 0):
            yield segments.order[first : first + count].tolist(), slot


def _at(address: int, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
    """Returns the values at an address as float32."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    memory: NDArray[np.uint8] = np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8).copy()
    return torch.from_numpy(memory).view(TORCH_DTYPES[dtype]).view(shape).float()
