"""The way from the host tier to the device tier.

On this backend both are main memory and a copy costs little; a stated bandwidth can be emulated, so that loading modes
can be compared as they would be behind a real link.
"""

import threading
import time

import numpy as np
from numpy.typing import NDArray


class Link:
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
