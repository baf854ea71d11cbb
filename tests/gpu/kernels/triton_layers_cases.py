"""Compares embedding, norms, rotation, KV append and activations with torch in double precision; run by
test_triton_cases.py in Triton's interpreter, or on a GPU."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from caraserve.gpu.kernels.elementwise import activate, cap_logits, embed, multiply_by_gate
from caraserve.gpu.kernels.heads import Heads, RopeTables, rotate_and_append
from caraserve.gpu.kernels.norms import NormWeights, add_and_norm, norm_rows
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.model.plan import Activation
from tests.gpu_device import plain_layers as plain

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCES = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}
DTYPES = list(TOLERANCES)


def with_dtypes(cases: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns each case with each dtype; in the interpreter, which takes a thousand times as long as a GPU, with one:
    a dtype changes how values are read and written, and a form what is computed. All dtypes take turns."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    if DEVICE.type == "cuda":
        return [(*case, dtype) for case in tuples for dtype in DTYPES]
    # One more at each third case, or the last of three values that cases are made of would always have the same.
    return [(*case, DTYPES[(at + at // 3) % 3]) for at, case in enumerate(tuples)]


def random(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(got: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), wanted.double(), atol=tolerance, rtol=tolerance)


def norm(*shape: int, bias: bool = False, **fields: Any) -> NormWeights:
    weight = 1 + 0.3 * random(*shape)
    return NormWeights(weight, weight.flip(-1) - 1.4 if bias else None, 1e-5, **fields)


# --- embedding ---


@pytest.mark.parametrize(("scale", "has_positions"), [(1.0, False), (3.5, False), (1.0, True), (0.3, True)])
@pytest.mark.parametrize("width", [48, 1500])
def test_embeddings_are_scaled_vectors_are_not_and_both_get_positions(
    width: int, scale: float, has_positions: bool
) -> None:
    weight, history = random(20, width, dtype=BF16), torch.arange(30, dtype=torch.int32, device=DEVICE).view(3, 10) % 20
    history[0, 0], history[1, 5] = -1, -20
    tokens = TokenTables(ints([2, 0, 0, 1, 1]), ints([9, 0, -1, 5, 8]))
    positions = random(10, width) if has_positions else None
    hidden = random(5, width)
    wanted, vectors = hidden.double(), hidden.clone()
    embed(history, weight, tokens, hidden, scale, positions)
    plain.embed(history, weight.double(), tokens, wanted, scale, positions)
    check(hidden, wanted)
    assert not hidden[2].any()  # no token
    if not has_positions:
        assert torch.equal(hidden[[1, 3]], vectors[[1, 3]])


# --- norms of rows ---


@pytest.mark.parametrize(
    ("width", "fields", "dtype"),
    with_dtypes(
        [
            (64, {"pre": norm(64)}),
            (768, {"pre": norm(768, bias=True)}),
            (100, {"pre": norm(100, subtracts_mean=True)}),
            (100, {"pre": norm(100, bias=True, subtracts_mean=True), "delta": True}),
            (96, {"pre": norm(96), "delta": True}),
            (96, {"pre": norm(96), "delta": True, "rows": [4, -1, 0]}),
            (40, {"pre": norm(40), "rows": [4, -1, 0]}),
            (96, {"pre": norm(96), "delta": True, "multiplier": 0.7}),
            (96, {"pre": norm(96), "delta": True, "scalar": 1.7}),
            (96, {"pre": norm(96), "scalar": 1.7}),
            (80, {"pre": norm(80), "post": norm(80, bias=True), "delta": True}),
            (80, {"post": norm(80, subtracts_mean=True), "delta": True, "multiplier": 0.7, "scalar": 1.7}),
            (80, {"delta": True}),
        ]
    ),
)
def test_a_row_is_added_rounded_stored_and_normed(width: int, fields: dict[str, Any], dtype: torch.dtype) -> None:
    pre, post, rows = fields.get("pre"), fields.get("post"), fields.get("rows")
    delta = random(6, width + 4)[:, :width].to(dtype) if "delta" in fields else None
    hidden, factors = (
        random(6, width + 8, dtype=dtype)[:, :width],
        (fields.get("multiplier", 1.0), fields.get("scalar", 1.0)),
    )
    before, out = hidden.clone(), torch.full((6 if rows is None else 3, width), 7.0, dtype=dtype, device=DEVICE)
    wanted, normed = hidden.double(), out.double()
    named = None if rows is None else ints(rows)
    add_and_norm(hidden, delta, out, pre, post, *factors, rows=named)
    plain.add_and_norm(wanted, None if delta is None else delta.double(), normed, pre, post, *factors, named)
    check(hidden, wanted)
    check(out, normed)
    if delta is None and factors == (1.0, 1.0):
        assert torch.equal(hidden, before)
    if pre is not None:  # later layers read the rounded sum, and so does the norm
        apart = torch.full_like(out, 7.0)
        add_and_norm(hidden, None, apart, pre, rows=named)
        assert torch.equal(out, apart)


@pytest.mark.parametrize("fields", [{}, {"subtracts_mean": True}])
def test_a_row_whose_squares_overflow_is_nan(fields: dict[str, Any]) -> None:
    x = random(3, 64)[:, :40]
    x[1, 7] = 1e20
    with np.errstate(over="ignore", invalid="ignore"):  # warnings of the interpreter
        norm_rows(x, norm(40, **fields))
    assert [bool(row.isfinite().all()) for row in x] == [True, False, True]


# --- heads ---

SLOTS, POSITIONS = [1, 1, 0, 2, 0], [15, 16, 3, 40, -1]
PLACES = ((7, 15), (2, 0), (4, 3), (8, 8))  # block and place of each token
SEPARATE = Heads(5, 2, 12, 3, 70, 100)
SHARED = replace(SEPARATE, v=70)  # values are keys


def rope(pairs: int, growth: bool = False) -> RopeTables:
    angles = torch.arange(64)[:, None] * 0.7 ** torch.arange(pairs)
    cos, sin = (1.2 * angles.cos()).to(DEVICE), (1.2 * angles.sin()).to(DEVICE)
    return RopeTables(cos, sin, random(64).abs() if growth else None)


def normed_heads(scope: str, *, bias: bool = False, mean: bool = False, after: bool = False, **shape: Any) -> Heads:
    """Returns heads with norms of queries, keys and values, each with its own weights."""
    heads = Heads(**{"heads": 5, "kv_heads": 2, "head_dim": 12, "q": 3, "k": 70, "v": 100} | shape)
    dim = heads.head_dim

    def of(count: int, scope: str) -> NormWeights:
        sizes = {"row": (count * dim,), "head": (dim,), "heads": (count, dim)}[scope]
        made = norm(*sizes, bias=bias, subtracts_mean=mean, scope=scope)
        return replace(made, weight=made.weight + 0.1 * count, eps=0.01 * count)

    of_v = "head" if scope == "row" and heads.v == heads.k else scope
    return replace(
        heads, q_norm=of(heads.heads, scope), k_norm=of(heads.kv_heads, scope), v_norm=of(heads.kv_heads, of_v),
        rope=rope(4, growth=True), norm_after_rope=after,
    )  # fmt: skip


def qwen(heads: int, kv_heads: int, dim: int, normed: bool) -> Heads:
    weights = [replace(norm(dim, scope="head"), eps=eps) if normed else None for eps in (1e-5, 1e-5)]
    return Heads(heads, kv_heads, dim, 0, heads * dim, (heads + kv_heads) * dim, rope(dim // 2), *weights)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    with_dtypes(
        [
            qwen(4, 2, 64, True),
            qwen(5, 5, 80, False),
            qwen(6, 1, 96, True),
            SEPARATE,  # no rope
            replace(SEPARATE, rope=rope(6, growth=True)),
            replace(SEPARATE, rope=rope(2)),
            replace(SHARED, rope=rope(5)),
            normed_heads("head"),
            normed_heads("head", after=True, v=70),
            normed_heads("heads", mean=True, bias=True),
            normed_heads("heads", after=True, head_dim=8),
            replace(normed_heads("heads", mean=True), q_norm=None, v_norm=None),
            replace(normed_heads("head", bias=True), k_norm=None),
            normed_heads("row"),
            normed_heads("row", mean=True, bias=True, v=70),
            normed_heads("row", after=True),
            normed_heads("row", after=True, v=70),
            replace(normed_heads("row", after=True, v=70), k_norm=norm(12, scope="head"), rope=rope(3)),
            replace(normed_heads("row", after=True, v=70), q_norm=norm(5, 12, scope="heads")),
            replace(normed_heads("row", after=True), rope=None),
        ]
    ),
)
def test_heads_are_normed_rotated_and_appended(heads: Heads, dtype: torch.dtype) -> None:
    width, dim = max(heads.q + heads.heads * heads.head_dim, heads.v + heads.kv_heads * heads.head_dim), heads.head_dim
    memory = torch.full((9, 2, 16, heads.kv_heads, dim), 7.0, dtype=dtype, device=DEVICE)
    table, tokens = ints([[4, -9, -9], [7, 2, -9], [0, 1, 8]]), TokenTables(ints(SLOTS), ints(POSITIONS))
    projected = random(5, width + 3, dtype=dtype)[:, :width]
    before, wanted, kept = projected.clone(), projected.double(), memory.double()
    rotate_and_append(projected, tokens, PagedCache(memory[:, 0], memory[:, 1], table), heads)
    plain.rotate_and_append(wanted, tokens, PagedCache(kept[:, 0], kept[:, 1], table), heads)
    check(memory, kept)
    queries = slice(heads.q, heads.q + heads.heads * dim)
    check(projected[:4, queries], wanted[:4, queries])
    untouched = torch.ones(memory.shape[:3], dtype=torch.bool)
    for block, place in PLACES:
        untouched[block, :, place] = False
    assert torch.all(memory.cpu()[untouched] == 7.0)
    if all(each is None or each.scope != "row" for each in (heads.q_norm, heads.k_norm, heads.v_norm)):
        assert torch.equal(projected[4], before[4])
    if heads.v_norm is None:
        assert torch.equal(memory[8, 1, 8], before[3, heads.v : heads.v + heads.kv_heads * dim].view(-1, dim))


def test_values_that_are_keys_have_no_norm_of_rows() -> None:
    heads, memory = replace(normed_heads("row", v=70), v_norm=norm(24)), torch.zeros(1, 16, 2, 12, device=DEVICE)
    cache, tokens = PagedCache(memory, memory, ints([[0]])), TokenTables(ints([0]), ints([0]))
    with pytest.raises(ValueError, match="values that are keys cannot have a norm of rows"):
        rotate_and_append(random(1, 130), tokens, cache, heads)


# --- activations and logits ---

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # exp overflows where the factor is 0


@pytest.mark.parametrize(("kind", "width", "dtype"), with_dtypes(product(get_args(Activation), [48, 1024, 1500])))
def test_activations(width: int, kind: Activation, dtype: torch.dtype) -> None:
    both = random(3, 2 * width + 6, dtype=dtype) * 4
    gate, up = both[:, 2 : 2 + width], both[:, 3 + width : 3 + 2 * width]
    gate[0, :2] = torch.tensor([-60000.0, 60000.0], dtype=dtype)  # e^60000 overflows fp32
    up[0, :2] = 1.0 if kind != "relu2" else 0.0
    gate[1, 3] = torch.nan
    for gates in (gate,) if kind == "clamped_swiglu" else (gate, None):
        out = torch.empty(3, width + 1, dtype=dtype, device=DEVICE)[:, :width]
        wanted = torch.empty(3, width, dtype=torch.float64, device=DEVICE)
        activate(gates, up, out, kind)
        plain.activate(None if gates is None else gate.double(), up.double(), wanted, kind)
        assert out[1, 3].isnan() == (gates is not None)
        out[1, 3] = wanted[1, 3] = 0.0
        check(out, wanted)


def test_a_clamped_activation_needs_a_gate() -> None:
    with pytest.raises(ValueError, match="there is no gate"):
        activate(None, random(1, 8), random(1, 8), "clamped_swiglu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_multiplied_by_its_gate(dtype: torch.dtype) -> None:
    attended, gate = random(3, 1100, dtype=dtype), random(3, 2300, dtype=dtype)[:, 1150:2250] * 5
    wanted = attended.double()
    multiply_by_gate(attended, gate)
    plain.multiply_by_gate(wanted, gate.double())
    check(attended, wanted)


@pytest.mark.parametrize(("scale", "cap", "dtype"), with_dtypes([(0.3, None), (1.0, 30.0), (0.8, 4.0)]))
def test_logits_are_scaled_and_capped(scale: float, cap: float | None, dtype: torch.dtype) -> None:
    logits = random(3, 1100, dtype=dtype)[:, :1050] * 20
    logits[1, :2] = torch.tensor([-60000.0, 60000.0], dtype=dtype)
    wanted = logits.double()
    cap_logits(logits, scale, cap)
    plain.cap_logits(wanted, scale, cap)
    check(logits, wanted)
