"""Copies adapters to the device tier beside the lane, as far as their bytes are in the host tier.

Groups of layers are copied in the order in which they may be: an adapter whose bytes are still on their way to the host
tier holds up nobody's.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.adapters import CpuImage
from caraserve.cpu.thread_team import yield_to_event_loop
from caraserve.telemetry.trace import Trace


class EmulatedLink:
    """One transfer at a time, in the order of asking. `bytes_per_s` is emulated; None: as fast as memory is."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._closing = threading.Event()

    def copy(self, target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        """Copies, and returns when the emulated link would have."""
        started_s = time.monotonic()
        np.copyto(target, source)
        if self.bytes_per_s is not None:
            self._free_s = max(started_s, self._free_s) + source.nbytes / self.bytes_per_s
            self._closing.wait(max(0.0, self._free_s - time.monotonic()))

    def close(self) -> None:
        """Emulates no longer."""
        self._closing.set()


Loaded = Callable[[Exception | None], None]


@dataclass(slots=True, eq=False)
class _PendingLoad:
    image: CpuImage
    ends: deque[int]  # of the groups to come
    done: Loaded
    copied: int = 0  # bytes
    has_ended: bool = False


class AdapterLoader:
    """One copy at a time, on a thread of its own. Methods are the backend's callers'."""

    def __init__(self, link: EmulatedLink, on_lane: Callable[[Callable[[], None]], None], trace: Trace | None) -> None:
        self.moved: Callable[[], None] = lambda: None  # called on the lane when layers have come, or never will
        self._link, self._on_lane, self._trace = link, on_lane, trace
        self._thread = ThreadPoolExecutor(1, "caraserve-copy", initializer=yield_to_event_loop)
        self._streams: dict[int, _PendingLoad] = {}  # by adapter slot: those whose bytes are not all in the host tier

    def load(self, slot: int, image: CpuImage, group_ends: Sequence[int], done: Loaded) -> None:
        """Copies an image as far as it is in the host tier. `done` waits for the lane: an iteration under way may be
        using the host's copy."""
        layers = len(image.adapter.spec.layer_ends)
        load = _PendingLoad(image, deque((*(end for end in group_ends if 0 < end < layers), layers)), done)
        if image.in_host < layers:
            self._streams[slot] = load
        self._thread.submit(self._copy, load)

    def extend(self, slot: int, layers: int) -> None:
        """More layers are in the host tier."""
        load = self._streams[slot]
        load.image.in_host = layers
        if layers == len(load.image.adapter.spec.layer_ends):
            del self._streams[slot]
        self._on_lane(self.moved)
        self._thread.submit(self._copy, load)

    def cut(self, slot: int, cause: Exception) -> None:
        """No more layers will be. `done` is told so after those who wait for them, when nothing is copied any more."""
        load = self._streams.pop(slot)
        load.image.is_cut = True
        self._on_lane(self.moved)
        self._thread.submit(self._end, load, cause)

    def close(self) -> None:
        """Copies what may be copied, then ends the thread."""
        self._thread.shutdown(wait=True)

    # --- the thread ---

    def _copy(self, load: _PendingLoad) -> None:
        """The groups that have come into the host tier."""
        image, ends = load.image, load.image.adapter.spec.layer_ends
        try:
            while load.ends and load.ends[0] <= image.in_host and not load.has_ended:
                layers = load.ends.popleft()
                started_ns = time.monotonic_ns()
                at = slice(load.copied, ends[layers - 1])
                self._link.copy(image.data[at], image.adapter.data[at])
                image.arrive(layers)
                load.copied = ends[layers - 1]
                self._on_lane(self.moved)
                if self._trace is not None:
                    digest = image.adapter.spec.digest[:12]
                    self._trace.span("link", f"{digest} to layer {layers}", started_ns, time.monotonic_ns())
        except Exception as error:
            image.lose()
            self._on_lane(self.moved)
            self._end(load, error)
        if not load.ends:
            self._end(load, None)

    def _end(self, load: _PendingLoad, failure: Exception | None) -> None:
        if load.has_ended:
            return
        load.has_ended = True
        self._on_lane(lambda: load.done(failure))
