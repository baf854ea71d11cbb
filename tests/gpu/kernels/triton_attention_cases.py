"""Compares paged attention with a plain softmax; run by test_triton_cases.py in Triton's interpreter, or on a GPU."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from caraserve.gpu.attention import triton as backend
from caraserve.gpu.attention.base import NO_WINDOW, LayerAttention
from caraserve.gpu.attention.triton import ATTENTION, SPLIT_TOKENS, decode_programs
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from tests.gpu.honest_dots import honest_dots
from tests.gpu_device.plain_layers import attend

pytestmark = pytest.mark.usefixtures(honest_dots.__name__)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16
LAYERS, LAYER = 2, 1


def make_cache(slots: int, max_context: int, kv_heads: int, dim: int, dtype: torch.dtype) -> PagedCache:
    """Returns one layer of a cache whose blocks are allocated in random order; unused entries name no block."""
    generator = torch.Generator().manual_seed(dim)
    per_slot = -(-max_context // BLOCK)
    blocks = slots * per_slot + 3
    memory = torch.randn(blocks, LAYERS, 2, BLOCK, kv_heads, dim, generator=generator).to(dtype).to(DEVICE)
    table = torch.randperm(blocks, generator=generator)[: slots * per_slot].view(slots, per_slot).to(torch.int32)
    return PagedCache(memory[:, LAYER, 0], memory[:, LAYER, 1], table.to(DEVICE))


def how(cache: PagedCache, window: int) -> LayerAttention:
    """Returns how most models attend."""
    return LayerAttention(cache.keys.shape[3] ** -0.5, window=window)


def plain(q: Tensor, cache: PagedCache, tokens: TokenTables, rows: Iterable[int], layer: LayerAttention) -> Tensor:
    """Returns the attention of some tokens, each by itself, and 7 in all other rows."""
    wide = PagedCache(cache.keys.double(), cache.values.double(), cache.block_table)
    out = torch.full(q.shape, 7.0, dtype=torch.float64, device=DEVICE)
    for row in rows:
        attend(q.double(), wide, tokens, row, 1, out, layer)
    return out.cpu()


def tables(slots: list[int], positions: list[int]) -> TokenTables:
    return TokenTables(*(torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (slots, positions)))


def queries(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Returns queries as a view into rows that also hold keys and values, as in a decoder."""
    qkv = torch.randn(tokens, (heads + 3) * dim, generator=torch.Generator().manual_seed(tokens + dim))
    return qkv.to(dtype).to(DEVICE)[:, : heads * dim]


def decode(
    q: Tensor, cache: PagedCache, tokens: TokenTables, rows: list[int], layer: LayerAttention, most: int
) -> Tensor:
    heads, dim = q.shape[1] // cache.keys.shape[3], cache.keys.shape[3]
    scratch = ATTENTION.decode.scratch(len(rows) + 1, heads, dim, most + 600, DEVICE).within(len(rows), most)
    for part in (scratch.sums, scratch.best, scratch.mass):
        part.fill_(float("nan"))
    out = torch.full_like(q, 7.0)
    row_token = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    ATTENTION.decode.attend(q, cache, tokens, row_token, out, scratch, layer)
    return out.cpu()


def prefill(
    q: Tensor, cache: PagedCache, tokens: TokenTables, chunks: list[tuple[int, int]], layer: LayerAttention
) -> Tensor:
    """Computes attention of `chunks`, (first token, tokens) each, which are cut into tiles here."""
    most = ATTENTION.prefill.tile_tokens(q.dtype, cache.keys.shape[3])
    tiles = [(at, min(most, first + count - at)) for first, count in chunks for at in range(first, first + count, most)]
    firsts, counts = (torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in zip(*tiles, (0, 0), strict=True))
    out = torch.full_like(q, 7.0)
    ATTENTION.prefill.attend(q, cache, tokens, firsts, counts, out, layer)
    return out.cpu()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "dtype", "tolerance"),
    [
        (4, 2, 64, NO_WINDOW, torch.float32, 2e-6),
        (6, 2, 80, 100, torch.float32, 2e-6),
        (2, 2, 96, 300, torch.bfloat16, 2e-2),
        (8, 1, 128, NO_WINDOW, torch.float16, 2e-3),
        (4, 1, 256, 90, torch.bfloat16, 2e-2),
    ],
)
def test_decode_is_a_softmax_over_the_context(
    heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype, tolerance: float
) -> None:
    cache = make_cache(4, 2 * SPLIT_TOKENS + 60, kv_heads, dim, dtype)
    slots, positions = [2, 0, 3, 1], [SPLIT_TOKENS, 0, 2 * SPLIT_TOKENS + 57, 100]
    q, tokens = queries(4, heads, dim, dtype), tables(slots, positions)
    layer = how(cache, window)
    out = decode(q, cache, tokens, [3, 0, -1, 2], layer, 2 * SPLIT_TOKENS + 60)
    torch.testing.assert_close(out.double(), plain(q, cache, tokens, (0, 2, 3), layer), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "dtype", "tolerance"),
    [
        (4, 2, 64, NO_WINDOW, torch.float32, 2e-6),
        (2, 1, 80, 20, torch.float32, 2e-6),
        (2, 2, 96, NO_WINDOW, torch.bfloat16, 2e-2),
        (3, 1, 128, 90, torch.float16, 2e-3),
        (1, 1, 256, NO_WINDOW, torch.bfloat16, 2e-2),
    ],
)
def test_prefill_is_causal_attention_over_cached_and_own_tokens(
    heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype, tolerance: float
) -> None:
    cache = make_cache(3, 300, kv_heads, dim, dtype)
    runs = [(1, 0, 37), (0, 201, 21), (2, 95, 1)]  # (slot, first position, tokens)
    slots = [slot for slot, _, count in runs for _ in range(count)]
    positions = [start + index for _, start, count in runs for index in range(count)]
    q, tokens = queries(len(slots), heads, dim, dtype), tables(slots, positions)
    layer = how(cache, window)
    out = prefill(q, cache, tokens, [(37, 21), (0, 37), (58, 1)], layer)
    wanted = plain(q, cache, tokens, range(0, len(slots), 3), layer)
    torch.testing.assert_close(out[::3].double(), wanted[::3], atol=tolerance, rtol=tolerance)


SINKS, SLOPES = (torch.tensor(values, device=DEVICE) for values in ([-2.0, 0.0, 3.0, 30.0], [0.5, 0.25, 0.03, 0.004]))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # where tanh is 1
@pytest.mark.parametrize(
    ("layer", "dtype", "tolerance"),
    [
        (LayerAttention(0.5), torch.float32, 2e-6),
        (LayerAttention(0.5, cap=3.0), torch.float32, 1e-5),
        (LayerAttention(0.125, cap=50.0, window=100), torch.float32, 1e-5),
        (LayerAttention(4.0, cap=1.5, window=20), torch.bfloat16, 2e-2),  # every score is near the cap
        (LayerAttention(0.5, sinks=SINKS), torch.float32, 2e-6),
        (LayerAttention(0.5, slopes=SLOPES), torch.float32, 4e-6),
        (LayerAttention(0.5, cap=3.0, slopes=SLOPES), torch.float32, 1e-5),
        (LayerAttention(0.25, window=100, sinks=SINKS, slopes=SLOPES), torch.float16, 4e-3),
        (LayerAttention(0.25, cap=5.0, window=300, sinks=SINKS, slopes=SLOPES), torch.bfloat16, 2e-2),
    ],
)
def test_scores_are_scaled_sloped_and_then_capped_and_sinks_take_weight(
    layer: LayerAttention, dtype: torch.dtype, tolerance: float
) -> None:
    """Before the window's mask, also in the first of several splits."""
    heads, kv_heads, dim, most = 4, 2, 64, SPLIT_TOKENS + 60
    cache, q = make_cache(2, most, kv_heads, dim, dtype), queries(3, heads, dim, dtype)
    slots, positions = [1, 0, 0], [most - 1, 40, 41]
    tokens = tables(slots, positions)
    decoded = decode(q, cache, tokens, [0, 1, 2], layer, most)
    prefilled = prefill(q, cache, tokens, [(0, 1), (1, 2)], layer)
    wanted = plain(q, cache, tokens, range(3), layer)
    for out in (decoded, prefilled):
        torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)


def test_tokens_past_the_context_are_not_read() -> None:
    """Blocks are reused without being cleared: data after a context must not reach a result, not even as NaN."""
    cache = make_cache(1, 64, 1, 64, torch.float32)
    q, tokens = queries(3, 2, 64, torch.float32), tables([0] * 3, [17, 18, 19])
    layer = how(cache, NO_WINDOW)
    before = decode(q, cache, tokens, [2], layer, 64)[2], prefill(q, cache, tokens, [(0, 3)], layer)
    for position in range(20, 64):
        block = int(cache.block_table[0, position // BLOCK])
        cache.keys[block, position % BLOCK] = float("nan")
        cache.values[block, position % BLOCK] = float("nan")
    cache.block_table[0, 2:] = -1000
    after = decode(q, cache, tokens, [2], layer, 64)[2], prefill(q, cache, tokens, [(0, 3)], layer)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("window", [NO_WINDOW, 100])
def test_a_context_of_many_splits_is_merged_in_steps(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(backend, "SPLIT_TOKENS", 32)
    heads, dim, most = 2, 64, 620  # 20 splits, 16 at once
    cache, q = make_cache(3, most, 1, dim, torch.float32), queries(3, heads, dim, torch.float32)
    slots, positions = [0, 1, 2], [most - 1, 16 * 32 - 1, 16 * 32]  # the last split is alone, or the step's last
    layer = how(cache, window)
    tokens = tables(slots, positions)
    out = decode(q, cache, tokens, [0, 1, 2], layer, most)
    torch.testing.assert_close(out.double(), plain(q, cache, tokens, range(3), layer), atol=2e-6, rtol=2e-6)
    alone = decode(q, cache, tokens, [2], layer, positions[2] + 1)
    assert torch.equal(alone[2], out[2])


def test_keys_and_values_have_the_same_strides() -> None:
    keys = torch.empty(3, BLOCK, 2, 64)
    with pytest.raises(ValueError, match=r"keys have strides \(2048, 128, 64, 1\) and values \(4096, 128, 64, 1\)"):
        PagedCache(keys, torch.empty(3, 2, BLOCK, 2, 64)[:, 0], torch.zeros(1, 1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "dtype", "capability"),
    [
        (2, 1, 64, NO_WINDOW, torch.float32, 90),
        (2, 1, 64, 70, torch.float32, 90),  # with sinks and slopes
        (1, 1, 64, NO_WINDOW, torch.bfloat16, 90),
        (4, 1, 128, 150, torch.bfloat16, 86),
        (2, 1, 256, NO_WINDOW, torch.bfloat16, 90),
    ],
)
def test_a_querys_bits_do_not_depend_on_its_chunk(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    dtype: torch.dtype,
    capability: int,
) -> None:
    """Chunks decide which tiles of keys are masked, because all queries of a tile must see an unmasked one whole."""
    monkeypatch.setattr(backend, "compute_capability", lambda device: capability)
    count, start = (270, 200) if dtype is torch.bfloat16 else (160, 40)  # float32 has smaller tiles
    cache, q = make_cache(2, start + count, kv_heads, dim, dtype), queries(count, heads, dim, dtype)
    tokens = tables([1] * count, list(range(start, start + count)))
    layer = how(cache, window)
    if window == 70:
        layer = replace(layer, sinks=SINKS, slopes=SLOPES)
    whole = prefill(q, cache, tokens, [(0, count)], layer)
    for ends in [(11, 101, 150), (1, 2, 130)]:
        starts = [0, *ends]
        chunks = [(first, end - first) for first, end in zip(starts, [*ends, count], strict=True)]
        assert torch.equal(prefill(q, cache, tokens, chunks, layer), whole), chunks


@pytest.mark.parametrize("window", [NO_WINDOW, 70])
def test_a_decoding_rows_bits_do_not_depend_on_the_batch(window: int) -> None:
    heads, dim = 4, 64
    cache, q = make_cache(3, 3 * SPLIT_TOKENS, 2, dim, torch.float32), queries(4, heads, dim, torch.float32)
    positions = np.linspace(3, 3 * SPLIT_TOKENS - 1, 4).astype(int).tolist()
    tokens = tables([0, 1, 2, 1], positions)
    layer = how(cache, window)
    together = decode(q, cache, tokens, [0, 1, 2, 3], layer, 3 * SPLIT_TOKENS)
    alone = decode(q, cache, tokens, [1], layer, int(positions[1]) + 1)
    assert torch.equal(together[1], alone[1])


@pytest.mark.parametrize("window", [NO_WINDOW, 300])
def test_a_rows_bits_do_not_depend_on_its_number_of_programs(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    heads, dim, rows, most = 2, 64, [1, 0, -1], 4 * SPLIT_TOKENS
    cache, q = make_cache(2, most, 1, dim, torch.float32), queries(2, heads, dim, torch.float32)
    tokens = tables([0, 1], [most - 1, SPLIT_TOKENS + 7])
    outs = []
    for programs in (1, 6, 2048):  # per row: one, two, one for each split
        monkeypatch.setattr(backend, "_MOST_PROGRAMS", programs)
        outs.append(decode(q, cache, tokens, rows, how(cache, window), most))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[2])


def test_many_rows_have_one_program_each_and_one_row_has_one_per_split() -> None:
    assert decode_programs(1, 8, 512) == 256
    assert decode_programs(1, 8, 16) == 16
    assert decode_programs(64, 8, 512) == 4
    assert decode_programs(512, 32, 512) == 1
