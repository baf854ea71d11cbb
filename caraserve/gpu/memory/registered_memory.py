"""Locks the host region's pages for the device, by which copies need not wait for the host: what every batch needs at
once, the arena of adapter images piece by piece, on a thread beside the warm-up."""

import threading

from caraserve.cpu.shared_memory import SharedRegion
from caraserve.errors import ConfigError
from caraserve.gpu.driver.api import Driver, DriverError
from caraserve.util.memory import take_pages
from caraserve.util.units import align_up, human_bytes

_PIECE_BYTES = 512 << 20
_HUGE_PAGE_BYTES = 2 << 20  # pieces meet at page boundaries, so that no page is registered twice


class RegisteredMemory:
    """A region's memory as the device sees it, where it may have another address, `device_base`. Addresses are known at
    once; the device may read and write the arena only after `await_range`."""

    def __init__(self, driver: Driver, region: SharedRegion, at_once_bytes: int) -> None:
        """Registers the first `at_once_bytes`, and starts a thread that registers the rest. Raises ConfigError if they
        cannot be pinned."""
        self._driver, self._base, self._num_bytes = driver, region.base, region.num_bytes
        self._changed = threading.Condition()
        self._pieces: list[int] = []  # host addresses of what is registered
        self._end = region.base  # of what is registered
        self._failure: ConfigError | None = None
        self._is_closed = False
        try:
            self.device_base = self._register(self._end_after(at_once_bytes))
        except DriverError as error:
            raise self._refused(error) from error
        self._thread = threading.Thread(target=self._register_rest, name="caraserve-pin", daemon=True)
        self._thread.start()

    def on_device(self, host_address: int) -> int:
        """Returns the device's address of a byte of the region."""
        return host_address - self._base + self.device_base

    def await_range(self, host_address: int, num_bytes: int) -> None:
        """Waits until these bytes are registered. Raises ConfigError if they cannot be pinned."""
        end = host_address + num_bytes
        if self._end >= end:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._end >= end or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def await_all(self) -> None:
        """Waits until the whole region is registered. Raises ConfigError if it cannot be pinned."""
        self.await_range(self._base, self._num_bytes)

    def close(self) -> None:
        """Unregisters everything. Raises DriverError if the device has failed."""
        self._is_closed = True
        self._thread.join()
        for piece in self._pieces:
            self._driver.unregister_host(piece)

    def _register_rest(self) -> None:
        try:
            while self._end < self._base + self._num_bytes and not self._is_closed:
                end = self._end_after(self._end - self._base + _PIECE_BYTES)
                # The system gives pages out as they are touched: here, and not under the driver's lock.
                take_pages(self._end, end - self._end)
                self._register(end)
        except DriverError as error:
            with self._changed:
                self._failure = self._refused(error)
                self._changed.notify_all()

    def _end_after(self, num_bytes: int) -> int:
        """Returns the address at which a piece ends that has the region's first `num_bytes`, or nearly so many."""
        whole = self._base + self._num_bytes
        return min(align_up(self._base + num_bytes, _HUGE_PAGE_BYTES), whole)

    def _register(self, end: int) -> int:
        """Registers what follows, up to `end`. Returns its address on the device."""
        start = self._end
        address = self._driver.register_host(start, end - start)
        self._pieces.append(start)
        if start > self._base and address != self.on_device(start):
            raise DriverError("the driver mapped two parts of host memory to addresses far apart")
        with self._changed:
            self._end = end
            self._changed.notify_all()
        return address

    def _refused(self, error: DriverError) -> ConfigError:
        return ConfigError(
            f"{human_bytes(self._num_bytes)} of host memory cannot be pinned ({error}); lower --max-host-adapters-bytes"
        )
