"""Compares the kernels of a decoder with fp64, at a model's sizes."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from caraserve.gpu.attention.base import LayerAttention
from caraserve.gpu.attention.triton import ATTENTION
from caraserve.gpu.kernels.layers import embed, rms_norm, rotate_and_append, silu_mul
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.model.dtype import Dtype
from caraserve.util.units import ceil_div
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.results import check_close, check_same_bits
from scripts.laboratory.gpu.setup import CheckSetup

_BLOCK = 16
_EPS = 1e-5
_ROUNDED = {Dtype.F32: 2e-5, Dtype.BF16: 2.0**-7, Dtype.F16: 2.0**-10}
_ATTENDED = {Dtype.F32: 2e-5, Dtype.BF16: 2.0**-6, Dtype.F16: 2.0**-9}
_SLOTS = 4


def check_layers(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks embedding, norm with residual sum, and SiLU."""
    shape, generator, tokens = setup.effort.shape, acc.generator(case), 1 + 7 * case % 40
    tolerance = _ROUNDED[acc.dtype]
    hidden, delta = (acc.random(generator, tokens, shape.hidden) for _ in range(2))
    weight = acc.random(generator, shape.hidden, dtype=torch.float32)
    total = hidden.double() + delta.double()
    normed, gate_up = _poisoned(acc, tokens, shape.hidden), acc.random(generator, tokens, 2 * shape.intermediate)
    activated = _poisoned(acc, tokens, shape.intermediate)
    history = torch.arange(3 * 64, dtype=torch.int32, device=acc.place).view(3, 64) % shape.vocab
    embedding, embedded = acc.random(generator, shape.vocab, shape.hidden), _poisoned(acc, tokens, shape.hidden)
    slots, positions = [token % 3 for token in range(tokens)], [token % 64 for token in range(tokens)]
    places = _tables(acc, slots, positions)

    def issue() -> None:
        rms_norm(hidden, weight, normed, _EPS, delta)
        silu_mul(gate_up, activated)
        embed(history, embedding, places, embedded)

    acc.run(issue)
    acc.settle()
    gate, up = gate_up.double().chunk(2, 1)
    known = hidden.double()
    expected = weight.double() * known / torch.sqrt(known.square().mean(-1, keepdim=True) + _EPS)
    return max(
        check_close(f"residual sum, {acc.dtype.name}", hidden, total, tolerance),
        check_close(f"RMS norm, {acc.dtype.name}", normed, expected, tolerance),
        check_close(f"SiLU, {acc.dtype.name}", activated, torch.nn.functional.silu(gate) * up, tolerance),
        check_close(
            f"embedding, {acc.dtype.name}", embedded, embedding[history[slots, positions].long()].double(), 0.0
        ),
    )


@dataclass(frozen=True, slots=True)
class Paged:
    """Requests whose contexts are in blocks of random order. Everything past a context is NaN."""

    cache: PagedCache
    memory: Tensor  # [blocks, 2, block tokens, kv heads, dim]

    @classmethod
    def random(cls, acc: Accelerator, generator: torch.Generator, context: int, kv_heads: int, dim: int) -> "Paged":
        per_slot = ceil_div(context, _BLOCK)
        blocks = _SLOTS * per_slot
        memory = acc.random(generator, blocks, 2, _BLOCK, kv_heads, dim)
        order = torch.randperm(blocks, generator=generator, device=acc.place)
        table = order.view(_SLOTS, per_slot).to(torch.int32)
        return cls(PagedCache(memory[:, 0], memory[:, 1], table), memory)

    def poison(self, slot: int, first: int) -> None:
        """Overwrites a request's keys and values with NaN from position `first` on."""
        for position in range(first, self.cache.block_table.shape[1] * _BLOCK):
            block = int(self.cache.block_table[slot, position // _BLOCK])
            self.memory[block, :, position % _BLOCK] = torch.nan

    def attended(self, query: Tensor, slot: int, position: int) -> Tensor:
        """Returns the attention of one token, [heads · dim], float64."""
        kv_heads, dim = self.memory.shape[3:]
        seen = torch.arange(position + 1, device=query.device)
        blocks = self.cache.block_table[slot].long()[seen // _BLOCK]
        keys, values = (self.memory[blocks, half, seen % _BLOCK].double() for half in range(2))
        queries = query.double().view(kv_heads, -1, dim)
        weights = torch.softmax(torch.einsum("kgd,skd->kgs", queries, keys) * dim**-0.5, -1)
        return torch.einsum("kgs,skd->kgd", weights, values).reshape(-1)


def check_attention(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks decoding rows and prompt chunks over paged keys and values; heads share keys in every other case."""
    rng, generator, shape = random.Random(case), acc.generator(case), setup.effort.shape
    dim = shape.hidden // shape.heads
    kv_heads = shape.heads if case % 2 else max(1, shape.heads // 4)
    heads, context = shape.heads, setup.effort.context
    paged = Paged.random(acc, generator, context, kv_heads, dim)
    ends = [context - 1, *(rng.randrange(1, context) for _ in range(_SLOTS - 1))]  # the first in several splits
    for slot, end in enumerate(ends):
        paged.poison(slot, end + 1)
    q = acc.random(generator, _SLOTS, heads * dim)
    out, tokens = torch.full_like(q, torch.nan), _tables(acc, list(range(_SLOTS)), ends)
    rows = torch.arange(_SLOTS, dtype=torch.int32, device=acc.place)
    scratch, how = ATTENTION.decode.scratch(_SLOTS, heads, dim, context, acc.place), LayerAttention(dim**-0.5)
    for part in (scratch.sums, scratch.best, scratch.mass):
        part.fill_(torch.nan)
    acc.run(lambda: ATTENTION.decode.attend(q, paged.cache, tokens, rows, out, scratch, how))
    acc.settle()
    expected = torch.stack([paged.attended(q[slot], slot, end) for slot, end in enumerate(ends)])
    worst = check_close(f"decode attention, {acc.dtype.name}", out, expected, _ATTENDED[acc.dtype])
    alone = torch.full_like(q, torch.nan)
    acc.run(lambda: ATTENTION.decode.attend(q, paged.cache, tokens, rows[1:2], alone, scratch, how))
    acc.settle()
    check_same_bits("decode attention", alone[1:2], out[1:2])
    return max(worst, _check_prefill(acc, generator, paged, ends[0], heads * dim))


def _check_prefill(acc: Accelerator, generator: torch.Generator, paged: Paged, end: int, width: int) -> float:
    """Checks the last tokens of the first request as chunks, in tiles, and that their bits do not depend on the cut."""
    dim = paged.cache.keys.shape[3]
    most, how = ATTENTION.prefill.tile_tokens(acc.torch_dtype, dim), LayerAttention(dim**-0.5)
    count = min(end + 1, most + most // 2)
    q = acc.random(generator, count, width)
    tokens = _tables(acc, [0] * count, list(range(end + 1 - count, end + 1)))

    def attended_in_tiles_of(size: int) -> Tensor:
        firsts = list(range(0, count, size))
        counts = [min(size, count - first) for first in firsts]
        tiles = (torch.tensor([*part, 0], dtype=torch.int32, device=acc.place) for part in (firsts, counts))
        first, taken = tiles  # an unused tile is last
        out = torch.full_like(q, torch.nan)
        acc.run(lambda: ATTENTION.prefill.attend(q, paged.cache, tokens, first, taken, out, how))
        acc.settle()
        return out

    out = attended_in_tiles_of(most)
    check_same_bits("prefill attention of another chunking", attended_in_tiles_of(max(1, most * 5 // 8)), out)
    wanted = sorted({0, count // 2, count - 1})
    expected = torch.stack([paged.attended(q[index], 0, end + 1 - count + index) for index in wanted])
    return check_close(f"prefill attention, {acc.dtype.name}", out[wanted], expected, _ATTENDED[acc.dtype])


def check_rotation(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks rotary embedding of queries and keys, and the cached keys and values."""
    shape, generator = setup.effort.shape, acc.generator(case)
    dim, heads, kv_heads = shape.hidden // shape.heads, shape.heads, shape.kv_heads
    paged = Paged.random(acc, generator, 64, kv_heads, dim)
    paged.memory.fill_(torch.nan)
    slots, positions = [0, 2, 2, 3], [63, 0, 17, case % 64]
    qkv = acc.random(generator, len(slots), (heads + 2 * kv_heads) * dim)
    angles = torch.arange(64, device=acc.place)[:, None] * 0.9 ** torch.arange(dim // 2, device=acc.place)[None, :]
    cos, sin = torch.cos(angles).float(), torch.sin(angles).float()
    wide = qkv.double()
    k_at, v_at = heads * dim, (heads + kv_heads) * dim
    q, k, v = wide[:, :k_at], wide[:, k_at:v_at], wide[:, v_at:]
    wanted_q, wanted_k = (_rotated(part, dim, cos[positions], sin[positions]) for part in (q, k))
    tokens = _tables(acc, slots, positions)
    acc.run(lambda: rotate_and_append(qkv, cos, sin, tokens, paged.cache, None, _EPS))
    acc.settle()
    places = torch.tensor(positions, device=acc.place)
    blocks = paged.cache.block_table[slots, (places // _BLOCK)].long()
    kept = paged.memory[blocks, :, places % _BLOCK].flatten(2)  # [tokens, 2, kv heads · dim]
    tolerance = _ROUNDED[acc.dtype]
    return max(
        check_close(f"rotated queries, {acc.dtype.name}", qkv[:, : heads * dim], wanted_q, tolerance),
        check_close(f"keys kept, {acc.dtype.name}", kept[:, 0], wanted_k, tolerance),
        check_close(f"values kept, {acc.dtype.name}", kept[:, 1], v, 0.0),
    )


def _rotated(heads: Tensor, dim: int, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = heads.view(len(heads), -1, dim).chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([low * c - high * s, high * c + low * s], -1).flatten(1)


def _tables(acc: Accelerator, slots: list[int], positions: list[int]) -> TokenTables:
    slot, position = (torch.tensor(part, dtype=torch.int32, device=acc.place) for part in (slots, positions))
    return TokenTables(slot, position)


def _poisoned(acc: Accelerator, rows: int, columns: int) -> Tensor:
    return torch.full((rows, columns), torch.nan, dtype=acc.torch_dtype, device=acc.place)
