"""What the CUDA backend asks of the driver: streams, events, copies, words to wait for, graphs.

`cuda_driver.py` has these operations of a device; tests replay their semantics on the host. Operations of one stream
run in the order of issue; between streams only events and words order them. Nothing here blocks the caller except
`synchronize`, `register_host` and what says so.
"""

from collections.abc import Callable
from typing import NewType, Protocol

from caraserve.core.batch import DeviceLost

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Graph = NewType("Graph", int)  # instantiated, ready to be launched

WORD_BYTES = 4
_WORD = 1 << 8 * WORD_BYTES


class DriverError(DeviceLost):
    """The driver refused an operation, or the device has failed: after most of what it refuses it runs nothing more."""


def successor(number: int) -> int:
    """The next value of a word that counts round."""
    return (number + 1) % _WORD


def has_reached(value: int, target: int) -> bool:
    """Whether a word that counts round is at `target` or beyond it: what `wait_value` waits for."""
    return (value - target) % _WORD < _WORD // 2


class Driver(Protocol):
    """Addresses are the device's, also of host memory, unless a name says otherwise."""

    def create_stream(self, priority: int) -> Stream:
        """A stream of its own; a lower number goes first where the device has a choice."""

    def create_event(self) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None:
        """The event now means: all that was issued on `stream` so far."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Later operations of `stream` wait for what the event means at this moment; nothing, if never recorded."""

    def is_done(self, event: Event) -> bool:
        """Whether what the event means has run. Raises DriverError when the device has failed."""

    def synchronize(self, event: Event) -> None:
        """Blocks the calling thread until `is_done`."""

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """From registered host memory, which must stay as it is until the copy has run."""

    def copy_rows_to_device(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Stream
    ) -> None:
        """`rows` pieces of `width` bytes, their beginnings a pitch apart."""

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: Stream) -> None: ...

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """The ranges must not overlap."""

    def fill(self, target: int, num_bytes: int, stream: Stream) -> None:
        """Writes zeros."""

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        """Sets a word after everything issued on `stream` before it can be seen by all."""

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        """Later operations of `stream` wait until the word `has_reached` the value. Occupies no multiprocessor."""

    def register_host(self, host_address: int, num_bytes: int) -> int:
        """Pins host memory and maps it; returns its address on the device. Slow, stalls other calls: before serving."""

    def unregister_host(self, host_address: int) -> None: ...

    def run(self, stream: Stream, issue: Callable[[], None]) -> None:
        """Issues kernels: `issue` calls torch, Triton or the raw kernels' launcher, whose current stream is `stream`
        meanwhile. It allocates nothing on the device and asks nothing of it, for it may be captured."""

    def begin_capture(self, stream: Stream) -> None:
        """Operations issued on `stream` go into a graph from now on, and do not run."""

    def end_capture(self, stream: Stream) -> Graph:
        """Raises DriverError, the capture being over, when no graph can be made of what was issued."""

    def abandon_capture(self, stream: Stream) -> None:
        """Ends a capture, and forgets what was issued."""

    def launch_graph(self, graph: Graph, stream: Stream) -> None: ...

    def free_bytes(self) -> int:
        """Bytes of free device memory."""

    def total_bytes(self) -> int:
        """Bytes of device memory, free or not."""

    def destroy_graph(self, graph: Graph) -> None:
        """The graph must have run."""
