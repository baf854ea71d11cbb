"""LoRA of decoding rows that the kernel which reads a base product next adds to it.

`bgmv_expand_apart` computes the sums x Aᵀ B beside the base product and leaves them in rows of their own, in fp32. The
kernel that reads the product calls `with_lora`, which does what `bgmv_expand` does to the product in memory: the same
operations in the same order, and one rounding to the activations' dtype. So both give the same bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from caraserve.core.lora_layout import PANEL
from caraserve.gpu.kernels.lora import SiteTables

_PANEL = tl.constexpr(PANEL)


@dataclass(frozen=True, slots=True)
class LoraSums:
    """The sums of one group, whose projections have a role each, and the tables of its layer."""

    sums: Tensor  # float32 [tokens, columns]
    slots: Tensor  # int32 [tokens], of the adapters that BGMV serves; 0: nothing is added
    tables: SiteTables
    places: Mapping[str, tuple[int, int]]  # by role: index of the projection, its first column in `sums`

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a kernel takes of it: `sums, lora_slots, ranks, scales, vectors, sums_stride, adapters`."""
        tables = self.tables
        return (
            self.sums,
            self.slots,
            tables.rank,
            tables.scale,
            tables.vectors,
            self.sums.stride(0),
            tables.rank.shape[1],
        )


def lora_arguments(lora: LoraSums | None, unread: Tensor) -> tuple[Any, ...]:
    """Returns the arguments for sums, or for none; `unread` stands for what there is not."""
    return (*[unread] * 5, 0, 0) if lora is None else lora.arguments


def lora_place(lora: LoraSums | None, role: str) -> tuple[int, int]:
    """Returns the place of a role, (0, 0) if there is none."""
    return (0, 0) if lora is None else lora.places.get(role, (0, 0))


@triton.jit
def lora_entry(lora_slots, token, site, adapters):  # type: ignore[no-untyped-def]
    """Returns the adapter slot of a token, and its place in the tables for a projection."""
    slot = tl.load(lora_slots + token)
    return slot, site * adapters + slot


@triton.jit
def with_lora(value, at, column, inside, width, slot, entry, ranks, scales, vectors):  # type: ignore[no-untyped-def]
    """Returns some columns of a projection's product with a token's LoRA, in fp32, not rounded. `value`: the product in
    fp32; `at`: the address of the projection's sums in the token's row; `width`: columns of the projection."""
    rank, scale, vector = tl.load(ranks + entry), tl.load(scales + entry), tl.load(vectors + entry)
    total = tl.load(at + column, mask=inside & (slot > 0), other=0.0)  # not `rank > 0`, for which it would have to wait
    result = tl.fma(total, scale, value)
    if vector != 0:
        factor_at = vector.to(tl.pointer_type(tl.float32)) + column
        factor = tl.load(factor_at, mask=inside, other=0.0)
        bias = tl.load(factor_at + tl.cdiv(width, _PANEL) * _PANEL, mask=inside, other=0.0)
        result = tl.fma(result, factor, bias)
    return tl.where(rank > 0, result, value)
