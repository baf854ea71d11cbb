"""Makes copies to the device take as long as over a slower link, to compare loading modes.

After each copy the copy lane waits for a word in host memory. A thread raises the word when a link of the emulated
bandwidth, which copies one after another, would have ended that copy.
"""

import threading
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from caraserve.gpu.driver.api import WORD_VALUES, WordWait


class LinkPacer:
    """A link of `bytes_per_s`. The launching thread calls `after`; a thread of its own writes the word."""

    def __init__(self, bytes_per_s: float, word: NDArray[np.uint32], address: int) -> None:
        """`word`: uint32 [1], 0 now, in memory that the device reads at `address`."""
        self.bytes_per_s = bytes_per_s
        self._word, self._address = word, address
        self._number, self._free_s = 0, 0.0
        self._ends: deque[tuple[int, float]] = deque()  # number of a copy, and when it ends
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="caraserve-link", daemon=True)
        self._thread.start()

    def after(self, num_bytes: int) -> WordWait:
        """Returns the wait to be issued after a copy that is issued now."""
        with self._changed:
            self._free_s = max(time.monotonic(), self._free_s) + num_bytes / self.bytes_per_s
            self._number = (self._number + 1) % WORD_VALUES
            self._ends.append((self._number, self._free_s))
            if self._is_closing:
                self._word[0] = self._number
            self._changed.notify()
            return WordWait(self._address, self._number)

    def close(self) -> None:
        """Ends all waits, now and later, and the thread."""
        with self._changed:
            self._is_closing = True
            self._word[0] = self._number
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closing:
                now_s = time.monotonic()
                while self._ends and self._ends[0][1] <= now_s:
                    self._word[0] = self._ends.popleft()[0]
                self._changed.wait(self._ends[0][1] - now_s if self._ends else None)
