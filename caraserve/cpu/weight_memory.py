"""The memory of base weights, in the layout of the kernels: panels of 64 outputs, one aligned array for each tensor."""

import mmap
from collections.abc import Sequence
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import ALIGN_BYTES, PANEL
from caraserve.cpu.jit import entry
from caraserve.cpu.tiles import words_transpose
from caraserve.model.dtype import Dtype, rounded, to_float32
from caraserve.util.units import align_up, ceil_div

Raw = NDArray[np.generic]

_CHUNK_BYTES = 256 << 20  # of which half a huge page is wasted at the end; only pages that are written take memory
HUGE_PAGE_BYTES = 2 << 20


def convert(raw: Raw, source: Dtype, target: Dtype) -> Raw:
    """Converts stored weights to another dtype, rounding to nearest even."""
    return raw if source is target else rounded(to_float32(raw, source), target)


_transpose, _transpose_pairs = words_transpose(), words_transpose(swaps_halves=True)


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
def _pack_words(source, panels, are_pairs):  # type: ignore[no-untyped-def]
    """Does what `_pack` does, for words of 32 bits. `are_pairs`: the halves of each are swapped."""
    outputs, words = source.shape
    stride, first_word, first_to = 4 * words, source.ctypes.data, panels.ctypes.data
    for panel in range(panels.shape[0]):
        lanes = min(64, outputs - 64 * panel)
        for block in range(0, words, 16):
            at, to = first_word + 64 * panel * stride + 4 * block, first_to + 256 * (panel * words + block)
            whole = lanes // 16 * 16 if block + 16 <= words else 0
            for lane in range(0, whole, 16):
                if are_pairs:
                    _transpose_pairs(at + lane * stride, stride, to + 4 * lane, 256)
                else:
                    _transpose(at + lane * stride, stride, to + 4 * lane, 256)
            for lane in range(whole, lanes):
                for k in range(block, min(block + 16, words)):
                    word = source[64 * panel + lane, k]
                    panels[panel, k, lane] = word << np.uint32(16) | word >> np.uint32(16) if are_pairs else word


def huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Returns zeroed memory in huge pages; it takes no room until it is written. With 4 KiB pages a core that streams
    weights loses a third of the bandwidth to address translation and to prefetchers that stop at each page."""
    # Python's default is shared memory, for which Linux has another setting, usually `never`.
    memory = mmap.mmap(-1, align_up(num_bytes, HUGE_PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class WeightMemory:
    """Allocates aligned arrays in chunks of 256 MiB and more; keeps them alive. Methods return addresses. Several
    threads may call them at once."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._chunks: list[NDArray[np.uint8]] = []
        self._used = 0
        self._orders: dict[bytes, int] = {}

    def panels(self, raw: Raw) -> int:
        """Packs `[out, in]` into panels."""
        outputs, inputs = raw.shape
        array = self._allocate(align_up(outputs, PANEL) * inputs * raw.itemsize).view(raw.dtype)
        panels = array.reshape(ceil_div(outputs, PANEL), inputs, PANEL)
        source = np.ascontiguousarray(raw)
        if raw.itemsize == 4:
            _pack_words(source.view(np.uint32), panels.view(np.uint32), False)
        else:
            _pack(source, panels)
        return int(array.ctypes.data)

    def pairs(self, raw: Raw) -> int:
        """Packs bits of bfloat16, `[out, in]`, into panels of pairs of inputs, `[out / 64, in / 2, 64, 2]`, the later
        input of a pair first; see linear/pairs.py."""
        outputs, inputs = raw.shape
        even = raw if inputs % 2 == 0 else np.pad(raw, ((0, 0), (0, 1)))
        words = np.ascontiguousarray(even).view(np.uint32)
        shape = ceil_div(outputs, PANEL), words.shape[1], PANEL
        array = self._allocate(4 * int(np.prod(shape))).view(np.uint32)
        _pack_words(words, array.reshape(shape), True)
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
        with self._lock:
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
        with self._lock:
            if not self._chunks or self._used + size > self._chunks[-1].size:
                self._chunks.append(huge_pages(max(size, _CHUNK_BYTES)))
                self._used = 0
            array = self._chunks[-1][self._used : self._used + num_bytes]
            self._used += size
            return array
