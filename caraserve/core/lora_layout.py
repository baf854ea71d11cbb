"""The byte layout of an adapter image, the same in every cache: rank rows, layer-major, contiguous. No I/O.

Per layer, for each group of projections that read the same input (qkv, o, gate-up, down): every A of the group, then
every B. A is `[padded_rank, in]`; B is transposed and cut into panels, `[out / 64, padded_rank, 64]`, so that a tile of
outputs is one stream for a CPU core and for a thread block alike. Ranks are padded to a multiple of `RANK_STEP`, A's
rows to `A_COLUMNS` and B's to whole panels, all with zeros, which add exact zeros. A group of layers is one range of
bytes: loading is a copy, and CPU workers read the same layout as the device.

All values have the adapter's own dtype, so nothing is rounded. The scale (alpha / r or alpha / sqrt(r)) is stored apart
from the bytes, because folding it in could round.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec
from caraserve.util.units import align_up

RANK_STEP = 8
MAX_RANK = 512
A_COLUMNS = 16  # a row of A is a whole number of fp32 vectors
PANEL = 64  # outputs in a panel
ALIGN_BYTES = 64  # a cache line; every A and B starts on one

GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
QKV, OUT, GATE_UP, DOWN = range(4)  # indices of GROUPS


@dataclass(frozen=True, slots=True)
class SiteSpan:
    """The offsets of one adapted module's A and B in the image. `rank` is without padding."""

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
    """The description of an adapter, without its name and bytes. `digest` (sha256, hex) identifies it."""

    digest: str
    dtype: Dtype
    rank: int  # the largest of any module
    targets: tuple[str, ...]  # adapted modules, in the order of SITES
    layer_ends: tuple[int, ...]  # [layers] where each layer's bytes end; a layer without modules has none
    spans: tuple[SiteSpan, ...]  # ordered by layer, then by group
    chunks: tuple[bytes, ...] = ()  # sha256 of each chunk of the bytes (`lora/manifest.py`)

    @property
    def num_bytes(self) -> int:
        return self.layer_ends[-1]


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter image in the host cache. `data`: uint8 [spec.num_bytes], 64-byte aligned, laid out as `spec.spans`."""

    spec: AdapterSpec
    data: NDArray[np.uint8]


def a_bytes(span: SiteSpan, in_features: int, dtype: Dtype) -> int:
    """Returns the bytes of a module's A, up to the start of the next matrix."""
    return align_up(span.padded_rank * align_up(in_features, A_COLUMNS) * dtype.itemsize, ALIGN_BYTES)


def b_bytes(span: SiteSpan, out_features: int, dtype: Dtype) -> int:
    """Returns the bytes of a module's B, up to the start of the next matrix."""
    return align_up(span.padded_rank * align_up(out_features, PANEL) * dtype.itemsize, ALIGN_BYTES)


def lay_out(
    model: ModelSpec, dtype: Dtype, modules: Mapping[tuple[int, str], tuple[int, float]]
) -> tuple[tuple[SiteSpan, ...], tuple[int, ...]]:
    """Places modules {(layer, site name): (rank, scale)}. Returns the spans, and the end of each layer's bytes."""
    spans: list[SiteSpan] = []
    ends = [0] * model.layers
    offset = 0
    for layer, group in _groups(modules):
        placed = []
        for site in group:
            span = SiteSpan(layer, SITES.index(site), *modules[layer, site], a_offset=offset, b_offset=0)
            offset += a_bytes(span, model.site_shape(site)[0], dtype)
            placed.append(span)
        for span in placed:
            spans.append(replace(span, b_offset=offset))
            offset += b_bytes(span, model.site_shape(SITES[span.site])[1], dtype)
        ends[layer:] = [offset] * (model.layers - layer)
    return tuple(spans), tuple(ends)


def _groups(modules: Mapping[tuple[int, str], tuple[int, float]]) -> Iterator[tuple[int, list[str]]]:
    for layer in sorted({layer for layer, _ in modules}):
        for group in GROUPS:
            present = [site for site in group if (layer, site) in modules]
            if present:
                yield layer, present


def aligned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Returns an uninitialised uint8 array whose first byte is 64-byte aligned."""
    raw = np.empty(num_bytes + ALIGN_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + num_bytes]
