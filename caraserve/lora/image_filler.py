"""Fills an adapter's image from its file, by layers, with several threads.

What the image has as the file has it, A and B of most adapters, is copied by compiled code without the interpreter's
lock; all else is written by `ImageWriter`. So is a matrix that compiled code could not read, or in which it has found a
value that is not finite: that raises the error.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import Lock

import numpy as np

from caraserve.core.lora_layout import PANEL, RANK_STEP, Bytes
from caraserve.core.matrix_copy import MATRIX_COPY, UNREAD, CopyMatrices
from caraserve.lora.image_writer import ImageWriter

_LEAST_BYTES, _MOST_BYTES = 1 << 20, 8 << 20  # of layers that a thread fills at a time
_GROUPS = 4  # of layers that each thread fills, so that all end at about the same time
# A prefill that begins before its adapter is complete costs more than one that waits for this long: most files are read
# meanwhile, 84 MB from memory in 20 ms.
_FIRST_ARRIVAL_S, _NEXT_ARRIVAL_S = 0.05, 0.01


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers that one thread fills, and their bytes in the image."""

    layers: range
    start: int
    end: int


class ImageFiller:
    """Threads that help those that read adapters. Thread-safe."""

    def __init__(self, copy: CopyMatrices | None = None, helpers: int = 0) -> None:
        """`copy`: compiled code that copies matrices; None: there is none. `helpers`: how many threads help, at
        most."""
        self._copy, self._helpers = copy, helpers
        self._executor = ThreadPoolExecutor(max(1, helpers), "caraserve-fill")

    def fill(self, writer: ImageWriter, into: Bytes, arrived: Callable[[int], None] = lambda layers: None) -> None:
        """Fills all layers of `into`, the image. `arrived`: called on any thread with the number of first layers that
        do not change any more, if filling takes long. Raises as `ImageWriter.write`."""
        groups = _grouped(writer.layer_ends, (1 + self._helpers) * _GROUPS)
        arrivals, numbers, failures = _Arrivals(groups, arrived), count(), dict[int, Exception]()

        def work() -> None:
            while not failures and (number := next(numbers)) < len(groups):
                group = groups[number]
                try:
                    self.fill_layers(writer, group.layers, into[group.start : group.end], group.start)
                except Exception as error:  # raised below
                    failures[number] = error
                else:
                    arrivals.note(number)

        helping = [self._executor.submit(work) for _ in range(min(self._helpers, len(groups) - 1))]
        work()
        for future in helping:
            if not future.cancel():
                future.result()
        if failures:
            raise failures[min(failures)]  # whatever the threads: groups are begun in order

    def fill_layers(self, writer: ImageWriter, layers: range, data: Bytes, start: int) -> None:
        """Fills some layers of an image, `data`: its bytes from `start` on. Raises as `ImageWriter.write`."""
        pieces = [(module, piece) for module in writer.modules_of(layers) for piece in writer.pieces(module)]
        planned = [[] if self._copy is None else writer.copies(*one) for one in pieces]
        copies = np.array([copy for rows in planned for copy in rows], MATRIX_COPY)
        if not all(planned) or _have_padding(copies):
            data[:] = 0
        copies["target"] -= start
        largest = np.full(len(copies), UNREAD)
        if self._copy is not None:
            self._copy(copies, data, largest)
        found = iter(largest.tolist())
        for one, rows in zip(pieces, planned, strict=True):
            bits = [next(found) for _ in rows]
            if not bits or UNREAD in bits or not writer.copied(*one, max(bits)):
                writer.write(*one, data, start)

    def close(self) -> None:
        """Ends the threads. No image may be filled meanwhile."""
        self._executor.shutdown()


def _grouped(layer_ends: tuple[int, ...], groups: int) -> list[_Layers]:
    """Returns the layers in groups of about equal bytes, about so many."""
    most = min(max(layer_ends[-1] // groups, _LEAST_BYTES), _MOST_BYTES)
    found, first, start = list[_Layers](), 0, 0
    for layer, end in enumerate(layer_ends, start=1):
        if end - start >= most or layer == len(layer_ends):
            found.append(_Layers(range(first, layer), start, end))
            first, start = layer, end
    return found


def _have_padding(copies: np.ndarray[tuple[int], np.dtype[np.void]]) -> bool:
    """Whether copies leave bytes of their matrices in the image as they are."""
    is_b, rows = copies["is_b"] == 1, copies["rows"]
    are_whole = np.where(is_b, rows % PANEL, rows % RANK_STEP) == 0
    return not bool(np.all(are_whole & (copies["columns"] == copies["stride"])))


class _Arrivals:
    """Counts the first layers that are complete, and reports them now and then."""

    def __init__(self, groups: list[_Layers], report: Callable[[int], None]) -> None:
        self._groups, self._report, self._lock = groups, report, Lock()
        self._ended: set[int] = set()
        self._complete = 0  # groups
        self._next_s = time.monotonic() + _FIRST_ARRIVAL_S

    def note(self, number: int) -> None:
        """Notes that a group is complete."""
        with self._lock:
            self._ended.add(number)
            before = self._complete
            while self._complete in self._ended:
                self._complete += 1
            now_s = time.monotonic()
            if self._complete > before and now_s >= self._next_s:
                self._next_s = now_s + _NEXT_ARRIVAL_S
                self._report(self._groups[self._complete - 1].layers.stop)
