"""Compares the kernels of a decoder with fp64, at a model's sizes."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from caraserve.gpu.attention.base import NO_WINDOW, LayerAttention
from caraserve.gpu.attention.triton import ATTENTION
from caraserve.gpu.kernels.elementwise import activate, cap_logits, embed, multiply_by_gate
from caraserve.gpu.kernels.heads import Heads, RopeTables, rotate_and_append
from caraserve.gpu.kernels.norms import NormWeights, add_and_norm, norm_rows
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.model.dtype import Dtype
from caraserve.model.plan import Activation
from caraserve.util.units import ceil_div
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.results import check_close, check_same_bits
from scripts.laboratory.gpu.setup import CheckSetup
from tests.gpu_device import plain_layers

_BLOCK = 16
_EPS = 1e-5
_ROUNDED = {Dtype.F32: 2e-5, Dtype.BF16: 2.0**-7, Dtype.F16: 2.0**-10}
_ATTENDED = {Dtype.F32: 2e-5, Dtype.BF16: 2.0**-6, Dtype.F16: 2.0**-9}
_SLOTS = 4


def check_layers(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks embedding, norms with residual sums, activations and caps; every other case has all that a plan may."""
    shape, generator, tokens, is_rich = setup.effort.shape, acc.generator(case), 1 + 7 * case % 40, case % 2 == 1
    history = torch.arange(3 * 64, dtype=torch.int32, device=acc.place).view(3, 64) % shape.vocab
    places = _tables(acc, [token % 3 for token in range(tokens)], [token % 64 for token in range(tokens)])
    vectors = acc.random(generator, 4, shape.hidden, dtype=torch.float32)
    positions = acc.random(generator, 64, shape.hidden, dtype=torch.float32)
    pre, post = (NormWeights(vectors[at], vectors[at + 1] if is_rich else None, _EPS, is_rich) for at in (0, 2))
    embedding = acc.random(generator, shape.vocab, shape.hidden)
    hidden, delta = (acc.random(generator, tokens, shape.hidden) for _ in range(2))
    gate, up = acc.random(generator, tokens, 2 * shape.intermediate).chunk(2, 1)
    embedded, normed = (_poisoned(acc, tokens, shape.hidden) for _ in range(2))
    activated, kind = _poisoned(acc, tokens, shape.intermediate), get_args(Activation)[case % 5]
    return max(
        _beside_plain(acc, embed, history, embedding, places, embedded, *((3.5, positions) if is_rich else ())),
        _beside_plain(acc, add_and_norm, hidden, delta, normed, pre, *((post, 0.7, 1.2) if is_rich else ())),
        _beside_plain(acc, norm_rows, acc.random(generator, tokens, 2 * shape.hidden)[:, : shape.hidden], pre),
        _beside_plain(acc, activate, gate, up, activated, kind),
        _beside_plain(acc, multiply_by_gate, up.clone(), gate),
        _beside_plain(acc, cap_logits, up.clone(), 0.8, 2.0 if is_rich else None),
    )


def _beside_plain(acc: Accelerator, function: Callable[..., None], *arguments: Any) -> float:
    """Runs a function with these arguments and its namesake of `plain_layers` in double precision, and compares all
    numbers that they have left in them."""
    wide = [each.double() if _has_numbers(each) else each for each in arguments]
    acc.run(lambda: function(*arguments))
    acc.settle()
    getattr(plain_layers, function.__name__)(*wide)
    compared = [pair for pair in zip(arguments, wide, strict=True) if _has_numbers(pair[0])]
    return max(check_close(f"{function.__name__}, {acc.dtype.name}", *pair, _ROUNDED[acc.dtype]) for pair in compared)


def _has_numbers(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


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

    def attended(self, q: Tensor, tokens: TokenTables, how: LayerAttention) -> Tensor:
        """Returns the attention of each token by itself, [tokens, heads · dim], float64."""
        wide, out = self.memory.double(), q.double()
        cache = PagedCache(wide[:, 0], wide[:, 1], self.cache.block_table)
        for row in range(len(q)):
            plain_layers.attend(q.double(), cache, tokens, row, 1, out, how)
        return out


def check_attention(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks decoding rows and prompt chunks over paged keys and values; heads share keys in every other case, and
    caps, windows, sinks and slopes change from case to case."""
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
    scratch, how = ATTENTION.decode.scratch(_SLOTS, heads, dim, context, acc.place), _how(acc, heads, dim, case)
    for part in (scratch.sums, scratch.best, scratch.mass):
        part.fill_(torch.nan)
    acc.run(lambda: ATTENTION.decode.attend(q, paged.cache, tokens, rows, out, scratch, how))
    acc.settle()
    expected = paged.attended(q, tokens, how)
    worst = check_close(f"decode attention, {acc.dtype.name}", out, expected, _ATTENDED[acc.dtype])
    alone = torch.full_like(q, torch.nan)
    acc.run(lambda: ATTENTION.decode.attend(q, paged.cache, tokens, rows[1:2], alone, scratch, how))
    acc.settle()
    check_same_bits("decode attention", alone[1:2], out[1:2])
    return max(worst, _check_prefill(acc, generator, paged, ends[0], heads * dim, how))


def _how(acc: Accelerator, heads: int, dim: int, case: int) -> LayerAttention:
    """Returns attention as most models have it in case 0, and with more in others, each alone and together."""
    scores = torch.linspace(-1.0, 3.0, heads, device=acc.place)
    return LayerAttention(
        dim**-0.5,
        cap=2.0 if case in (1, 5) else None,
        window=90 if case in (2, 5) else NO_WINDOW,
        sinks=scores if case in (3, 5) else None,
        slopes=(scores + 2.0) / 8.0 if case in (4, 5) else None,
    )


def _check_prefill(
    acc: Accelerator, generator: torch.Generator, paged: Paged, end: int, width: int, how: LayerAttention
) -> float:
    """Checks the last tokens of the first request as chunks, in tiles, and that their bits do not depend on the cut."""
    dim = paged.cache.keys.shape[3]
    most = ATTENTION.prefill.tile_tokens(acc.torch_dtype, dim)
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
    expected = paged.attended(q[wanted], _tables(acc, [0] * len(wanted), [end + 1 - count + at for at in wanted]), how)
    return check_close(f"prefill attention, {acc.dtype.name}", out[wanted], expected, _ATTENDED[acc.dtype])


def check_rotation(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks norms and rotation of queries and keys, and the cached keys and values."""
    shape, generator = setup.effort.shape, acc.generator(case)
    dim, heads, kv_heads = shape.hidden // shape.heads, shape.heads, shape.kv_heads
    paged = Paged.random(acc, generator, 64, kv_heads, dim)
    tokens = _tables(acc, [0, 2, 2, 3], [63, 0, 17, case % 64])
    pairs = dim // 2 if case % 3 else dim // 8
    angles = torch.arange(64, device=acc.place)[:, None] * 0.9 ** torch.arange(pairs, device=acc.place)[None, :]
    growth = acc.random(generator, 64, dtype=torch.float32).abs()
    rope = RopeTables(torch.cos(angles).float(), torch.sin(angles).float(), None if case % 3 else growth)
    columns = (0, heads * dim, (heads + (kv_heads if case != 5 else 0)) * dim)  # in case 5 values are keys
    norms: list[NormWeights | None] = [None, None, None]
    if case % 3:
        scope: Literal["head", "heads", "row"] = ("head", "row", "heads")[case // 2 % 3]
        for role, count in enumerate((heads, kv_heads)):
            sizes = {"row": (count * dim,), "head": (dim,), "heads": (count, dim)}[scope]
            weight, bias = (acc.random(generator, *sizes, dtype=torch.float32) for _ in range(2))
            norms[role] = NormWeights(weight, bias if case % 2 else None, _EPS, case % 4 == 1, scope)
        norms[2] = NormWeights(torch.ones(dim, device=acc.place), None, _EPS, scope="head")
    given = Heads(heads, kv_heads, dim, *columns, rope, *norms, norm_after_rope=case > 3)
    projected = acc.random(generator, 4, (heads + 2 * kv_heads) * dim)
    wide, kept = projected.double(), paged.memory.double()
    acc.run(lambda: rotate_and_append(projected, tokens, paged.cache, given))
    acc.settle()
    cache = PagedCache(kept[:, 0], kept[:, 1], paged.cache.block_table)
    plain_layers.rotate_and_append(wide, tokens, cache, given)
    tolerance, q = _ROUNDED[acc.dtype] * (4 if "row" in {norm and norm.scope for norm in norms} else 1), heads * dim
    return max(
        check_close(f"queries, {acc.dtype.name}", projected[:, :q], wide[:, :q], tolerance),
        check_close(f"keys and values kept, {acc.dtype.name}", paged.memory, kept, tolerance),
    )


def _tables(acc: Accelerator, slots: list[int], positions: list[int]) -> TokenTables:
    slot, position = (torch.tensor(part, dtype=torch.int32, device=acc.place) for part in (slots, positions))
    return TokenTables(slot, position)


def _poisoned(acc: Accelerator, rows: int, columns: int) -> Tensor:
    return torch.full((rows, columns), torch.nan, dtype=acc.torch_dtype, device=acc.place)
