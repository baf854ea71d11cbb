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
from caraserve.gpu.kernels.lora import Segments, SiteTables
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.gpu.linear import fp8, quantized
from caraserve.gpu.linear.formats import TORCH_CODES
from caraserve.gpu.weights import TORCH_DTYPES
from caraserve.model.dtype import Code, Dtype
from caraserve.util.units import align_up
from tests.gpu_device.nearest_codes import nearest_codes


@contextmanager
def torch_kernels() -> Iterator[None]:
    """Makes passes use these instead of Triton's kernels, on one thread of torch: more would only wait for one
    another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("embed", "rms_norm", "rotate_and_append", "silu_mul"):
            patch.setattr(decoder, name, globals()[name])
        patch.setattr(TritonDecode, "attend", attend_decode)
        patch.setattr(TritonPrefill, "attend", attend_prefill)
        for name in ("lora_shrink", "lora_expand"):
            patch.setattr(lora_pass, name, globals()[name])
        for name in ("round_rows", "multiply"):
            patch.setattr(quantized, name, globals()[name])
        patch.setattr(fp8, "scale_rows", scale_rows)
        yield
    torch.set_num_threads(threads)


def embed(history: Tensor, weight: Tensor, tokens: TokenTables, hidden: Tensor) -> None:
    for row in range(len(hidden)):
        slot, position = int(tokens.slot[row]), int(tokens.position[row])
        if position == NO_TOKEN:
            hidden[row] = 0.0
        elif history[slot, position] >= 0:  # otherwise it stands for a vector, which is there already
            hidden[row] = weight[int(history[slot, position])]


def rms_norm(
    hidden: Tensor, weight: Tensor, out: Tensor, eps: float, delta: Tensor | None = None, rows: Tensor | None = None
) -> None:
    named = list(range(len(out))) if rows is None else rows.tolist()
    at = [row for row in named if row != NO_TOKEN]
    if delta is not None:
        hidden[at] += delta[at]
    normed = _normed(hidden[at], weight, eps)
    out[[index for index, row in enumerate(named) if row != NO_TOKEN]] = normed


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate_and_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    tokens: TokenTables,
    cache: PagedCache,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    block, kv_heads, dim = cache.keys.shape[1:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    for row in range(len(qkv)):
        slot, position = int(tokens.slot[row]), int(tokens.position[row])
        if position == NO_TOKEN:
            continue
        q, k, v = torch.split(qkv[row].view(-1, dim), [heads, kv_heads, kv_heads])
        if norms is not None:
            q, k = _normed(q, norms[0], eps), _normed(k, norms[1], eps)
        place = int(cache.block_table[slot, position // block]), position % block
        cache.keys[place] = _rotated(k, cos[position], sin[position])
        cache.values[place] = v
        qkv[row, : heads * dim] = _rotated(q, cos[position], sin[position]).reshape(-1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    gate, up = gate_up.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


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
            _attend(q, cache, tokens, row, 1, out, how)


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
            _attend(q, cache, tokens, first, count, out, how)


def _attend(
    q: Tensor, cache: PagedCache, tokens: TokenTables, row: int, count: int, out: Tensor, how: LayerAttention
) -> None:
    """Computes attention of `count` tokens of one request, from a row on."""
    slot, position = int(tokens.slot[row]), int(tokens.position[row])
    block, kv_heads, dim = cache.keys.shape[1:]
    end = position + count
    blocks = cache.block_table[slot, : -(-end // block)].long()
    keys, values = (part[blocks].reshape(-1, kv_heads, dim)[:end] for part in (cache.keys, cache.values))
    queries = q[row : row + count].view(count, kv_heads, -1, dim)
    scores = torch.einsum("thgd,shd->hgts", queries, keys) * how.scale
    scores = scores if how.cap is None else how.cap * torch.tanh(scores / how.cap)
    at, seen = torch.arange(position, end)[:, None], torch.arange(end)[None, :]
    scores = scores.masked_fill((seen > at) | (seen <= at - how.window), float("-inf"))
    weights = scores.softmax(-1)
    # Masked values may be NaN.
    values = torch.where((seen > at - how.window).any(0)[:, None, None], values, 0.0)
    out[row : row + count] = torch.einsum("hgts,shd->thgd", weights, values).reshape(count, -1)


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
                panels = _at(address, (align_up(width, PANEL) // PANEL, rank, PANEL), dtype)
                b = panels.transpose(0, 1).reshape(rank, -1)[:, :width]
                delta = shrunk[rows, projection, :rank] @ b
                y[rows, column : column + width] += float(tables.scale[projection, slot]) * delta


def round_rows(x: Tensor, codes: Tensor, scales: Tensor, code: Code, given: Tensor | None = None) -> None:
    values, own = nearest_codes(x, code, given)
    codes.copy_(values)
    if given is None:
        scales[: len(x)] = own


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


def scale_rows(out: Tensor, scale: Tensor, x_scale: Tensor | None = None, bias: Tensor | None = None) -> None:
    out.copy_(_scaled(out.float(), scale, x_scale, bias))


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
