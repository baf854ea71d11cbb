"""Compares kernels that add LoRA to the products that they read with the same kernels over products to which it has
been added in memory; run by test_triton_cases.py in Triton's interpreter, or on a GPU. All sums are exact, because the
interpreter has no fused multiply-add, and in bf16 the results too, which it does not round to nearest."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from caraserve.core.lora_layout import PANEL
from caraserve.gpu.kernels.elementwise import activate
from caraserve.gpu.kernels.heads import Heads, RopeTables, rotate_and_append
from caraserve.gpu.kernels.lora import SiteTables
from caraserve.gpu.kernels.lora_sums import LoraSums
from caraserve.gpu.kernels.norms import NormWeights, add_and_norm
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.model.plan import Activation
from caraserve.util.units import align_up

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # where the factor is 0

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = [2, 0, 1, 2]  # of the tokens; the last adapter lacks the second projection and has vectors for the others


def coarse(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns random multiples of a quarter."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randint(-16, 17, shape, generator=generator) / 4).to(dtype).to(DEVICE)


class Case:
    """Products of some roles, [tokens, outputs] each in columns of one row, and the LoRA to be added to them."""

    def __init__(self, widths: dict[str, int], dtype: torch.dtype) -> None:
        shape = len(widths), 3
        rank, vectors = torch.full(shape, 8, dtype=torch.int32), torch.zeros(shape, dtype=torch.int64)
        scale = torch.tensor([[1.0, 0.5, 2.0]] * len(widths))
        rank[:, 0] = 0
        rank[1:2, 2] = 0
        self.keep = [coarse(2, align_up(width, PANEL)) for width in widths.values()]
        if dtype is torch.bfloat16:
            for factor, _ in self.keep:
                factor.copy_(2.0 ** factor.sign())
        for site, both in enumerate(self.keep):
            vectors[site, 2] = both.data_ptr() if rank[site, 2] else 0
        tables = (each.to(DEVICE) for each in (vectors, vectors, rank, scale, torch.zeros(3), vectors))
        starts = [sum(align_up(width, PANEL) for width in list(widths.values())[:site]) for site in range(len(widths))]
        sums = coarse(len(SLOTS), starts[-1] + align_up(list(widths.values())[-1], PANEL))
        sums[1] = torch.nan
        places = {role: (site, start) for site, (role, start) in enumerate(zip(widths, starts, strict=True))}
        for role in list(widths)[1:2]:  # shrink and expand have left nothing there
            first = places[role][1]
            sums[0, first : first + widths[role]] = sums[3, first : first + widths[role]] = torch.nan
        slots = torch.tensor([*SLOTS, 1], dtype=torch.int32, device=DEVICE)
        self.lora = LoraSums(sums, slots, SiteTables(*tables), places)
        self.products = coarse(len(SLOTS), sum(widths.values()) + 5, dtype=dtype)
        self.columns, first = {}, 0
        for role, width in widths.items():
            self.columns[role], first = slice(first, first + width), first + width

    def of(self, role: str) -> Tensor:
        return self.products[:, self.columns[role]]

    def added(self) -> "Case":
        """Returns the case with LoRA in the products."""
        other = object.__new__(Case)
        other.products, other.columns = self.products.clone(), self.columns
        for role, (site, first) in self.lora.places.items():
            out, both = other.of(role), self.keep[site]
            for token, slot in enumerate(SLOTS):
                if not int(self.lora.tables.rank[site, slot]):
                    continue
                total = self.lora.sums[token, first : first + out.shape[1]]
                value = out[token].float() + float(self.lora.tables.scale[site, slot]) * total
                if int(self.lora.tables.vectors[site, slot]):
                    value = value * both[0, : out.shape[1]] + both[1, : out.shape[1]]
                out[token] = value.to(out.dtype)
        assert torch.isfinite(other.products).all()
        assert not torch.equal(other.products, self.products)
        return other


def norm(*shape: int, **fields: Any) -> NormWeights:
    return NormWeights(1 + coarse(*shape) / 8, None, 1e-5, **fields)


@pytest.mark.parametrize(("width", "dtype"), [(80, torch.float32), (80, torch.bfloat16), (1100, torch.float16)])
def test_an_activation_adds_lora_to_gate_and_up(width: int, dtype: torch.dtype) -> None:
    case = Case({"gate": width, "up": width}, dtype)
    memory, out = case.products.clone(), torch.empty(2, len(SLOTS), width, dtype=dtype, device=DEVICE)
    kinds: list[Activation] = ["silu", "gelu_tanh"]
    for kind in kinds:
        activate(case.of("gate"), case.of("up"), out[0], kind, lora=case.lora)
        activate(case.added().of("gate"), case.added().of("up"), out[1], kind)
        assert torch.equal(out[0], out[1])
    assert torch.equal(case.products, memory)


def test_an_activation_without_a_gate_adds_lora_to_up() -> None:
    case, out = Case({"up": 80}, torch.float16), torch.empty(2, len(SLOTS), 80, dtype=torch.float16, device=DEVICE)
    activate(None, case.of("up"), out[0], "relu2", lora=case.lora)
    activate(None, case.added().of("up"), out[1], "relu2")
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize(
    ("post", "dtype"), [(False, torch.float16), (True, torch.bfloat16), (False, torch.float32), (True, torch.float32)]
)
def test_a_norm_adds_lora_to_what_is_added_to_the_residual_stream(post: bool, dtype: torch.dtype) -> None:
    case = Case({"out": 100}, dtype)
    hidden, out = (
        coarse(2, len(SLOTS), 100, dtype=dtype),
        torch.empty(2, len(SLOTS), 100, dtype=dtype, device=DEVICE),
    )
    hidden[1] = hidden[0]
    how = norm(100), norm(100) if post else None, 0.5 if post else 1.0
    add_and_norm(hidden[0], case.of("out"), out[0], *how, lora=case.lora)
    add_and_norm(hidden[1], case.added().of("out"), out[1], *how)
    assert torch.equal(hidden[0], hidden[1])
    assert torch.equal(out[0], out[1])


def heads_of(case: Case, dim: int, **fields: Any) -> Heads:
    first = {role: columns.start for role, columns in case.columns.items()}
    count = (case.columns["q"].stop - first["q"]) // dim
    kv_heads = (case.columns["k"].stop - first["k"]) // dim
    return Heads(count, kv_heads, dim, first["q"], first["k"], first.get("v", first["k"]), **fields)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("rope", torch.bfloat16),
        ("rope", torch.float32),
        ("part of the heads", torch.float16),
        ("norms", torch.float16),
        ("values are keys", torch.float32),
        ("neither", torch.float32),
    ],
)
def test_rotation_adds_lora_to_queries_keys_and_values(form: str, dtype: torch.dtype) -> None:
    dim, widths = 12, {"q": 60, "k": 24} | ({} if form == "values are keys" else {"v": 24})
    case = Case(widths, dtype)
    pairs = {"part of the heads": 4, "neither": 0}.get(form, 6)
    heads = heads_of(case, dim, rope=RopeTables(coarse(64, pairs), coarse(64, pairs)) if pairs else None)
    if form in ("norms", "values are keys"):
        of = norm(dim, scope="head")
        heads = replace(heads, q_norm=norm(5, dim, scope="heads"), k_norm=of, v_norm=of if form != "norms" else None)
    tables = torch.tensor([[4, 1], [3, 2]], dtype=torch.int32, device=DEVICE)
    tokens = TokenTables(*torch.tensor([[0, 1, 1, 0], [3, 17, 2, 16]], dtype=torch.int32, device=DEVICE))
    memory = torch.zeros(2, 5, 2, 16, 2, dim, dtype=dtype, device=DEVICE)
    caches = [PagedCache(each[:, 0], each[:, 1], tables) for each in memory]
    added = case.added()
    rotate_and_append(case.products, tokens, caches[0], heads, case.lora)
    rotate_and_append(added.products, tokens, caches[1], heads)
    assert memory[0].any()
    assert torch.equal(memory[0], memory[1])
    assert torch.equal(case.of("q"), added.of("q"))


def test_lora_is_not_added_by_several_launches() -> None:
    case = Case({"q": 24, "k": 24, "v": 24}, torch.float32)
    heads = heads_of(case, 12, q_norm=norm(24, scope="row"))
    cache = PagedCache(coarse(1, 16, 2, 12), coarse(1, 16, 2, 12), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE))
    tokens = TokenTables(*torch.zeros(2, len(SLOTS), dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="only one launch"):
        rotate_and_append(case.products, tokens, cache, heads, case.lora)
