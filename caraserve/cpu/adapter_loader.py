"""Copies adapters from the host cache to the device cache, layer group by layer group, on a thread of its own.

Groups are copied in the order in which their bytes are in the host cache, so an adapter that is still being downloaded
delays no other. Both caches are main memory here and a copy costs little; a bandwidth can be emulated, so that loading
modes can be compared as behind a real link.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.adapters import CpuImage
from caraserve.telemetry.trace import Trace
from caraserve.util.thread_priority import yield_to_event_loop


class EmulatedLink:
    """The link from host to device, one copy at a time. `bytes_per_s`: bandwidth to emulate; None: that of memory."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._closing = threading.Event()

    def copy(self, target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        """Copies, and returns when a link of the emulated bandwidth would have finished."""
        started_s = time.monotonic()
        np.copyto(target, source)
        if self.bytes_per_s is not None:
            self._free_s = max(started_s, self._free_s) + source.nbytes / self.bytes_per_s
            self._closing.wait(max(0.0, self._free_s - time.monotonic()))

    def close(self) -> None:
        """Ends all emulated waiting, now and later."""
        self._closing.set()


LoadDone = Callable[[Exception | None], None]


@dataclass(slots=True, eq=False)
class _PendingLoad:
    image: CpuImage
    groups: deque[range]  # of layers, to copy in this order
    done: LoadDone
    copied: int = 0  # layers
    has_ended: bool = False


class AdapterLoader:
    """Copies one layer group at a time. Thread-safe."""

    def __init__(
        self,
        link: EmulatedLink,
        on_lane: Callable[[Callable[[], None]], None],
        layers_changed: Callable[[], None],
        trace: Trace | None,
    ) -> None:
        """`on_lane` queues a call for the lane thread. `layers_changed` is called there when layers of an adapter have
        reached a cache, or never will."""
        self._link, self._on_lane, self._trace = link, on_lane, trace
        self._layers_changed = layers_changed
        self._thread = ThreadPoolExecutor(1, "caraserve-copy", initializer=yield_to_event_loop)
        # By adapter slot: loads whose image is not all in the host cache.
        self._incomplete: dict[int, _PendingLoad] = {}

    def load(self, slot: int, image: CpuImage, group_ends: Sequence[int], done: LoadDone) -> None:
        """Starts to copy an image as far as it is in the host cache; groups end before the layers `group_ends`. The
        group that begins at the image's first layer to copy is the first; those before it come last.

        `done` is called on the lane, because an iteration that is running may still read the host's copy.
        """
        layers = len(image.adapter.spec.layer_ends)
        ends = sorted({0, image.first_layer, *(end for end in group_ends if 0 < end < layers), layers})
        groups = deque(range(first, end) for first, end in pairwise(ends))
        groups.rotate(-ends.index(image.first_layer))
        load = _PendingLoad(image, groups, done)
        if image.in_host < layers:
            self._incomplete[slot] = load
        self._thread.submit(self._copy_layers, load)

    def extend(self, slot: int, layers: int) -> None:
        """Continues the load of a slot: the first `layers` layers are in the host cache now."""
        load = self._incomplete[slot]
        load.image.in_host = layers
        if layers == len(load.image.adapter.spec.layer_ends):
            del self._incomplete[slot]
        self._on_lane(self._layers_changed)
        self._thread.submit(self._copy_layers, load)

    def abort(self, slot: int, cause: Exception) -> None:
        """Ends a load whose other layers will never be in the host cache. `done` gets `cause` after the last copy."""
        load = self._incomplete.pop(slot)
        load.image.is_aborted = True
        self._on_lane(self._layers_changed)
        self._thread.submit(self._finish, load, cause)

    def close(self) -> None:
        """Finishes the queued copies, then ends the thread."""
        self._thread.shutdown(wait=True)

    # --- on the copy thread ---

    def _copy_layers(self, load: _PendingLoad) -> None:
        """Copies the groups that are in the host cache."""
        image, ends = load.image, load.image.adapter.spec.layer_ends
        try:
            while load.groups and load.groups[0].stop <= image.in_host and not load.has_ended:
                group = load.groups.popleft()
                started_ns = time.monotonic_ns()
                at = slice(ends[group.start - 1] if group.start else 0, ends[group.stop - 1])
                self._link.copy(image.data[at], image.adapter.data[at])
                load.copied += len(group)
                image.mark_arrived(load.copied)
                self._on_lane(self._layers_changed)
                if self._trace is not None:
                    name = f"{image.adapter.spec.digest[:12]} layers {group.start} to {group.stop - 1}"
                    self._trace.span("link", name, started_ns, time.monotonic_ns())
        except Exception as error:
            image.mark_lost()
            self._on_lane(self._layers_changed)
            self._finish(load, error)
        if not load.groups:
            self._finish(load, None)

    def _finish(self, load: _PendingLoad, failure: Exception | None) -> None:
        if load.has_ended:
            return
        load.has_ended = True
        self._on_lane(lambda: load.done(failure))
