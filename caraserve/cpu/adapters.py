"""The device cache of the CPU backend: copies of adapter images, and the table of addresses that kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import MAX_RANK, MAX_ROWS, PANEL, AdapterSpec, HostAdapter, aligned_bytes
from caraserve.cpu.jit import entry
from caraserve.cpu.memory_order import keep_order
from caraserve.cpu.simd import store_release
from caraserve.cpu.structs import LORA_ENTRY, LOST
from caraserve.cpu.weight_memory import HUGE_PAGE_BYTES, huge_pages
from caraserve.model.plan import DecoderPlan
from caraserve.model.vocabulary import SIDES
from caraserve.util.units import align_up

_ZEROS_BYTES = 64 << 20  # more than a core's caches


@entry
def _publish(word, value):  # type: ignore[no-untyped-def]
    store_release(word, value)


@dataclass(slots=True, eq=False)
class CpuImage:
    """An adapter image that is on the device or being copied there; `data` is filled group by group of layers.

    Until all layers are in the host cache only streamed prefills use it, for their `computable_layers`.
    """

    adapter: HostAdapter  # its image in the host cache; not to be read after the last layer has arrived
    data: NDArray[np.uint8]
    arrived: NDArray[np.int64]  # [0]: layers whose weights are in `data`, or LOST; [1]: the one that was copied first
    in_host: int  # layers whose weights are in the host cache
    is_aborted: bool = False  # True: the layers that are not in the host cache never will be

    @classmethod
    def empty(cls, adapter: HostAdapter, layers: int | None = None, first_layer: int = 0) -> "CpuImage":
        """Returns an image of which no layer has arrived. It takes no memory until it is written.

        `layers`: how many are in the host cache; None: all. `first_layer`: the one that is copied first; after the last
        layer come those before it.
        """
        arrived = aligned_bytes(64).view(np.int64)
        arrived[:2] = 0, first_layer
        in_host = len(adapter.spec.layer_ends) if layers is None else layers
        return cls(adapter, _image_bytes(adapter.spec.num_bytes), arrived, in_host)

    def computable_layers(self, *, assist: bool) -> int:
        """Returns how many first layers can be computed without waiting for the host cache. `assist`: CPU workers read
        the host's copy, so layers that are still being copied to the device count too."""
        on_device = self.on_device
        return self.in_host if assist or on_device == LOST else on_device

    @property
    def on_device(self) -> int:
        """How many layers are in `data`, or LOST; their weights may be read then."""
        layers = int(self.arrived[0])
        keep_order()
        return layers

    @property
    def first_layer(self) -> int:
        """The layer that is copied first."""
        return int(self.arrived[1])

    def mark_arrived(self, layers: int) -> None:
        """Publishes that so many layers are in `data`, from `first_layer` on, by a release store after the weights."""
        _publish(int(self.arrived.ctypes.data), layers)

    def mark_lost(self) -> None:
        """Publishes that the other layers will never arrive; waiting kernels read the host's copy."""
        _publish(int(self.arrived.ctypes.data), LOST)


def _image_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Returns memory for an image: in huge pages, as base weights have it, if it fills one."""
    return aligned_bytes(num_bytes) if num_bytes < HUGE_PAGE_BYTES else huge_pages(num_bytes)[:num_bytes]


class DeviceAdapters:
    """The adapter table: binds images to slots. Slot 0 is the base model and stays empty. For the lane thread only."""

    def __init__(self, plan: DecoderPlan, num_slots: int, *, padded: bool = False) -> None:
        """`padded`: whether kernels compute all adapters of an iteration at the largest rank of its decoding rows, or
        of its prompts."""
        self._layers = len(plan.layers)
        self._widest = align_up(max(plan.widest_input, plan.widest_output), PANEL)
        self._zeros = aligned_bytes(max(_ZEROS_BYTES, 8 * MAX_RANK * self._widest) if padded else 0)
        self._zeros[:] = 0  # written, so that each page has memory of its own
        self._entries = np.zeros((num_slots, self._layers, plan.most_sites), LORA_ENTRY)
        self._host_entries = np.zeros_like(self._entries)
        self._vocabulary = np.zeros((num_slots, len(SIDES)), LORA_ENTRY)
        self._changed_tokens = np.full((num_slots, len(SIDES), MAX_ROWS), -1, np.int64)
        self._changing: set[int] = set()  # slots whose adapters change the embedding or the head
        self._arrived = np.zeros(num_slots, np.int64)  # addresses
        self.max_rank = np.zeros(num_slots, np.int64)  # largest padded rank of a slot
        self.bindings = np.zeros(num_slots, np.int64)  # how often a slot has been bound or unbound
        self._images: dict[int, CpuImage] = {}

    def addresses(self) -> dict[str, int]:
        """Returns the fields of a LORA record that describe this table."""
        return {
            "entries": int(self._entries.ctypes.data),
            "host_entries": int(self._host_entries.ctypes.data),
            "vocabulary": int(self._vocabulary.ctypes.data),
            "changed_tokens": int(self._changed_tokens.ctypes.data),
            "arrived": int(self._arrived.ctypes.data),
            "layers": self._layers,
            "most_sites": self._entries.shape[2],
        }

    def is_arriving(self, slot: int) -> bool:
        """Returns whether layers of the adapter in a bound slot have not arrived yet."""
        return self._images[slot].on_device != self._layers

    def image(self, slot: int) -> CpuImage:
        """Returns the image in a bound slot."""
        return self._images[slot]

    def adapted(self, slot: int) -> NDArray[np.bool_]:
        """Returns which modules the adapter in `slot` has, bool [layers, sites]."""
        adapted: NDArray[np.bool_] = self._entries["rank"][slot] > 0
        return adapted

    def changes_vocabulary(self, slot: int) -> bool:
        """Returns whether the adapter in `slot` changes the embedding or the head."""
        return slot in self._changing

    def padding(self, slots: Sequence[int], are_prompts: Sequence[bool]) -> NDArray[np.int64]:
        """Returns the padding of a batch, words of LORA_ENTRY [slots, layers, sites]: zeros that fill up every module
        to the largest rank among the prompts, or among the rows that decode. Returns no words if nothing is padded.

        Neighbouring modules have different zeros, which are therefore read from memory as an adapter's weights are.
        """
        if self._zeros.size == 0 or not slots:
            return np.zeros(0, np.int64)
        highest, prompts = self.max_rank[list(slots)], np.array(are_prompts, np.bool_)
        of_prompts, of_decoding = (int(highest[each].max(initial=0)) for each in (prompts, ~prompts))
        largest = np.where(prompts, of_prompts, of_decoding)[:, None, None]
        entries = self._entries[list(slots)]  # a copy
        ranks = entries["rank"]
        more = np.where(ranks > 0, largest - ranks, 0)
        if not more.any():
            return np.zeros(0, np.int64)
        entries["rank"] = more
        module_bytes = 4 * int(largest.max()) * self._widest
        offsets = np.arange(entries.size) * module_bytes % (self._zeros.size - module_bytes)
        entries["a"] = entries["b"] = (int(self._zeros.ctypes.data) + offsets).reshape(entries.shape)
        return entries.view(np.int64).reshape(-1)

    def bind(self, slot: int, image: CpuImage) -> None:
        """Binds `image` to `slot`, whether or not its layers have arrived."""
        self.unbind(slot)
        spec = image.adapter.spec
        fill_entries(self._entries[slot], spec, int(image.data.ctypes.data))
        fill_entries(self._host_entries[slot], spec, int(image.adapter.data.ctypes.data))
        self._fill_vocabulary(slot, spec, int(image.data.ctypes.data))
        self._arrived[slot] = image.arrived.ctypes.data
        self.max_rank[slot] = self._entries["rank"][slot].max()
        self._images[slot] = image

    def unbind(self, slot: int) -> None:
        """Empties `slot` and frees its image."""
        self._entries[slot] = self._host_entries[slot] = 0
        self._vocabulary["rank"][slot] = 0
        self._changing.discard(slot)
        self._changed_tokens[slot] = -1
        self.max_rank[slot] = 0
        self.bindings[slot] += 1
        self._images.pop(slot, None)

    def _fill_vocabulary(self, slot: int, spec: AdapterSpec, base: int) -> None:
        for span in spec.vocabulary:
            self._changing.add(slot)
            at, change = (slot, SIDES.index(span.change.side)), span.change
            place = base + span.a_offset, base + span.b_offset
            self._vocabulary[at] = (*place, span.padded_rank, spec.dtype.value, 0, change.scale)
            self._changed_tokens[at][: len(change.tokens)] = change.tokens


def fill_entries(entries: NDArray[np.void], spec: AdapterSpec, base: int) -> None:
    """Writes an adapter's table entries, LORA_ENTRY [layers, sites]; `base`: address of its image."""
    for span in spec.spans:
        vectors = 0 if span.vectors_offset is None else base + span.vectors_offset
        matrices = base + span.a_offset, base + span.b_offset, span.padded_rank, spec.dtype.value
        entries[span.layer, span.site] = *matrices, vectors, span.scale
