"""Copies adapters to the device tier beside the lane, as far as their bytes are in the host tier.

Groups of layers are copied in the order in which they may be: an adapter whose bytes are still on their way to the host
tier holds up nobody's.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from caraserve.cpu.adapters import Image
from caraserve.cpu.link import Link
from caraserve.cpu.thread_team import yield_to_event_loop
from caraserve.telemetry.trace import Trace

Loaded = Callable[[Exception | None], None]


@dataclass(slots=True, eq=False)
class _Load:
    image: Image
    ends: deque[int]  # of the groups to come
    done: Loaded
    copied: int = 0  # bytes
    has_ended: bool = False


class Copier:
    """One copy at a time, on a thread of its own. Methods are the backend's callers'."""

    def __init__(self, link: Link, on_lane: Callable[[Callable[[], None]], None], trace: Trace | None) -> None:
        self.moved: Callable[[], None] = lambda: None  # called on the lane when layers have come, or never will
        self._link, self._on_lane, self._trace = link, on_lane, trace
        self._thread = ThreadPoolExecutor(1, "caraserve-copy", initializer=yield_to_event_loop)
        self._streams: dict[int, _Load] = {}  # by adapter slot: those whose bytes are not all in the host tier

    def load(self, slot: int, image: Image, group_ends: Sequence[int], done: Loaded) -> None:
        """Copies an image as far as it is in the host tier. `done` waits for the lane: an iteration under way may be
        using the host's copy."""
        layers = len(image.adapter.spec.layer_ends)
        load = _Load(image, deque((*(end for end in group_ends if 0 < end < layers), layers)), done)
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

    def _copy(self, load: _Load) -> None:
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

    def _end(self, load: _Load, failure: Exception | None) -> None:
        if load.has_ended:
            return
        load.has_ended = True
        self._on_lane(lambda: load.done(failure))
