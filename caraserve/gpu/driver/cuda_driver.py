"""Implements the Driver protocol for a real device with calls of the CUDA driver library.

All calls use the device's primary context, which torch, Triton and CuPy share.
"""

import contextlib
import ctypes
import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from caraserve.gpu.driver import libcuda
from caraserve.gpu.driver.api import DriverError, Event, Graph, Stream, WordWait, WordWrite
from caraserve.gpu.driver.launch import Kernels, wait_word
from caraserve.gpu.driver.libcuda import Attribute, Cuda, Memcpy2D, WordOperation

_CHUNK_BYTES = 8 << 30  # host memory registered by one call; registering a very large range at once fails
_HUGE_PAGE_BYTES = 2 << 20  # chunks meet at page boundaries, so that no page is registered twice
_MOST_WORD_OPERATIONS = 255  # of one call

# A call waits when about 1024 operations of a stream have not run. With the GIL kept, none of the threads that the
# device may wait for could run meanwhile, so far fewer may be queued.
_MOST_QUEUED = 500
_SMALL_COPY_BYTES = 64 << 10  # of a copy that is issued at once
_LAUNCHES_OF_A_STEP = 4  # kernels that one `run` issues on average at most, with the raw kernels before the next one
_LAUNCHES_OF_A_GRAPH = 100


class CudaTorch:
    """What the driver needs of torch, on one device."""

    def __init__(self, device: int) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self._streams: dict[int, Any] = {}

    def make_current(self, stream: int) -> None:
        """Makes `stream` the calling thread's current stream."""
        if self._cuda.current_stream(self._device).cuda_stream == stream:
            return
        if stream not in self._streams:
            self._streams[stream] = self._cuda.ExternalStream(stream, self._device)
        self._cuda.set_stream(self._streams[stream])

    def allocations(self) -> int:
        """Returns how many allocations of device memory torch has made since the start."""
        return int(self._cuda.memory_stats(self._device).get("allocation.all.allocated", 0))


@dataclass(slots=True)
class _Registered:
    """Registered host memory. Its chunks are contiguous on the device, as they are on the host."""

    chunks: list[int]  # host addresses at which chunks begin
    device: int = 0  # device address of the first chunk

    @property
    def borders(self) -> list[int]:
        """Device addresses at which chunks begin: the one before may belong to memory registered by another call."""
        return [self.device + chunk - self.chunks[0] for chunk in self.chunks]


@dataclass(slots=True)
class _Queue:
    """The operations of a stream."""

    issued: int = 0
    run: int = 0  # of these, how many are known to have run


@dataclass(slots=True)
class _Queues:
    """Counts the operations of streams that are not known to have run."""

    by_stream: "defaultdict[Stream, _Queue]" = field(default_factory=lambda: defaultdict(_Queue))
    recorded: dict[Event, tuple[_Queue, int]] = field(default_factory=dict)  # the queue, and what it had issued

    def issue(self, stream: Stream, operations: int = 1) -> bool:
        """Counts operations that are about to be issued. Returns whether issuing them cannot wait for the device."""
        queue = self.by_stream[stream]
        queue.issued += operations
        return queue.issued - queue.run < _MOST_QUEUED

    def record(self, event: Event, stream: Stream) -> None:
        queue = self.by_stream[stream]
        self.recorded[event] = queue, queue.issued

    def has_run(self, event: Event) -> None:
        """Notes that everything before an event's last record has run."""
        if event in self.recorded:
            queue, number = self.recorded[event]
            queue.run = max(queue.run, number)


class CudaDriver:
    """Implements Driver. A stream is a CUstream, an event a CUevent, a graph a CUgraphExec."""

    def __init__(self, cuda: Cuda, kernels: Kernels, device: int = 0, torch: CudaTorch | None = None) -> None:
        """`device`: index among the visible devices. `kernels`: used to wait for words where streams cannot."""
        self._cuda, self._kernels = cuda, kernels
        handle = cuda.number("cuDeviceGet", device)
        self._context = cuda.number("cuDevicePrimaryCtxRetain", handle)
        self._threads = threading.local()  # the context is current on threads with `has_entered`
        self._torch = torch or CudaTorch(device)
        self._has_memory_operations = bool(cuda.attribute(Attribute.CAN_USE_64_BIT_STREAM_MEM_OPS, handle))
        self._registered: dict[int, _Registered] = {}  # by host address
        self._borders: list[int] = []  # sorted device addresses where chunks begin; a copy across one is split
        self._captures: dict[Stream, int] = {}  # by stream: torch's number of allocations when the capture began
        self._queues = _Queues()
        self._enter()

    def create_stream(self, priority: int) -> Stream:
        return Stream(self._number("cuStreamCreateWithPriority", libcuda.STREAM_NON_BLOCKING, priority))

    def destroy_stream(self, stream: Stream) -> None:
        self._call("cuStreamDestroy_v2", stream)
        self._queues.by_stream.pop(stream, None)

    def create_event(self) -> Event:
        """Creates an event on which `synchronize` sleeps instead of spinning."""
        return Event(self._number("cuEventCreate", libcuda.EVENT_BLOCKING_SYNC | libcuda.EVENT_DISABLE_TIMING))

    def record(self, event: Event, stream: Stream) -> None:
        self._issue(stream, "cuEventRecord", event, stream)
        self._queues.record(event, stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        self._issue(stream, "cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: Event) -> bool:
        self._enter()
        if is_done := self._cuda.ask("cuEventQuery", event):
            self._queues.has_run(event)
        return is_done

    def synchronize(self, event: Event) -> None:
        self._call("cuEventSynchronize", event)
        self._queues.has_run(event)

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._copy(target, source, num_bytes, stream)

    def copy_rows_to_device(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Stream
    ) -> None:
        if not width or not rows:
            return
        if cuts := self._cuts(source, (rows - 1) * source_pitch + width):
            row = cuts[0] // source_pitch  # a row that crosses a chunk border: `_copy` splits it
            self.copy_rows_to_device(target, target_pitch, source, source_pitch, width, row, stream)
            self._copy(target + row * target_pitch, source + row * source_pitch, width, stream)
            target, source, rows = target + (row + 1) * target_pitch, source + (row + 1) * source_pitch, rows - row - 1
            self.copy_rows_to_device(target, target_pitch, source, source_pitch, width, rows, stream)
            return
        copy = Memcpy2D(
            srcMemoryType=libcuda.MEMORYTYPE_UNIFIED,
            srcDevice=source,
            srcPitch=source_pitch,
            dstMemoryType=libcuda.MEMORYTYPE_UNIFIED,
            dstDevice=target,
            dstPitch=target_pitch,
            WidthInBytes=width,
            Height=rows,
        )
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._copy(target, source, num_bytes, stream)

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._copy(target, source, num_bytes, stream)

    def fill(self, target: int, num_bytes: int, stream: Stream) -> None:
        if num_bytes:
            self._call("cuMemsetD8Async", target, 0, num_bytes, stream)

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        if self._has_memory_operations:
            self._issue(stream, "cuStreamWriteValue32_v2", stream, address, value, libcuda.STREAM_WRITE_VALUE_DEFAULT)
        else:
            self._call("cuMemsetD32Async", address, value, 1, stream)

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        """Waits on the stream, or with one warp of a kernel where streams cannot wait, for example under WSL."""
        if self._has_memory_operations:
            self._issue(stream, "cuStreamWaitValue32_v2", stream, address, value, libcuda.STREAM_WAIT_VALUE_GEQ)
        else:
            self._enter()
            self._kernels.launch(wait_word(address, value), stream)

    def word_operations(self, stream: Stream, operations: Sequence[WordWrite | WordWait]) -> None:
        if not self._has_memory_operations or len(operations) == 1:
            for each in operations:
                issue = self.write_value if isinstance(each, WordWrite) else self.wait_value
                issue(stream, each.address, each.value)
            return
        for start in range(0, len(operations), _MOST_WORD_OPERATIONS):
            part = operations[start : start + _MOST_WORD_OPERATIONS]
            array = (WordOperation * len(part))(*map(_word_operation, part))
            self._issue(stream, "cuStreamBatchMemOp_v2", stream, len(part), array, 0, operations=len(part))

    def register_host(self, host_address: int, num_bytes: int) -> int:
        """Registers host memory. Raises DriverError, with nothing registered, if the driver fails or maps it
        non-contiguously."""
        flags = libcuda.MEMHOSTREGISTER_PORTABLE | libcuda.MEMHOSTREGISTER_DEVICEMAP
        made = self._registered[host_address] = _Registered([])
        at, end = host_address, host_address + num_bytes
        try:
            while at < end:
                stop = min(end, (at + _CHUNK_BYTES) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)
                self._call("cuMemHostRegister_v2", at, stop - at, flags)
                made.chunks.append(at)
                mapped = self._number("cuMemHostGetDevicePointer_v2", at, 0)
                made.device = made.device or mapped
                if mapped != made.device + at - host_address:
                    raise DriverError(f"the driver mapped {num_bytes} bytes of host memory to addresses far apart")
                at = stop
        except DriverError:
            self.unregister_host(host_address)
            raise
        self._find_borders()
        return made.device

    def unregister_host(self, host_address: int) -> None:
        for chunk in self._registered.pop(host_address).chunks:
            self._call("cuMemHostUnregister", chunk)
        self._find_borders()

    def _find_borders(self) -> None:
        """Notes all borders again; other threads find either the old ones or the new ones."""
        self._borders = sorted(border for known in list(self._registered.values()) for border in known.borders)

    def run(self, stream: Stream, issue: Callable[[], None]) -> None:
        self._enter()
        self._queues.issue(stream, _LAUNCHES_OF_A_STEP)
        self._torch.make_current(stream)
        try:
            issue()
        except DriverError:
            raise
        except Exception:  # of CuPy, Triton or torch, which name a failed device in their own ways
            self._cuda.memory()  # raises DriverError if the device has failed for good
            raise

    def begin_capture(self, stream: Stream) -> None:
        """Starts a capture; its restrictions on driver calls apply to this thread only."""
        self._captures[stream] = self._torch.allocations()
        self._call("cuStreamBeginCapture_v2", stream, libcuda.STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def end_capture(self, stream: Stream) -> Graph:
        """Ends the capture and returns its graph. Raises DriverError, also if torch allocated device memory during the
        capture: the graph would write there after torch has reused the memory."""
        captured, before = ctypes.c_void_p(), self._captures.pop(stream)
        self._call("cuStreamEndCapture", stream, ctypes.byref(captured))
        try:
            if given := self._torch.allocations() - before:
                raise DriverError(f"torch gave out device memory {given} times while a graph was captured")
            # Each kernel keeps the priority of the stream that it was captured on.
            graph = self._number("cuGraphInstantiateWithFlags", captured, libcuda.GRAPH_INSTANTIATE_USE_NODE_PRIORITY)
        finally:
            self._call("cuGraphDestroy", captured)
        self._call("cuGraphUpload", graph, stream)  # otherwise the first launch would upload it
        return Graph(graph)

    def abandon_capture(self, stream: Stream) -> None:
        captured = ctypes.c_void_p()
        del self._captures[stream]
        with contextlib.suppress(DriverError):  # raised for a failed capture, which is ended nevertheless
            self._call("cuStreamEndCapture", stream, ctypes.byref(captured))
        if captured.value is not None:
            self._call("cuGraphDestroy", captured)

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        self._queues.issue(stream, _LAUNCHES_OF_A_GRAPH)
        self._call("cuGraphLaunch", graph, stream)

    def free_bytes(self) -> int:
        self._enter()
        return self._cuda.memory()[0]

    def total_bytes(self) -> int:
        self._enter()
        return self._cuda.memory()[1]

    def destroy_graph(self, graph: Graph) -> None:
        self._call("cuGraphExecDestroy", graph)

    def _copy(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copies, split at chunk borders. The driver infers the direction from the addresses; host memory may be given
        by its device address."""
        ends = sorted({*self._cuts(target, num_bytes), *self._cuts(source, num_bytes), num_bytes})
        for start, end in zip([0, *ends], ends, strict=False):
            if end - start > _SMALL_COPY_BYTES:
                self._queues.issue(stream)
                self._call("cuMemcpyAsync", target + start, source + start, end - start, stream)
            elif end > start:
                self._issue(stream, "cuMemcpyAsync", target + start, source + start, end - start, stream)

    def _cuts(self, address: int, num_bytes: int) -> list[int]:
        """Returns the offsets within `num_bytes` bytes of `address` at which another chunk of host memory begins. CUDA
        does not specify copies across two registered ranges, not even that they are asynchronous."""
        borders = self._borders
        if not borders or num_bytes == 0:
            return []
        between = borders[bisect_right(borders, address) : bisect_left(borders, address + num_bytes)]
        return [border - address for border in between]

    def _enter(self) -> None:
        if not hasattr(self._threads, "has_entered"):
            self._cuda.call("cuCtxSetCurrent", self._context)
            self._threads.has_entered = True

    def _call(self, name: str, *arguments: Any) -> None:
        self._enter()
        self._cuda.call(name, *arguments)

    def _issue(self, stream: Stream, name: str, *arguments: Any, operations: int = 1) -> None:
        """Issues operations by one call, which keeps the GIL unless it may wait for the device."""
        self._enter()
        if self._queues.issue(stream, operations):
            self._cuda.call_at_once(name, *arguments)
        else:
            self._cuda.call(name, *arguments)

    def _number(self, name: str, *arguments: Any) -> int:
        self._enter()
        return self._cuda.number(name, *arguments)


def _word_operation(operation: WordWrite | WordWait) -> WordOperation:
    if isinstance(operation, WordWrite):
        kind, flags = libcuda.STREAM_MEM_OP_WRITE_VALUE_32, libcuda.STREAM_WRITE_VALUE_DEFAULT
    else:
        kind, flags = libcuda.STREAM_MEM_OP_WAIT_VALUE_32, libcuda.STREAM_WAIT_VALUE_GEQ
    return WordOperation(kind, operation.address, operation.value, flags, 0, 0)
