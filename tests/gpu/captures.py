"""Common base of drivers without a device: captures operations of streams as graphs, maps host memory to itself, and
checks the order in which writes of words and waits for them are issued."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from caraserve.gpu.driver.api import Graph, Stream, WordWait, WordWrite, has_reached

Operation = TypeVar("Operation")


class WaitBeforeWrite(AssertionError):
    """A wait was issued for a word of device memory before the write that ends it. If both streams share a hardware
    queue, the write never runs."""


class Captures(ABC, Generic[Operation]):
    """Implements a part of the Driver protocol. Methods that issue an operation call `_captured` first, and those that
    issue a write of a word or a wait for one call `_note_write` or `_check_wait`.

    Words of registered memory are written by the host and by CPU workers, too, so waits for them may come first."""

    def __init__(self) -> None:
        self._captures: dict[Stream, list[Operation]] = {}  # operations of captures in progress
        self._graphs: dict[Graph, list[Operation]] = {}
        self._graph_numbers = itertools.count(1)
        self._word_checks: dict[Stream, list[Callable[[], None]]] = {}  # of captures in progress, for each launch
        self._graph_checks: dict[Graph, list[Callable[[], None]]] = {}
        self._written: dict[int, int] = {}  # by address of a word: the value of the write that was issued last
        self._registered: dict[int, int] = {}  # first address of host memory: its bytes

    def begin_capture(self, stream: Stream) -> None:
        self._captures[stream] = []
        self._word_checks[stream] = []

    def end_capture(self, stream: Stream) -> Graph:
        assert self.captures(stream), "no capture is under way"
        graph = Graph(next(self._graph_numbers))
        self._graphs[graph] = self._captures.pop(stream)
        self._graph_checks[graph] = self._word_checks.pop(stream)
        return graph

    def abandon_capture(self, stream: Stream) -> None:
        assert self.captures(stream), "no capture is under way"
        del self._captures[stream], self._word_checks[stream]

    def destroy_graph(self, graph: Graph) -> None:
        del self._graphs[graph], self._graph_checks[graph]

    @abstractmethod
    def write_value(self, stream: Stream, address: int, value: int) -> None:
        """Issues a write of a word."""

    @abstractmethod
    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        """Issues a wait for a word."""

    def word_operations(self, stream: Stream, operations: Sequence[WordWrite | WordWait]) -> None:
        for each in operations:
            issue = self.write_value if isinstance(each, WordWrite) else self.wait_value
            issue(stream, each.address, each.value)

    def captures(self, stream: Stream) -> bool:
        """True while operations issued on the stream go into a graph."""
        return stream in self._captures

    def register_host(self, host_address: int, num_bytes: int) -> int:
        self._registered[host_address] = num_bytes
        return host_address

    def unregister_host(self, host_address: int) -> None:
        del self._registered[host_address]

    def _captured(self, stream: Stream, operation: Operation) -> bool:
        """Records the operation and returns True if its stream is being captured, so that it must not run now."""
        if not self.captures(stream):
            return False
        self._captures[stream].append(operation)
        return True

    def _launched(self, graph: Graph) -> list[Operation]:
        """Returns the operations of a graph that is launched now, and checks its waits for words."""
        for check in self._graph_checks[graph]:
            check()
        return self._graphs[graph]

    def _note_write(self, stream: Stream, address: int, value: int) -> None:
        def note() -> None:
            self._written[address] = value

        self._on_launch(stream, note)

    def _check_wait(self, stream: Stream, address: int, value: int) -> None:
        self._on_launch(stream, lambda: self.check_issued(address, value))

    def check_issued(self, address: int, value: int) -> None:
        """Raises WaitBeforeWrite if a word of device memory gets a value by no write that was issued."""
        if any(start <= address < start + num_bytes for start, num_bytes in self._registered.items()):
            return
        if address not in self._written or not has_reached(self._written[address], value):
            last = self._written.get(address, "nothing")
            raise WaitBeforeWrite(f"a stream waits for {value}, and the last write that was issued is of {last}")

    def _on_launch(self, stream: Stream, act: Callable[[], None]) -> None:
        """Acts now, or at each launch of the graph that is being captured on the stream."""
        if self.captures(stream):
            self._word_checks[stream].append(act)
        else:
            act()
