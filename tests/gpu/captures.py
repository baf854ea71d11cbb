"""What drivers without a device have in common: streams whose operations are kept as graphs, and host memory that the
device sees as it is."""

import itertools
from typing import Generic, TypeVar

from caraserve.gpu.driver.api import Graph, Stream

Operation = TypeVar("Operation")


class Captures(Generic[Operation]):
    """A part of the Driver protocol; a method that issues an operation calls `_captured` first."""

    def __init__(self) -> None:
        self._captures: dict[Stream, list[Operation]] = {}  # under way
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
        """Whether what is issued goes into a graph."""
        return stream in self._captures

    def register_host(self, host_address: int, num_bytes: int) -> int:
        return host_address

    def unregister_host(self, host_address: int) -> None:
        """As `register_host`."""

    def _captured(self, stream: Stream, operation: Operation) -> bool:
        """Whether an operation has gone into a graph, and so does not run now."""
        if not self.captures(stream):
            return False
        self._captures[stream].append(operation)
        return True
