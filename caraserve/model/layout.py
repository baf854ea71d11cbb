"""The byte map of an adapter in host memory: rank rows, layer-major, contiguous. Pure.

Per layer, for each group of projections that read the same input (qkv, o, gate-up, down): every A of the group, then
every B. A is `[padded_rank, in]`, B is transposed to `[padded_rank, out]`; the rank is padded to a multiple of
`RANK_STEP` with zero rows, which add exact zeros. All rows have the adapter's own dtype, so nothing is rounded;
the scale (alpha / r or alpha / sqrt(r)) is kept beside the bytes because folding it in could round.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from caraserve.model.spec import SITES, ModelSpec
from caraserve.units import align_up

RANK_STEP = 8
MAX_RANK = 512
ALIGN_BYTES = 64  # a cache line; every A and B starts on one

GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)


class Dtype(Enum):
    """Storage type of weights. The value is the code that kernels switch on."""

    F32 = 0
    BF16 = 1
    F16 = 2

    @property
    def itemsize(self) -> int:
        return 4 if self is Dtype.F32 else 2

    @property
    def storage(self) -> np.dtype[np.generic]:
        """numpy has no bfloat16, so 16-bit weights travel as raw bits."""
        return np.dtype(np.float32 if self is Dtype.F32 else np.uint16)


@dataclass(frozen=True, slots=True)
class SiteSpan:
    """Where one adapted module's A and B lie in the adapter's bytes. `rank` is without padding."""

    layer: int
    site: int  # index into SITES
    rank: int
    scale: float
    a_offset: int
    b_offset: int

    @property
    def padded_rank(self) -> int:
        return align_up(self.rank, RANK_STEP)


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What an adapter is, apart from its name and its bytes. `digest` (sha256 hex) is its identity."""

    digest: str
    dtype: Dtype
    rank: int  # the largest of any module
    targets: tuple[str, ...]  # adapted modules, in the order of SITES
    num_bytes: int  # of the host image
    spans: tuple[SiteSpan, ...]  # ordered by layer, then by group


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory: `data` is uint8 [spec.num_bytes], 64-byte aligned, laid out as `spec.spans`."""

    spec: AdapterSpec
    data: NDArray[np.uint8]


def lay_out(
    model: ModelSpec, dtype: Dtype, modules: Mapping[tuple[int, str], tuple[int, float]]
) -> tuple[tuple[SiteSpan, ...], int]:
    """Places modules {(layer, site name): (rank, scale)}; returns spans and the total of bytes."""
    spans: list[SiteSpan] = []
    offset = 0
    for layer, group in _groups(modules):
        a_offsets: dict[str, int] = {}
        for site in group:
            rank, _ = modules[layer, site]
            a_offsets[site] = offset
            in_features = model.site_shape(site)[0]
            offset = align_up(offset + align_up(rank, RANK_STEP) * in_features * dtype.itemsize, ALIGN_BYTES)
        for site in group:
            rank, scale = modules[layer, site]
            spans.append(SiteSpan(layer, SITES.index(site), rank, scale, a_offsets[site], offset))
            out_features = model.site_shape(site)[1]
            offset = align_up(offset + align_up(rank, RANK_STEP) * out_features * dtype.itemsize, ALIGN_BYTES)
    return tuple(spans), offset


def _groups(modules: Mapping[tuple[int, str], tuple[int, float]]) -> Iterator[tuple[int, list[str]]]:
    for layer in sorted({layer for layer, _ in modules}):
        for group in GROUPS:
            present = [site for site in group if (layer, site) in modules]
            if present:
                yield layer, present


def aligned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """An uninitialised uint8 array whose first byte is 64-byte aligned."""
    raw = np.empty(num_bytes + ALIGN_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + num_bytes]
