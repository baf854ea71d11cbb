"""Queries, keys and values between their projection and attention: norms of heads, rotation, and the append to the KV
cache. Arithmetic is fp32 for all tensor dtypes, and each result is rounded once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from caraserve.gpu.kernels.lora_sums import LoraSums, lora_arguments, lora_entry, lora_place, with_lora
from caraserve.gpu.kernels.norms import ADDS_BIAS, BY_HEAD, SUBTRACTS_MEAN, NormWeights, norm_form, norm_rows
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.util.units import ceil_div

_HEADS = 4  # in a program
_Keys = Literal["appended", "kept", ""]  # to the cache, in the row, or not computed


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Rotation of pairs (i, i + pairs) of a head's first dimensions."""

    cos: Tensor  # float32 [positions, pairs]
    sin: Tensor  # float32 [positions, pairs]
    growth: Tensor | None = None  # float32 [positions], which multiplies rotated queries


@dataclass(frozen=True, slots=True)
class _RowNorm:
    """A norm of whole rows, in the columns of one role."""

    columns: slice
    norm: NormWeights


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch of `rotate_kernel`: what is the same for every batch. None in `tensors`: the kernel does not read it."""

    programs: int  # of a token
    tables: tuple[Tensor | None, ...]  # cos, sin, growth
    norms: tuple[Tensor | float | None, ...]  # weight, bias and eps of q's, k's and v's
    constants: Mapping[str, Any]


@dataclass(frozen=True)
class Heads:
    """The heads of an attention in a row of projections, and what is done to them."""

    heads: int
    kv_heads: int
    head_dim: int
    q: int  # first columns
    k: int
    v: int  # k's if values are keys before their norm and rotation
    rope: RopeTables | None = None
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    v_norm: NormWeights | None = None
    norm_after_rope: bool = False

    @cached_property
    def steps(self) -> tuple[_RowNorm | _Launch, ...]:
        """The launches, in order: one, unless norms are over whole rows.

        Raises ValueError for a norm of rows of values that are keys, which would change the keys."""
        by_row = {role: norm for role, norm in self._norms.items() if norm is not None and norm.scope == "row"}
        values_are_keys = self.v == self.k
        if "v" in by_row and values_are_keys:
            raise ValueError("values that are keys cannot have a norm of rows, which would change the keys")
        rows = {role: _RowNorm(self._columns(role), norm) for role, norm in by_row.items()}
        of_keys = [rows[role] for role in "qk" if role in rows]
        values_first = values_are_keys and "k" in by_row
        first: list[_RowNorm | _Launch] = [rows["v"]] if "v" in rows else []
        first += [self._launch(values=True)] if values_first else []
        if not of_keys or not self.norm_after_rope:
            return (*first, *of_keys, self._launch(queries=True, keys="appended", values=not values_first))
        grows_later = "q" in by_row and self.rope is not None and self.rope.growth is not None
        keys: _Keys = "kept" if "k" in by_row else "appended"
        steps = [*first, self._launch(queries=True, keys=keys, values=not values_first, grows=not grows_later)]
        steps += of_keys
        if grows_later or keys == "kept":
            appended: _Keys = "appended" if keys == "kept" else ""
            steps.append(self._launch(grows_later, appended, norms=False, rotates=False, grows=grows_later))
        return tuple(steps)

    @property
    def is_one_launch(self) -> bool:
        """True if one launch computes all."""
        return len(self.steps) == 1

    @property
    def _norms(self) -> dict[str, NormWeights | None]:
        return {"q": self.q_norm, "k": self.k_norm, "v": self.v_norm}

    def _columns(self, role: str) -> slice:
        first, heads = getattr(self, role), self.heads if role == "q" else self.kv_heads
        return slice(first, first + heads * self.head_dim)

    def _launch(
        self,
        queries: bool = False,
        keys: _Keys = "",
        values: bool = False,
        norms: bool = True,
        rotates: bool = True,
        grows: bool = True,
    ) -> _Launch:
        rope = self.rope
        pairs = 0 if rope is None else rope.cos.shape[1]
        half = pairs or self.head_dim // 2
        rest = self.head_dim - 2 * half
        growth = None if rope is None or not grows else rope.growth
        weights, forms = list[Tensor | float | None](), dict[str, int]()
        for role, norm in self._norms.items():
            norm = None if norm is None or norm.scope == "row" or not norms else norm
            weights += [None, None, 0.0] if norm is None else [norm.weight, norm.bias, norm.eps]
            forms[f"{role.upper()}_FORM"] = norm_form(norm)
        if not keys:
            forms["K_FORM"] = 0
        q_heads, kv_heads = self.heads if queries else 0, self.kv_heads if keys or values else 0
        constants = {
            "Q": self.q,
            "K": self.k,
            "V": self.v,
            "Q_HEADS": q_heads,
            "KV_HEADS": kv_heads,
            "HALF": half,
            "HALF_PAD": triton.next_power_of_2(half),
            "REST": rest,
            "REST_PAD": triton.next_power_of_2(max(rest, 1)),
            **forms,
            "NORMS_LAST": self.norm_after_rope,
            "ROTATES": rotates and pairs > 0,
            "GROWS": growth is not None,
            "KEYS": keys,
            "VALUES": values,
            "HEADS": _HEADS,
            "num_warps": 1,
        }
        tables = (None, None, growth) if rope is None else (rope.cos, rope.sin, growth)
        programs = ceil_div(q_heads, _HEADS) + ceil_div(kv_heads, _HEADS)
        return _Launch(programs, tables, tuple(weights), constants)


@triton.jit
def _loaded(at, column, tail, inside, inside_tail, HALF: tl.constexpr, REST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads heads in three parts: both halves of the pairs, and what is not rotated, if there is any."""
    low = tl.load(at + column, mask=inside, other=0.0)
    high = tl.load(at + column + HALF, mask=inside, other=0.0)
    rest = low
    if REST:
        rest = tl.load(at + 2 * HALF + tail, mask=inside_tail, other=0.0)
    return low, high, rest


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    at, low, high, rest, column, tail, inside, inside_tail, HALF: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    kind: tl.constexpr = at.dtype.element_ty
    tl.store(at + column, low.to(kind), mask=inside)
    tl.store(at + column + HALF, high.to(kind), mask=inside)
    if REST:
        tl.store(at + 2 * HALF + tail, rest.to(kind), mask=inside_tail)


@triton.jit
def _vectors(  # type: ignore[no-untyped-def]
    vectors, head, column, tail, inside, inside_tail, FORM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Loads a weight or bias in three parts: of each head, or of one for all."""
    if BY_HEAD & FORM:
        low, high, rest = _loaded(
            vectors + head[:, None] * (2 * HALF + REST), column[None, :], tail[None, :], inside, inside_tail, HALF, REST
        )
    else:
        low = tl.load(vectors + column, mask=column < HALF, other=0.0)[None, :]
        high = tl.load(vectors + HALF + column, mask=column < HALF, other=0.0)[None, :]
        rest = low
        if REST:
            rest = tl.load(vectors + 2 * HALF + tail, mask=tail < REST, other=0.0)[None, :]
    return low.to(tl.float32), high.to(tl.float32), rest.to(tl.float32)


@triton.jit
def _normed(  # type: ignore[no-untyped-def]
    low, high, rest, weight, bias, eps, head, column, tail, inside, inside_tail,
    FORM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Norms heads in three parts, [heads, columns] each; gives NaN if a square overflows."""
    if FORM:
        if SUBTRACTS_MEAN & FORM:
            total = tl.sum(low, 1) + tl.sum(high, 1)
            if REST:
                total += tl.sum(rest, 1)
            mean = (total / (2 * HALF + REST))[:, None]
            low, high = tl.where(inside, low - mean, 0.0), tl.where(inside, high - mean, 0.0)
            if REST:
                rest = tl.where(inside_tail, rest - mean, 0.0)
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if REST:
            squares += tl.sum(rest * rest, 1)
        factor = (1.0 / tl.sqrt(squares / (2 * HALF + REST) + eps) + squares * 0.0)[:, None]
        w_low, w_high, w_rest = _vectors(weight, head, column, tail, inside, inside_tail, FORM, HALF, REST)
        low, high = w_low * (low * factor), w_high * (high * factor)
        if REST:
            rest = w_rest * (rest * factor)
        if ADDS_BIAS & FORM:
            b_low, b_high, b_rest = _vectors(bias, head, column, tail, inside, inside_tail, FORM, HALF, REST)
            low, high = low + b_low, high + b_high
            if REST:
                rest = rest + b_rest
    return low, high, rest


@triton.jit
def _with_lora(  # type: ignore[no-untyped-def]
    low, high, rest, at, head, column, tail, inside, inside_tail, heads,
    token, site, lora_slots, ranks, scales, vectors, adapters,
    HAS_LORA: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Adds LoRA to heads in three parts, of a projection of `heads` heads whose sums are at `at`, and rounds them."""
    if HAS_LORA:
        slot, entry = lora_entry(lora_slots, token, site, adapters)
        dim: tl.constexpr = 2 * HALF + REST
        first, width = head[:, None] * dim, heads * dim
        low = with_lora(low, at, first + column, inside, width, slot, entry, ranks, scales, vectors)
        high = with_lora(high, at, first + HALF + column, inside, width, slot, entry, ranks, scales, vectors)
        low, high = low.to(KIND).to(tl.float32), high.to(KIND).to(tl.float32)
        if REST:
            rest = with_lora(rest, at, first + 2 * HALF + tail, inside_tail, width, slot, entry, ranks, scales, vectors)
            rest = rest.to(KIND).to(tl.float32)
    return low, high, rest


@triton.jit
def rotate_kernel(  # type: ignore[no-untyped-def]
    projected, cos, sin, growth, token_slot, token_position, block_table, keys, values,
    q_weight, q_bias, q_eps, k_weight, k_bias, k_eps, v_weight, v_bias, v_eps,
    sums, lora_slots, ranks, scales, vectors, sums_stride, adapters,
    stride, table_stride, key_block, key_token, key_head, value_block, value_token, value_head,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    Q_FORM: tl.constexpr, K_FORM: tl.constexpr, V_FORM: tl.constexpr, NORMS_LAST: tl.constexpr,
    ROTATES: tl.constexpr, GROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    HAS_LORA: tl.constexpr, Q_SITE: tl.constexpr, Q_SUMS: tl.constexpr, K_SITE: tl.constexpr, K_SUMS: tl.constexpr,
    V_SITE: tl.constexpr, V_SUMS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One program norms and rotates some query heads of one token in place, or norms, rotates and appends some of its
    key-value heads. Heads are in three parts, so that one thread has both numbers of a pair and none of it twice."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_tiles: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    is_query = tile < q_tiles
    position = tl.load(token_position + token)
    if position >= 0:
        head = tl.where(is_query, tile, tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        count = tl.where(is_query, Q_HEADS, KV_HEADS)
        column, tail = tl.arange(0, HALF_PAD), tl.arange(0, REST_PAD)
        inside = (head < count)[:, None] & (column < HALF)[None, :]
        inside_tail = (head < count)[:, None] & (tail < REST)[None, :]
        columns, tails = column[None, :], tail[None, :]
        dim: tl.constexpr = 2 * HALF + REST
        row = projected + token * stride
        at = row + tl.where(is_query, Q, K) + head[:, None] * dim
        low, high, rest = _loaded(at, columns, tails, inside, inside_tail, HALF, REST)
        low, high, rest = low.to(tl.float32), high.to(tl.float32), rest.to(tl.float32)
        kind: tl.constexpr = projected.dtype.element_ty
        summed = sums + token * sums_stride
        low, high, rest = _with_lora(
            low, high, rest, summed + tl.where(is_query, Q_SUMS, K_SUMS), head, columns, tails, inside, inside_tail,
            count, token, tl.where(is_query, Q_SITE, K_SITE), lora_slots, ranks, scales, vectors, adapters,
            HAS_LORA, kind, HALF, REST,
        )  # fmt: skip
        for late in tl.static_range(2):
            if (Q_FORM or K_FORM) and late == NORMS_LAST:
                if is_query:
                    low, high, rest = _normed(
                        low, high, rest, q_weight, q_bias, q_eps, head, column, tail, inside, inside_tail,
                        Q_FORM, HALF, REST,
                    )  # fmt: skip
                else:
                    low, high, rest = _normed(
                        low, high, rest, k_weight, k_bias, k_eps, head, column, tail, inside, inside_tail,
                        K_FORM, HALF, REST,
                    )  # fmt: skip
            if ROTATES and late == 0:
                c = tl.load(cos + position.to(tl.int64) * HALF + column, mask=column < HALF, other=0.0)[None, :]
                s = tl.load(sin + position.to(tl.int64) * HALF + column, mask=column < HALF, other=0.0)[None, :]
                low, high = low * c - high * s, high * c + low * s
        if GROWS:
            factor = tl.load(growth + position, mask=is_query, other=1.0)
            low, high, rest = low * factor, high * factor, rest * factor
        low, high, rest = low.to(kind), high.to(kind), rest.to(kind)
        if is_query:
            _store(at, low, high, rest, columns, tails, inside, inside_tail, HALF, REST)
        else:
            table = block_table + tl.load(token_slot + token).to(tl.int64) * table_stride
            block = tl.load(table + position // BLOCK).to(tl.int64)
            if KEYS == "kept":
                _store(at, low, high, rest, columns, tails, inside, inside_tail, HALF, REST)
            if KEYS == "appended":
                place = keys + block * key_block + position % BLOCK * key_token + head[:, None] * key_head
                _store(place, low, high, rest, columns, tails, inside, inside_tail, HALF, REST)
            if VALUES:
                v_at = row + V + head[:, None] * dim
                v_low, v_high, v_rest = _loaded(v_at, columns, tails, inside, inside_tail, HALF, REST)
                v_low, v_high, v_rest = _with_lora(
                    v_low.to(tl.float32), v_high.to(tl.float32), v_rest.to(tl.float32), summed + V_SUMS,
                    head, columns, tails, inside, inside_tail, KV_HEADS, token, V_SITE, lora_slots, ranks, scales,
                    vectors, adapters, HAS_LORA, kind, HALF, REST,
                )  # fmt: skip
                if V_FORM:
                    v_low, v_high, v_rest = _normed(
                        v_low, v_high, v_rest, v_weight, v_bias, v_eps, head, column, tail, inside, inside_tail,
                        V_FORM, HALF, REST,
                    )  # fmt: skip
                place = values + block * value_block + position % BLOCK * value_token + head[:, None] * value_head
                _store(place, v_low, v_high, v_rest, columns, tails, inside, inside_tail, HALF, REST)


def rotate_and_append(
    projected: Tensor, tokens: TokenTables, cache: PagedCache, heads: Heads, lora: LoraSums | None = None
) -> None:
    """Norms and rotates q in place, and norms, rotates and appends k and v to the cache, as `heads` says.

    projected: [tokens, columns], rows at any stride; tokens at position -1 are skipped. Norms of whole rows may change
    the columns of k and v. `lora`: of q, k and v, is added to them first; only where `heads.is_one_launch`.
    """
    if lora is not None and not heads.is_one_launch:
        raise ValueError("only one launch can add LoRA to the heads that it reads")
    places = {name: lora_place(lora, name.lower()) for name in "QKV"}
    places["V"] = places["K"] if heads.v == heads.k else places["V"]
    sites = {f"{name}_SITE": site for name, (site, _) in places.items()}
    sums = {f"{name}_SUMS": first for name, (_, first) in places.items()}
    for step in heads.steps:
        if isinstance(step, _RowNorm):
            norm_rows(projected[:, step.columns], step.norm)
            continue
        cos, sin, growth, *norms = (projected if each is None else each for each in (*step.tables, *step.norms))
        rotate_kernel[(projected.shape[0], step.programs)](
            projected, cos, sin, growth, tokens.slot, tokens.position, cache.block_table, cache.keys, cache.values,
            *norms, *lora_arguments(lora, projected), projected.stride(0), cache.block_table.stride(0),
            *cache.keys.stride()[:3], *cache.values.stride()[:3],
            BLOCK=cache.keys.shape[1], HAS_LORA=lora is not None, **sites, **sums, **step.constants,
        )  # fmt: skip
