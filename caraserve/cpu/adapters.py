"""The device tier of the CPU backend: copies of adapters, and the table that kernels read."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes
from caraserve.cpu.jit import entry
from caraserve.cpu.simd import store_release
from caraserve.cpu.structs import LORA_ENTRY, LOST
from caraserve.model.spec import SITES, ModelSpec


@entry
def _publish(word, value):  # type: ignore[no-untyped-def]
    store_release(word, value)


@dataclass(slots=True, eq=False)
class CpuImage:
    """An adapter on its way to the device, or there. `data` is filled by groups of layers. Until all are in the host
    tier, only `streamed_prefill.py` has kernels use it, as far as `can_compute` says."""

    adapter: HostAdapter  # in the host tier; not to be read after the last layer has arrived
    data: NDArray[np.uint8]
    arrived: NDArray[np.int64]  # [0]: layers whose weights are in `data`, or LOST
    in_host: int  # layers whose weights are in the host tier
    is_cut: bool = False  # whether those that are not in the host tier never will be

    @classmethod
    def empty(cls, adapter: HostAdapter, layers: int | None = None) -> "CpuImage":
        """Room for an adapter of which nothing has arrived, and `layers` layers are in the host tier; None: all. Takes
        no memory until it is written."""
        arrived = aligned_bytes(64).view(np.int64)
        arrived[:] = 0
        in_host = len(adapter.spec.layer_ends) if layers is None else layers
        return cls(adapter, aligned_bytes(adapter.spec.num_bytes), arrived, in_host)

    def can_compute(self, *, assist: bool) -> int:
        """The first so many layers can be computed without waiting for the host tier; `assist`: also those whose copy
        to the device is under way."""
        there = int(self.arrived[0])
        return self.in_host if assist or there == LOST else there

    def arrive(self, layers: int) -> None:
        """The first `layers` layers are in `data`: seen by the kernels from now on, after the weights themselves."""
        _publish(int(self.arrived.ctypes.data), layers)

    def lose(self) -> None:
        """The other layers will never arrive; whoever waits for them takes them from the host tier."""
        _publish(int(self.arrived.ctypes.data), LOST)


class DeviceAdapters:
    """Binds images to slots of the table. Slot 0 stays empty: it is the base model. The lane thread's alone."""

    def __init__(self, spec: ModelSpec, num_slots: int) -> None:
        self._layers = spec.layers
        self._entries = np.zeros((num_slots, spec.layers, len(SITES)), LORA_ENTRY)
        self._host_entries = np.zeros_like(self._entries)
        self._arrived = np.zeros(num_slots, np.int64)  # addresses
        self.max_rank = np.zeros(num_slots, np.int64)  # largest padded rank of a slot
        self.bindings = np.zeros(num_slots, np.int64)  # how often a slot's meaning has changed
        self._images: dict[int, CpuImage] = {}

    def addresses(self) -> dict[str, int]:
        """The fields of a LORA record that are this table's."""
        return {
            "entries": int(self._entries.ctypes.data),
            "host_entries": int(self._host_entries.ctypes.data),
            "arrived": int(self._arrived.ctypes.data),
            "layers": self._layers,
        }

    def is_arriving(self, slot: int) -> bool:
        """Whether layers of a bound slot are still missing."""
        return int(self._images[slot].arrived[0]) != self._layers

    def image(self, slot: int) -> CpuImage:
        """What a bound slot means."""
        return self._images[slot]

    def adapted(self, slot: int) -> NDArray[np.bool_]:
        """Whether a slot's adapter has each module, [layers, sites]."""
        adapted: NDArray[np.bool_] = self._entries["rank"][slot] > 0
        return adapted

    def bind(self, slot: int, image: CpuImage) -> None:
        """Makes `slot` mean `image`, whether or not it has arrived."""
        self.unbind(slot)
        spec = image.adapter.spec
        _fill(self._entries[slot], spec, int(image.data.ctypes.data))
        _fill(self._host_entries[slot], spec, int(image.adapter.data.ctypes.data))
        self._arrived[slot] = image.arrived.ctypes.data
        self.max_rank[slot] = self._entries["rank"][slot].max()
        self._images[slot] = image

    def unbind(self, slot: int) -> None:
        """Makes `slot` mean no adapter and gives its memory back."""
        self._entries["rank"][slot] = 0
        self._host_entries["rank"][slot] = 0
        self.max_rank[slot] = 0
        self.bindings[slot] += 1
        self._images.pop(slot, None)


def _fill(entries: NDArray[np.void], spec: AdapterSpec, base: int) -> None:
    """entries: LORA_ENTRY [layers, sites]."""
    for span in spec.spans:
        place = (base + span.a_offset, base + span.b_offset, span.padded_rank, spec.dtype.value, span.scale)
        entries[span.layer, span.site] = place
