"""The memory of base weights, in the layout of the kernels: panels of 64 outputs, one aligned array for each tensor."""

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import ALIGN_BYTES, PANEL
from caraserve.cpu.jit import entry
from caraserve.model.dtype import Dtype, rounded, to_float32
from caraserve.util.units import align_up, ceil_div

Raw = NDArray[np.generic]

_CHUNK_BYTES = 32 << 20
HUGE_PAGE_BYTES = 2 << 20


def convert(raw: Raw, source: Dtype, target: Dtype) -> Raw:
    """Converts stored weights to another dtype, rounding to nearest even."""
    return raw if source is target else rounded(to_float32(raw, source), target)


@entry
def _pack(source, panels):  # type: ignore[no-untyped-def]
    """Packs `[out, in]` into panels `[out / 64, in, 64]`, in blocks that stay in the L1 cache."""
    outputs, inputs = source.shape
    for panel in range(panels.shape[0]):
        for block in range(0, inputs, 16):
            for lane in range(min(64, outputs - 64 * panel)):
                for k in range(block, min(block + 16, inputs)):
                    panels[panel, k, lane] = source[64 * panel + lane, k]


@entry
def _pack_pairs(source, panels):  # type: ignore[no-untyped-def]
    """Packs `[out, in]` into panels `[out / 64, in / 2, 64, 2]`, the later input of a pair first."""
    outputs, inputs = source.shape
    for panel in range(panels.shape[0]):
        for block in range(0, inputs, 16):
            for lane in range(min(64, outputs - 64 * panel)):
                for k in range(block, min(block + 16, inputs)):
                    panels[panel, k // 2, lane, 1 - k % 2] = source[64 * panel + lane, k]


def huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Returns zeroed memory in huge pages; it takes no room until it is written. With 4 KiB pages a core that streams
    weights loses a third of the bandwidth to address translation and to prefetchers that stop at each page."""
    # Python's default is shared memory, for which Linux has another setting, usually `never`.
    memory = mmap.mmap(-1, align_up(num_bytes, HUGE_PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class WeightMemory:
    """Allocates aligned arrays in chunks of 32 MiB and more; keeps them alive. Methods return addresses."""

    def __init__(self) -> None:
        self._chunks: list[NDArray[np.uint8]] = []
        self._used = 0
        self._orders: dict[bytes, int] = {}

    def panels(self, raw: Raw) -> int:
        """Packs `[out, in]` into panels."""
        outputs, inputs = raw.shape
        array = self._allocate(align_up(outputs, PANEL) * inputs * raw.itemsize).view(raw.dtype)
        _pack(np.ascontiguousarray(raw), array.reshape(ceil_div(outputs, PANEL), inputs, PANEL))
        return int(array.ctypes.data)

    def pairs(self, raw: Raw) -> int:
        """Packs bits of bfloat16, `[out, in]`, into panels of pairs of inputs; see linear/pairs.py."""
        outputs, inputs = raw.shape
        shape = ceil_div(outputs, PANEL), ceil_div(inputs, 2), PANEL, 2
        array = self._allocate(2 * int(np.prod(shape))).view(raw.dtype)
        _pack_pairs(np.ascontiguousarray(raw), array.reshape(shape))
        return int(array.ctypes.data)

    def vectors(self, values: NDArray[np.generic], width: int | None = None) -> int:
        """Copies a vector or a table as fp32, each row zero-padded to `width`."""
        rows = values.reshape(-1, values.shape[-1])
        width = width or rows.shape[1]
        array = self._allocate(4 * len(rows) * width).view(np.float32).reshape(len(rows), width)
        array[:, : rows.shape[1]] = rows
        return int(array.ctypes.data)

    def rows(self, raw: Raw) -> int:
        """Copies a row-major table."""
        array = self._allocate(raw.nbytes)
        array.view(raw.dtype)[:] = raw.reshape(-1)
        return int(array.ctypes.data)

    def order(self, inputs: Sequence[int]) -> int:
        """Copies the inputs of columns, int32; equal ones share an address."""
        array = np.asarray(inputs, np.int32)
        if (key := array.tobytes()) not in self._orders:
            self._orders[key] = self.rows(array)
        return self._orders[key]

    def records(self, records: NDArray[np.void]) -> int:
        """Copies one record or more."""
        return self.rows(records)

    def zeros(self, num_bytes: int) -> NDArray[np.uint8]:
        """Returns zeroed bytes, for a format that packs its weights itself."""
        return self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Returns zeroed bytes, which begin on a cache line."""
        size = align_up(num_bytes, ALIGN_BYTES)
        if not self._chunks or self._used + size > self._chunks[-1].size:
            self._chunks.append(huge_pages(max(size, _CHUNK_BYTES)))
            self._used = 0
        array = self._chunks[-1][self._used : self._used + num_bytes]
        self._used += size
        return array
