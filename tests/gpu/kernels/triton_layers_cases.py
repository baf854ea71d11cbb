"""Norms, rotary embedding, KV append, SiLU; run by test_triton_cases.py in Triton's interpreter, or on a GPU."""

import numpy as np
import pytest
import torch
from torch import Tensor

from caraserve.gpu.kernels.layers import embed, rms_norm, rotate_and_append, silu_mul
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.model.rope import rope_of, rope_tables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


@pytest.mark.parametrize("width", [48, 1500])
def test_embed_reads_tokens_from_the_history(width: int) -> None:
    weight, hidden = random(20, width, dtype=torch.bfloat16), torch.full((4, width), 7.0, device=DEVICE)
    history = torch.arange(30, dtype=torch.int32, device=DEVICE).view(3, 10) % 20
    slots, positions = [2, 0, 0, 1], [9, 0, -1, 5]
    tokens = TokenTables(*(torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (slots, positions)))
    embed(history, weight, tokens, hidden)
    assert torch.equal(hidden[[0, 1, 3]], weight[[9, 0, 15]].float())
    assert not hidden[2].any()


@pytest.mark.parametrize("width", [48, 1500])
def test_embed_leaves_vectors_in_place_of_tokens_as_they_are(width: int) -> None:
    weight, hidden = random(20, width), random(3, width)
    history, vectors = torch.tensor([[3, -1, -20]], dtype=torch.int32, device=DEVICE), hidden.clone()
    at = torch.arange(3, dtype=torch.int32, device=DEVICE)
    embed(history, weight, TokenTables(torch.zeros_like(at), at), hidden)
    assert torch.equal(hidden[0], weight[3])
    assert torch.equal(hidden[1:], vectors[1:])


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return weight.double() * x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("width", [64, 100, 768])
def test_rms_norm(width: int, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight = random(5, width + 8, dtype=dtype)[:, :width], random(width, dtype=dtype)
    before, out = hidden.clone(), torch.empty(5, width, dtype=dtype, device=DEVICE)
    rms_norm(hidden, weight, out, EPS)
    torch.testing.assert_close(out.double(), normed(before, weight), atol=tolerance, rtol=tolerance)
    assert torch.equal(hidden, before)


def test_a_row_whose_squares_overflow_is_nan() -> None:
    hidden, weight, out = random(3, 40), random(40), torch.empty(3, 40, device=DEVICE)
    hidden[1, 7] = 1e20
    with np.errstate(over="ignore", invalid="ignore"):  # warnings of the interpreter
        rms_norm(hidden, weight, out, EPS)
    assert [bool(row.isfinite().all()) for row in out] == [True, False, True]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_the_residual_sum_is_rounded_stored_and_normed(dtype: torch.dtype, tolerance: float) -> None:
    hidden, delta, weight = random(4, 96, dtype=dtype), random(4, 96, dtype=torch.float32), random(96, dtype=dtype)
    total = (hidden.float() + delta).to(dtype)
    fused, apart = torch.empty_like(hidden), torch.empty_like(hidden)
    rms_norm(hidden, weight, fused, EPS, delta=delta)
    # The interpreter truncates to bf16 where a GPU rounds.
    cut = 2.0**-7 if dtype is torch.bfloat16 and DEVICE.type == "cpu" else 0.0
    torch.testing.assert_close(hidden, total, atol=0.0, rtol=cut)
    rms_norm(hidden, weight, apart, EPS)
    assert torch.equal(fused, apart)
    torch.testing.assert_close(fused.double(), normed(hidden, weight), atol=tolerance, rtol=tolerance)


def test_only_wanted_rows_are_normed() -> None:
    hidden, weight, out = random(6, 40), random(40), torch.full((3, 40), 7.0, device=DEVICE)
    rms_norm(hidden, weight, out, EPS, rows=torch.tensor([4, -1, 0], dtype=torch.int32, device=DEVICE))
    torch.testing.assert_close(out[[0, 2]].double(), normed(hidden[[4, 0]], weight), atol=1e-5, rtol=1e-5)
    assert torch.all(out[1] == 7.0)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads by transformers' convention: a head's two halves form its pairs."""
    low, high = heads.double().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norm"), [(4, 2, 64, True), (5, 5, 80, False), (6, 1, 96, True), (8, 2, 128, False)]
)
def test_rotate_and_append(
    heads: int, kv_heads: int, dim: int, norm: bool, dtype: torch.dtype, tolerance: float
) -> None:
    slots, positions = [1, 1, 0, 2, 0], [15, 16, 3, 40, -1]
    memory = torch.full((9, 2, 16, kv_heads, dim), 7.0, dtype=dtype, device=DEVICE)
    table = torch.tensor([[4, -9, -9], [7, 2, -9], [0, 1, 8]], dtype=torch.int32, device=DEVICE)
    cache = PagedCache(memory[:, 0], memory[:, 1], table)
    cos, sin = (torch.from_numpy(part).to(DEVICE) for part in rope_tables(rope_of({}, dim, 64), 64))
    qkv = random(5, (heads + 2 * kv_heads) * dim, dtype=dtype)
    before = qkv.clone()
    q_norm, k_norm = random(dim, dtype=dtype), random(dim + 1, dtype=dtype)[:dim]
    tokens = TokenTables(*(torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (slots, positions)))
    rotate_and_append(qkv, cos, sin, tokens, cache, (q_norm, k_norm) if norm else None, EPS)
    for token in range(4):
        position = positions[token]
        block = int(table[slots[token], position // 16])
        by_head = before[token].view(-1, dim)
        q, k, v = by_head[:heads], by_head[heads : heads + kv_heads], by_head[heads + kv_heads :]
        if norm:
            q, k = normed(q, q_norm), normed(k, k_norm)
        wanted_q, wanted_k = rotated(q, cos[position], sin[position]), rotated(k, cos[position], sin[position])
        got = qkv[token, : heads * dim].view(-1, dim).double()
        torch.testing.assert_close(got, wanted_q, atol=tolerance, rtol=tolerance)
        key = cache.keys[block, position % 16].double()
        torch.testing.assert_close(key, wanted_k, atol=tolerance, rtol=tolerance)
        assert torch.equal(cache.values[block, position % 16], v)
    assert torch.equal(qkv[4], before[4])
    untouched = torch.ones(memory.shape[:3], dtype=torch.bool)
    for block, place in ((7, 15), (2, 0), (4, 3), (8, 8)):
        untouched[block, :, place] = False
    assert torch.all(memory.cpu()[untouched] == 7.0)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp overflows where the factor becomes 0
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("width", [48, 1024, 1500])
def test_silu_mul(width: int, dtype: torch.dtype, tolerance: float) -> None:
    gate_up, out = random(3, 2 * width, dtype=dtype) * 4, torch.empty(3, width, dtype=dtype, device=DEVICE)
    gate_up[0, :2] = torch.tensor([-60000.0, 60000.0], dtype=dtype)  # e^60000 overflows fp32
    gate_up[0, width : width + 2] = 1.0
    silu_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, 1)
    torch.testing.assert_close(out.double(), gate * torch.sigmoid(gate) * up, atol=tolerance, rtol=tolerance)
