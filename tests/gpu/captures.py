"""Common base of drivers without a device: captures operations of streams as graphs, and maps host memory to itself."""

import itertools
from typing import Generic, TypeVar

from caraserve.gpu.driver.api import Graph, Stream

Operation = TypeVar("Operation")


class Captures(Generic[Operation]):
    """Implements a part of the Driver protocol. Methods that issue an operation call `_captured` first."""

    def __init__(self) -> None:
        self._captures: dict[Stream, list[Operation]] = {}  # operations of captures in progress
        self._graphs: dict[Graph, list[Operation]] = {}
        self._graph_numbers = itertools.count(1)

    def begin_capture(self, stream: Stream) -> None:
        self._captures[stream] = []

    def end_capture(self, stream: Stream) -> Graph:
        assert self.captures(stream), "no capture is under way"
        graph = Graph(next(self._graph_numbers))
        self._graphs[graph] = self._captures.pop(stream)
        return graph

    def abandon_capture(self, stream: Stream) -> None:
        assert self.captures(stream), "no capture is under way"
        del self._captures[stream]

    def destroy_graph(self, graph: Graph) -> None:
        del self._graphs[graph]

    def captures(self, stream: Stream) -> bool:
        """True while operations issued on the stream go into a graph."""
        return stream in self._captures

    def register_host(self, host_address: int, num_bytes: int) -> int:
        return host_address

    def unregister_host(self, host_address: int) -> None:
        """Does nothing: host memory needs no registration here."""

    def _captured(self, stream: Stream, operation: Operation) -> bool:
        """Records the operation and returns True if its stream is being captured, so that it must not run now."""
        if not self.captures(stream):
            return False
        self._captures[stream].append(operation)
        return True
