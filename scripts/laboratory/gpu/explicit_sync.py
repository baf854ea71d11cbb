"""Explicit synchronisation of host and device in hand-offs to CPU LoRA workers: the baseline of Toppings' figure 10.

The server's host never waits: the device signals the workers and waits for their answer. Here the host waits for the
device before x is handed to the workers, as a program does that copies x with PyTorch and then signals them, and again
until they have answered. Meanwhile it launches nothing, so the device idles while the next kernels are launched.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.driver.launch import Kernels, Launch

_HANDS_OVER, _AWAITS = "handoff_publish", "handoff_wait"


class ExplicitSync:
    """Launches raw kernels for a backend, with explicit synchronisation while it is switched on.

    Only for measurements, and for passes that are launched kernel by kernel: a graph launches none of these kernels.
    """

    def __init__(self, kernels: Kernels, driver: Driver) -> None:
        self._kernels, self._driver = kernels, driver
        self._event = driver.create_event()
        self._is_on = False
        self.waits = 0  # of the host, so far

    @property
    def multiprocessors(self) -> int:
        """Number of the device's multiprocessors."""
        return self._kernels.multiprocessors

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Synchronises explicitly within the block. No pass may be in flight at its start and end."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Issues a kernel; while switched on, waits for the stream before x is handed over and after an answer."""
        if self._is_on and launch.kernel == _HANDS_OVER:
            self._wait_for(stream)
        self._kernels.launch(launch, stream)
        if self._is_on and launch.kernel == _AWAITS:
            self._wait_for(stream)

    def _wait_for(self, stream: Stream) -> None:
        """Waits until a stream has run everything issued on it. Spins, as PyTorch does: a thread that sleeps on an
        event wakes tens of µs late."""
        self.waits += 1
        self._driver.record(self._event, stream)
        while not self._driver.is_done(self._event):
            pass
