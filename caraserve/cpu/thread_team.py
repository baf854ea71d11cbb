"""A team of threads that runs compiled functions together.

The caller is member 0. Helpers wait for the next call by a bounded spin inside compiled code, without the interpreter
lock, and then sleep on a condition: an idle server uses no CPU, and calls in close succession need no wake-up.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from caraserve.core.lora_layout import aligned_bytes
from caraserve.cpu.jit import entry
from caraserve.cpu.simd import load_acquire, spin_pause, store_release
from caraserve.util.thread_priority import yield_to_event_loop

_SPINS = 4000  # about 100 µs: longer than the gap between two iterations that follow closely


@entry
def _await_change(word, seen, spins):  # type: ignore[no-untyped-def]
    """Returns whether the int64 at `word` changed from `seen` within `spins` looks."""
    for _ in range(spins):
        if load_acquire(word) != seen:
            return True
        spin_pause()
    return False


@entry
def publish(word, value):  # type: ignore[no-untyped-def]
    """Sets the int64 at `word`, after all that was written before."""
    store_release(word, value)


class ThreadTeam:
    """A team of `size` threads, including the one that calls `run`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._words = aligned_bytes(64).view(np.int64)
        self._words[:] = 0
        self._word = int(self._words.ctypes.data)
        self._call = 0
        self._function: Callable[..., None] = lambda *arguments: None
        self._arguments: tuple[Any, ...] = ()
        self._sleeping = 0
        self._wake = threading.Condition()
        self._closing = False
        self._helpers = [
            threading.Thread(target=self._help, args=(member,), name=f"caraserve-compute-{member}", daemon=True)
            for member in range(1, size)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls `function(member, size, *arguments)` on every member; returns when member 0's call does.

        The function must end with a barrier of the whole team, because its arguments may change afterwards.
        """
        if self.size > 1:
            self._function, self._arguments = function, arguments
            self._post()
        function(0, self.size, *arguments)

    def close(self) -> None:
        """Ends the helpers."""
        self._closing = True
        self._post()
        for helper in self._helpers:
            helper.join()

    def _post(self) -> None:
        self._call += 1
        publish(self._word, self._call)
        if self._sleeping:
            with self._wake:
                self._wake.notify_all()

    def _help(self, member: int) -> None:
        yield_to_event_loop()
        seen = 0
        while True:
            if not _await_change(self._word, seen, _SPINS):
                with self._wake:
                    self._sleeping += 1
                    self._wake.wait_for(lambda: self._call != seen)  # noqa: B023
                    self._sleeping -= 1
            seen += 1
            if self._closing:
                return
            self._function(member, self.size, *self._arguments)
