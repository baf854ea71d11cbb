"""The device tier of the CPU backend: adapters copied out of host memory, and the table that kernels read. Level 1."""

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.jit import entry
from caraserve.cpu.kernels import PANEL
from caraserve.cpu.records import LORA, LORA_ENTRY, filled
from caraserve.cpu.simd import LANES
from caraserve.model.layout import ALIGN_BYTES, AdapterSpec, HostAdapter, SiteSpan, aligned_bytes
from caraserve.model.spec import SITES, ModelSpec
from caraserve.units import align_up


@entry
def _pack_rows(source, target, panels):  # type: ignore[no-untyped-def]
    """Copies A rows `[rank, in]` → `[rank, in padded]`, or B rows `[rank, out]` → `[out / 64, rank, 64]`."""
    rank, width = source.shape
    for row in range(rank):
        if panels:
            for column in range(width):
                target[column // 64, row, column % 64] = source[row, column]
        else:
            for column in range(width):
                target[0, row, column] = source[row, column]


class DeviceAdapters:
    """Binds packed adapters to slots of the table. Slot 0 stays empty: it is the base model.

    `pack` may run on any thread; `bind` and `unbind` change what kernels read and run on the lane's thread.
    """

    def __init__(self, spec: ModelSpec, num_slots: int) -> None:
        self._spec = spec
        self._entries = np.zeros((num_slots, spec.layers, len(SITES)), LORA_ENTRY)
        self.table = filled(LORA, entries=int(self._entries.ctypes.data), layers=spec.layers)
        self.max_rank = np.zeros(num_slots, np.int64)  # largest padded rank of a slot
        self._images: dict[int, NDArray[np.uint8]] = {}

    @property
    def bound_slots(self) -> int:
        return len(self._images)

    def num_bytes(self, adapter: AdapterSpec) -> int:
        """Device bytes of an adapter."""
        return sum(a_bytes + b_bytes for _, a_bytes, b_bytes in self._sizes(adapter))

    def _sizes(self, adapter: AdapterSpec) -> list[tuple[SiteSpan, int, int]]:
        sizes = []
        for span in adapter.spans:
            inputs, outputs = self._spec.site_shape(SITES[span.site])
            row_bytes = span.padded_rank * adapter.dtype.itemsize
            a_bytes = align_up(row_bytes * align_up(inputs, LANES), ALIGN_BYTES)
            sizes.append((span, a_bytes, align_up(row_bytes * align_up(outputs, PANEL), ALIGN_BYTES)))
        return sizes

    def pack(self, adapter: HostAdapter) -> NDArray[np.uint8]:
        """The device image of an adapter: for each span A, then B, in the spans' order."""
        spec = adapter.spec
        image = aligned_bytes(self.num_bytes(spec))
        image[:] = 0
        storage, size = spec.dtype.storage, spec.dtype.itemsize
        place = 0
        for span, a_bytes, b_bytes in self._sizes(spec):
            inputs, outputs = self._spec.site_shape(SITES[span.site])
            rank = span.padded_rank
            a = adapter.data[span.a_offset : span.a_offset + rank * inputs * size].view(storage)
            b = adapter.data[span.b_offset : span.b_offset + rank * outputs * size].view(storage)
            a_target = image[place : place + rank * align_up(inputs, LANES) * size].view(storage)
            _pack_rows(a.reshape(rank, inputs), a_target.reshape(1, rank, -1), False)
            b_start = place + a_bytes
            b_target = image[b_start : b_start + rank * align_up(outputs, PANEL) * size].view(storage)
            _pack_rows(b.reshape(rank, outputs), b_target.reshape(-1, rank, PANEL), True)
            place += a_bytes + b_bytes
        return image

    def bind(self, slot: int, adapter: AdapterSpec, image: NDArray[np.uint8]) -> None:
        """Makes `slot` mean the packed `image`."""
        self.unbind(slot)
        place = int(image.ctypes.data)
        for span, a_bytes, b_bytes in self._sizes(adapter):
            entry = (place, place + a_bytes, span.padded_rank, adapter.dtype.value, span.scale)
            self._entries[slot, span.layer, span.site] = entry
            place += a_bytes + b_bytes
        self.max_rank[slot] = self._entries["rank"][slot].max()
        self._images[slot] = image

    def unbind(self, slot: int) -> None:
        """Makes `slot` mean no adapter and gives its memory back."""
        self._entries["rank"][slot] = 0
        self.max_rank[slot] = 0
        self._images.pop(slot, None)
