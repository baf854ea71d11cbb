"""Copies the tensors of a checkpoint to the device while several threads read ahead.

Each thread has two pinned buffers of its own. It reads a span of a tensor into one while the copy of its last span,
from the other one, may still be running. Spans are read in the order in which the tensors will be filled, so what lies
in the buffers is always what the device needs next. A dtype that differs is converted on the device, span by span.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from threading import Condition, Lock, Thread
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from caraserve.cpu.weight_memory import huge_pages
from caraserve.errors import ConfigError, ModelLoadError
from caraserve.gpu.driver.api import Driver, DriverError, Event
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.linear.base import TORCH_CODES
from caraserve.gpu.weights import TORCH_DTYPES
from caraserve.model.folder_reader import StoredTensor
from caraserve.util.units import ceil_div, human_bytes

_STORED = TORCH_DTYPES | TORCH_CODES
_NAME = "caraserve-weights"
_BUFFERS = 2  # of each thread
_SPAN_BYTES = 8 << 20  # Python takes 20 µs for a span, reading it from the page cache about 1 ms
_LEAST_THREADS, _MOST_THREADS = 2, 8  # a core copies about 10 GB/s from the page cache, and a link takes 25 to 55


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """How fast the weights were read and copied, and where the time went."""

    num_bytes: int  # of the tensors in the files
    seconds: float
    threads: int
    read_share: float  # of the threads' time: reading files
    own_share: float  # of the time: in the thread that fills, outside `fill`
    disk_bytes: int | None  # that the process read from disk meanwhile, not from the page cache; None: unknown

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def limit(self) -> str:
        """What took most of the time."""
        if self.read_share >= 0.5:  # otherwise the threads waited for free buffers, or for the next tensor's place
            is_disk = self.disk_bytes is not None and self.disk_bytes > self.num_bytes / 2
            return "reading from disk" if is_disk else "reading from the page cache"
        return "allocating and converting on the device" if self.own_share >= 0.5 else "copying to the device"

    def __str__(self) -> str:
        from_disk = "" if self.disk_bytes is None else f", {self.disk_bytes / 1e9:.1f} GB of them from disk"
        return (
            f"{self.num_bytes / 1e9:.1f} GB of weights at {self.bytes_per_s / 1e9:.1f} GB/s{from_disk}; limited by "
            f"{self.limit} ({self.threads} threads read for {self.read_share:.0%} of the time)"
        )


@dataclass(slots=True)
class _Fill:
    """One tensor's way to the device. `target` is None until its memory has been allocated."""

    tensor: StoredTensor
    spans_left: int
    target: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes [start, start + num_bytes) of a tensor."""

    fill: _Fill
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Pinned memory, and the event after the last copy from it."""

    bytes: memoryview
    address: int  # device address
    passed: Event


class _Progress:
    """The state that the reading threads and the filling thread share; guarded by `lock`."""

    def __init__(self, spans: Iterator[_Span]) -> None:
        self.lock = Lock()
        self.placed = Condition(self.lock)  # a tensor has its target, or reading has ended: for the threads
        self.issued = Condition(self.lock)  # all copies of a tensor have been issued, or a thread has failed
        self.spans = spans
        self.has_ended = False  # no further span is to be read
        self.failure: Exception | None = None  # the first one of a thread
        self.read_s = 0.0  # sum over threads

    def end(self, failure: Exception | None = None) -> None:
        """Ends all threads; each finishes the span that it is reading."""
        with self.lock:
            self.has_ended = True
            self.failure = self.failure or failure
            self.placed.notify_all()
            self.issued.notify_all()


class _Stopped(Exception):
    """Ends a thread: the transfer was ended before all was read."""


class WeightTransfer:
    """Reads tensors and copies them to the device. A context: its end stops all threads and frees buffers and stream.

    One thread enters, fills and leaves."""

    def __init__(
        self,
        device: GpuDevice,
        tensors: Sequence[StoredTensor],
        *,
        threads: int | None = None,
        span_bytes: int = _SPAN_BYTES,
    ) -> None:
        """`tensors`: all that will be filled, in this order. `threads`: None for one per core, 2 to 8. `span_bytes`: a
        multiple of 4. Raises ConfigError if no host memory can be pinned, ModelLoadError without device
        memory, and DriverError."""
        self._device, self._driver = device, device.driver
        self._num_bytes = sum(tensor.num_bytes for tensor in tensors)
        self._fills = [_Fill(tensor, ceil_div(tensor.num_bytes, span_bytes)) for tensor in tensors]
        self._left = iter(self._fills)
        self._progress = _Progress(_spans(self._fills, span_bytes))
        self._issuing = Lock()  # a span's copy and its conversion are next to each other on the stream
        self._count = threads or max(_LEAST_THREADS, min(_MOST_THREADS, len(os.sched_getaffinity(0))))
        self._fill_s = 0.0
        with ExitStack() as stack:
            self._stream = self._driver.create_stream(0)
            stack.callback(self._driver.destroy_stream, self._stream)
            self._arrived = self._driver.create_event()
            self._unconverted = _device_memory(span_bytes, device.device)
            buffers = _pinned(self._driver, self._count * _BUFFERS, span_bytes, stack)
            self._threads = [
                Thread(target=self._work, args=(buffers[index :: self._count],), name=f"{_NAME}-{index}", daemon=True)
                for index in range(self._count)
            ]
            stack.callback(self._settle)
            stack.callback(self._stop)
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        self._disk_bytes_before, self._started_s = _disk_bytes(), time.monotonic()
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # also an interrupt: there is no end of a context that has not begun
            self._resources.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def fill(self, name: str, target: Tensor) -> None:
        """Implements Fill: returns when the tensor's values are in `target`, contiguous and on the device.

        Raises ModelLoadError if the file cannot be read, and DriverError if the device has failed."""
        started_s = time.monotonic()
        fill = next(self._left)
        tensor = fill.tensor
        assert (tensor.name, tensor.num_bytes) == (name, target.numel() * _STORED[tensor.dtype].itemsize), name
        assert target.is_contiguous(), name
        self._device.synchronize()  # work that has not run yet may use memory that was freed and is the target now
        progress = self._progress
        with progress.lock:
            fill.target = target
            progress.placed.notify_all()
            progress.issued.wait_for(lambda: not fill.spans_left or progress.failure is not None)
            if progress.failure is not None:
                raise progress.failure
        self._settle()
        fill.target = None  # the caller may be done with this memory soon
        self._fill_s += time.monotonic() - started_s

    def figures(self) -> TransferFigures:
        """Returns the figures since the start; call it once all tensors have been filled."""
        seconds = max(time.monotonic() - self._started_s, 1e-9)
        before, now = self._disk_bytes_before, _disk_bytes()
        return TransferFigures(
            self._num_bytes,
            seconds,
            self._count,
            self._progress.read_s / (seconds * self._count),
            1.0 - self._fill_s / seconds,
            None if before is None or now is None else now - before,
        )

    def _settle(self) -> None:
        """Waits until everything issued on the stream has run."""
        with self._issuing:
            self._driver.record(self._arrived, self._stream)
        self._driver.synchronize(self._arrived)

    def _stop(self) -> None:
        """Ends the threads. An interrupt meanwhile is raised after their end: what they use is freed next."""
        self._progress.end()
        interrupt: KeyboardInterrupt | None = None
        while running := [thread for thread in self._threads if thread.is_alive()]:
            try:
                running[0].join()
            except KeyboardInterrupt as raised:
                interrupt = raised
        if interrupt is not None:
            raise interrupt

    def _work(self, buffers: Sequence[_Buffer]) -> None:
        """Reads spans and issues their copies, in a thread of its own."""
        try:
            self._device.enter_thread()
            for buffer in cycle(buffers):
                span = self._claim()
                self._driver.synchronize(buffer.passed)  # a copy may still be reading what the next read overwrites
                self._read(span, buffer)
                self._await_target(span)
                self._issue(span, buffer)
                self._count_issued(span.fill)
        except _Stopped:
            return
        except Exception as error:
            self._progress.end(error)

    def _claim(self) -> _Span:
        with self._progress.lock:
            span = None if self._progress.has_ended else next(self._progress.spans, None)
        if span is None:
            raise _Stopped
        return span

    def _read(self, span: _Span, buffer: _Buffer) -> None:
        started_s = time.monotonic()
        span.fill.tensor.read_into(buffer.bytes[: span.num_bytes], span.start)
        with self._progress.lock:
            self._progress.read_s += time.monotonic() - started_s

    def _await_target(self, span: _Span) -> None:
        progress = self._progress
        with progress.lock:
            progress.placed.wait_for(lambda: span.fill.target is not None or progress.has_ended)
            if span.fill.target is None:
                raise _Stopped

    def _issue(self, span: _Span, buffer: _Buffer) -> None:
        """Issues a span's copy, and its conversion if dtypes differ."""
        target, stored = span.fill.target, _STORED[span.fill.tensor.dtype]
        assert target is not None
        first, count = span.start // stored.itemsize, span.num_bytes // stored.itemsize
        part = target.view(-1)[first : first + count]
        arrived = part if stored is target.dtype else self._unconverted[: span.num_bytes].view(stored)

        def convert() -> None:
            part.copy_(arrived)

        with self._issuing:
            self._driver.copy_to_device(arrived.data_ptr(), buffer.address, span.num_bytes, self._stream)
            self._driver.record(buffer.passed, self._stream)
            if arrived is not part:
                self._driver.run(self._stream, convert)

    def _count_issued(self, fill: _Fill) -> None:
        with self._progress.lock:
            fill.spans_left -= 1
            if not fill.spans_left:
                self._progress.issued.notify()


def _spans(fills: Sequence[_Fill], span_bytes: int) -> Iterator[_Span]:
    for fill in fills:
        for start in range(0, fill.tensor.num_bytes, span_bytes):
            yield _Span(fill, start, min(span_bytes, fill.tensor.num_bytes - start))


def _device_memory(num_bytes: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"the device has less than {human_bytes(num_bytes)} free, which loading the weights needs; another program "
            "may be using it"
        ) from error


def _pinned(driver: Driver, count: int, num_bytes: int, stack: ExitStack) -> list[_Buffer]:
    """Returns pinned buffers, which last until the end of `stack` unpins them: copies may outlive the thread that uses
    a buffer."""
    memory = huge_pages(count * num_bytes)
    try:
        address = driver.register_host(int(memory.ctypes.data), memory.nbytes)
    except DriverError as error:
        raise ConfigError(
            f"{human_bytes(memory.nbytes)} of host memory, into which weights are read, cannot be pinned ({error}); "
            "free memory, or raise the limit of locked memory (ulimit -l)"
        ) from error
    stack.callback(lambda: driver.unregister_host(int(memory.ctypes.data)))  # keeps the memory until then
    return [
        _Buffer(memory[start : start + num_bytes].data, address + start, driver.create_event())
        for start in range(0, count * num_bytes, num_bytes)
    ]


def _disk_bytes() -> int | None:
    """Returns the bytes that this process has read from disk so far; None where the system does not count them."""
    try:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None
