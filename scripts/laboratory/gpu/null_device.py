"""A device on which nothing runs. A backend on it makes all its launches, which shows what Triton has to compile.

Tensors are on torch's `meta` device: they have shapes, dtypes and alignments, and no memory.
"""

from collections.abc import Callable, Sequence
from itertools import count

import torch

from caraserve.gpu.driver.api import Event, Graph, Stream, WordWait, WordWrite
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.launch import Launch

_MEMORY_BYTES = 80 << 30


class NullDriver:
    """Implements the Driver protocol: no operation does anything, and all have run at once."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def create_stream(self, priority: int) -> Stream:
        return Stream(next(self._numbers))

    def destroy_stream(self, stream: Stream) -> None: ...

    def create_event(self) -> Event:
        return Event(next(self._numbers))

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait_event(self, stream: Stream, event: Event) -> None: ...

    def is_done(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event) -> None: ...

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None: ...

    def copy_rows_to_device(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Stream
    ) -> None: ...

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: Stream) -> None: ...

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None: ...

    def fill(self, target: int, num_bytes: int, stream: Stream) -> None: ...

    def write_value(self, stream: Stream, address: int, value: int) -> None: ...

    def wait_value(self, stream: Stream, address: int, value: int) -> None: ...

    def word_operations(self, stream: Stream, operations: Sequence[WordWrite | WordWait]) -> None: ...

    def register_host(self, host_address: int, num_bytes: int) -> int:
        return host_address

    def unregister_host(self, host_address: int) -> None: ...

    def run(self, stream: Stream, issue: Callable[[], None]) -> None:
        issue()

    def begin_capture(self, stream: Stream) -> None: ...

    def end_capture(self, stream: Stream) -> Graph:
        return Graph(next(self._numbers))

    def abandon_capture(self, stream: Stream) -> None: ...

    def launch_graph(self, graph: Graph, stream: Stream) -> None: ...

    def free_bytes(self) -> int:
        return _MEMORY_BYTES

    def total_bytes(self) -> int:
        return _MEMORY_BYTES

    def destroy_graph(self, graph: Graph) -> None: ...


class NullKernels:
    """Launches no raw kernel."""

    multiprocessors = 1

    def launch(self, launch: Launch, stream: Stream) -> None: ...


def null_device() -> GpuDevice:
    """Returns a new device on which nothing runs."""
    return GpuDevice(NullDriver(), NullKernels(), torch.device("meta"), "a device on which nothing runs")
