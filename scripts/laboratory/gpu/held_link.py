"""A driver whose link can be stopped: copies of adapters wait for a word."""

from typing import Any, cast

import numpy as np

from caraserve.cpu.shared_memory import SharedRegion
from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.driver.streams import Lane


class HeldLink:
    """Delegates everything to the real driver, except that copies on the copy lane wait while they are held."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._region = SharedRegion(64)
        self._word = self._region.carve(64).view(np.uint32)
        self._address = driver.register_host(self._region.base, self._region.num_bytes)
        self._streams: list[Stream] = []
        self._awaited = 0
        self._is_held = False

    @property
    def driver(self) -> Driver:
        """This object, typed as a Driver."""
        return cast(Driver, self)

    def hold(self) -> None:
        """Makes copies issued from now on wait. Kernels must be loaded before: a module that is loaded while a stream
        waits may wait for that stream."""
        self._awaited += 1
        self._is_held = True

    def release(self) -> None:
        """Releases all waiting copies."""
        self._is_held = False
        self._word[0] = self._awaited

    def close(self) -> None:
        """Frees the word; no copy may be waiting."""
        self._driver.unregister_host(self._region.base)
        self._region.close()

    def create_stream(self, priority: int) -> Stream:
        """Creates a stream. The lanes' streams are created first, in their order."""
        self._streams.append(self._driver.create_stream(priority))
        return self._streams[-1]

    def destroy_stream(self, stream: Stream) -> None:
        self._streams.remove(stream)
        self._driver.destroy_stream(stream)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        if self._is_held and stream == self._streams[Lane.COPY]:
            self._driver.wait_value(stream, self._address, self._awaited)
        self._driver.copy_to_device(target, source, num_bytes, stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)
