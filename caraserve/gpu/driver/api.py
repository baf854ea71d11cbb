"""The interface of the CUDA driver as the backend uses it: streams, events, copies, waits for words, graphs.

`cuda_driver.py` implements it for a device; tests replay its semantics on the host. Operations of one stream run in
the order of issue; operations of different streams are ordered by events and words only. No call blocks the caller
except `synchronize`, `register_host` and those whose docstring says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from caraserve.core.batch import DeviceLost

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Graph = NewType("Graph", int)  # instantiated, ready for launch

WORD_BYTES = 4
WORD_VALUES = 1 << 8 * WORD_BYTES


@dataclass(frozen=True, slots=True)
class WordWrite:
    """Sets the word at a device address, as `write_value`."""

    address: int
    value: int


@dataclass(frozen=True, slots=True)
class WordWait:
    """Waits until the word at a device address `has_reached` a value, as `wait_value`."""

    address: int
    value: int


class DriverError(DeviceLost):
    """The driver rejected an operation, or the device has failed. After most rejected operations nothing runs any
    more."""


def successor(number: int) -> int:
    """Returns the value after `number` of a 32-bit word that wraps around."""
    return (number + 1) % WORD_VALUES


def has_reached(value: int, target: int) -> bool:
    """True if a wrapping 32-bit word has reached `target` or passed it; the condition of `wait_value`."""
    return (value - target) % WORD_VALUES < WORD_VALUES // 2


class Driver(Protocol):
    """Driver calls of one device. Addresses are device addresses, also for host memory, unless the name says
    otherwise."""

    def create_stream(self, priority: int) -> Stream:
        """Creates a stream. Of two streams with work, the device prefers the one with the lower priority number."""

    def destroy_stream(self, stream: Stream) -> None:
        """Destroys a stream on which everything has run."""

    def create_event(self) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None:
        """Makes the event stand for everything issued on `stream` so far."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Makes later operations of `stream` wait for the event as last recorded; no wait if it was never recorded."""

    def is_done(self, event: Event) -> bool:
        """True if everything that the event stands for has run. Raises DriverError when the device has failed."""

    def synchronize(self, event: Event) -> None:
        """Blocks the calling thread until the event `is_done`."""

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copies from registered host memory, which must not change before the copy has run."""

    def copy_rows_to_device(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Stream
    ) -> None:
        """Copies `rows` rows of `width` bytes; the pitches are the bytes between the starts of two rows."""

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: Stream) -> None: ...

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Copies between two ranges of device memory, which must not overlap."""

    def fill(self, target: int, num_bytes: int, stream: Stream) -> None:
        """Writes zeros to `num_bytes` bytes."""

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        """Sets a word once everything issued on `stream` before is visible to device and host."""

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        """Makes later operations of `stream` wait until the word `has_reached` the value; occupies no
        multiprocessor."""

    def word_operations(self, stream: Stream, operations: Sequence[WordWrite | WordWait]) -> None:
        """Issues several writes of words and waits for words, in this order, with one driver call where possible."""

    def register_host(self, host_address: int, num_bytes: int) -> int:
        """Pins and maps host memory; returns its device address. Slow and stalls other calls: for use before serving
        only."""

    def unregister_host(self, host_address: int) -> None: ...

    def run(self, stream: Stream, issue: Callable[[], None]) -> None:
        """Calls `issue` with `stream` as the current stream, for torch, Triton and the launcher of the raw kernels.
        `issue` only launches kernels: it neither allocates device memory nor waits for the device, because it may be
        captured. Raises what `issue` raises, as DriverError if the device has failed."""

    def begin_capture(self, stream: Stream) -> None:
        """Starts a capture: operations issued on `stream` go into a graph and do not run, and so do those of a stream
        that waits for an event recorded in the capture. `stream` must wait for such a stream before the end."""

    def end_capture(self, stream: Stream) -> Graph:
        """Ends the capture and returns its graph. Raises DriverError, with the capture ended, if no graph can be
        made."""

    def abandon_capture(self, stream: Stream) -> None:
        """Ends a capture and discards its operations."""

    def launch_graph(self, graph: Graph, stream: Stream) -> None: ...

    def free_bytes(self) -> int:
        """Returns the bytes of free device memory."""

    def total_bytes(self) -> int:
        """Returns the bytes of device memory, free or in use."""

    def destroy_graph(self, graph: Graph) -> None:
        """Destroys a graph, all of whose launches must have run."""
