"""A whole device on this machine's CPU: torch's CPU tensors, Triton's interpreter, the raw kernels compiled for the
host, and streams that run when somebody waits for them, in an order that a seed chooses.

Triton's interpreter must have been chosen before its modules are imported: see triton_interpreter.py.
"""

import ctypes
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch

from caraserve.gpu.assemble import GpuDevice
from caraserve.gpu.driver import DriverError, Event, Graph, Stream, has_reached
from caraserve.gpu.launches import Launch
from caraserve.model.layout import Dtype
from tests.gpu import emulator

_STUCK_S = 60.0
_AHEAD = 40  # operations that a stream may run while somebody asks whether another has


@dataclass(slots=True)
class _Operation:
    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class _Stream:
    waiting: deque[_Operation] = field(default_factory=deque)
    capture: list[_Operation] | None = None


class HostDriver:
    """The Driver protocol on host memory. Operations run on the thread that waits."""

    def __init__(self, seed: int = 0, memory_bytes: int = 1 << 30) -> None:
        self._random = Random(seed)
        self._memory_bytes = memory_bytes
        self._lock = threading.RLock()
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, list[bool]] = {}  # of the last record: whether it has run
        self._graphs: dict[int, list[_Operation]] = {}
        self._allocated: dict[int, object] = {}
        self._next = 0
        self.failed = False  # set by a test: the device has died
        self.replays = 0

    def create_stream(self, priority: int) -> Stream:
        number = self._number()
        self._streams[number] = _Stream()
        return Stream(number)

    def create_event(self) -> Event:
        number = self._number()
        self._events[number] = [True]
        return Event(number)

    def record(self, event: Event, stream: Stream) -> None:
        recorded = [False]
        with self._lock:
            self._events[event] = recorded

        def run() -> None:
            recorded[0] = True

        self._issue(stream, run)

    def wait_event(self, stream: Stream, event: Event) -> None:
        recorded = self._events[event]
        self._issue(stream, lambda: None, lambda: recorded[0])

    def is_done(self, event: Event) -> bool:
        with self._lock:
            self._check()
            for _ in range(self._random.randrange(_AHEAD)):
                self._step()
            return self._events[event][0]

    def synchronize(self, event: Event) -> None:
        until_s = time.monotonic() + _STUCK_S
        recorded = self._events[event]
        while not recorded[0]:
            with self._lock:
                self._check()
                moved = self._step()
            if not moved:
                os.sched_yield()  # a worker in another process is to write a word
            if time.monotonic() > until_s:
                raise DriverError("nothing moves any more")

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._issue(stream, lambda: _move(target, source, num_bytes))

    def copy_rows_to_device(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Stream
    ) -> None:
        def run() -> None:
            for row in range(rows):
                _move(target + row * target_pitch, source + row * source_pitch, width)

        self._issue(stream, run)

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._issue(stream, lambda: _move(target, source, num_bytes))

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        assert target + num_bytes <= source or source + num_bytes <= target, "a copy overlaps itself"
        self._issue(stream, lambda: _move(target, source, num_bytes))

    def fill(self, target: int, num_bytes: int, stream: Stream) -> None:
        self._issue(stream, lambda: _clear(target, num_bytes))

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        self._issue(stream, lambda: _set_word(address, value))

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        self._issue(stream, lambda: None, lambda: has_reached(_word(address), value))

    def allocate(self, num_bytes: int) -> int:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._allocated[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, address: int) -> None:
        del self._allocated[address]

    def register_host(self, host_address: int, num_bytes: int) -> int:
        return host_address

    def unregister_host(self, host_address: int) -> None:
        """As `register_host`."""

    def run(self, stream: Stream, issue: Callable[[], None]) -> None:
        self._issue(stream, issue)

    def begin_capture(self, stream: Stream) -> None:
        self._streams[stream].capture = []

    def end_capture(self, stream: Stream) -> Graph:
        operations = self._streams[stream].capture
        assert operations is not None, "no capture is under way"
        self._streams[stream].capture = None
        number = self._number()
        self._graphs[number] = operations
        return Graph(number)

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        self.replays += 1
        with self._lock:
            self._streams[stream].waiting.extend(self._graphs[graph])

    def free_bytes(self) -> int:
        return self._memory_bytes

    def total_bytes(self) -> int:
        return self._memory_bytes

    def destroy_graph(self, graph: Graph) -> None:
        del self._graphs[graph]

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _issue(self, stream: Stream, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        if (capture := self._streams[stream].capture) is not None:
            capture.append(_Operation(run, ready))
            return
        with self._lock:
            self._check()
            self._streams[stream].waiting.append(_Operation(run, ready))

    def _check(self) -> None:
        if self.failed:
            raise DriverError("the device has failed")

    def _step(self) -> bool:
        able = [stream for stream in self._streams.values() if stream.waiting and stream.waiting[0].ready()]
        if able:
            operation = self._random.choice(able).waiting.popleft()
            try:
                operation.run()
            except Exception as error:
                traceback.print_exc()
                raise DriverError(f"an operation failed: {error}") from error
        return bool(able)


class HostKernels:
    """Runs raw kernels on the host, in stream order."""

    bgmv_grid = 3

    def __init__(self, driver: HostDriver, activation: Dtype) -> None:
        self._driver, self._activation = driver, activation

    def launch(self, launch: Launch, stream: Stream) -> None:
        self._driver.run(stream, lambda: emulator.run(launch, self._activation))


def host_device(activation: Dtype = Dtype.F32, seed: int = 0) -> tuple[GpuDevice, HostDriver]:
    """A device of its own."""
    driver = HostDriver(seed)
    return GpuDevice(driver, HostKernels(driver, activation), torch.device("cpu"), "a device on the host"), driver


def _move(target: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(target, source, num_bytes)


def _word(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def _set_word(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value


def _clear(target: int, num_bytes: int) -> None:
    ctypes.memset(target, 0, num_bytes)
