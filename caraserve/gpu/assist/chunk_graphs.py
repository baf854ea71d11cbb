"""Captured graphs of assisted chunks, so that a chunk is launched by one call instead of one for each kernel.

A graph is captured for a number of tokens; a shorter chunk is padded. In every layer it hands off all its module
groups: the work orders, which a chunk sends before, say for each of them whether workers are asked, where x, deltas and
words are, and for which weights the device waits. So one graph serves any adapter and any sync slot. Sampling is not
part of it: few chunks sample, and the head is a large product.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from caraserve.gpu.driver.api import Driver, DriverError, Stream
from caraserve.gpu.forward.decoder import Decoder, DecoderPass, issue_pass
from caraserve.gpu.forward.graphs import NODE_BYTES, QKV_ALONE
from caraserve.gpu.forward.lanes import CapturedPass, capture_pass
from caraserve.gpu.forward.lora_pass import HandOffMemory
from caraserve.gpu.kernels.lora import most_segments
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS
from caraserve.gpu.memory.pass_shape import ALL_GROUPS, PassShape
from caraserve.util.units import ceil_div

_SIZES = (32, 64, ASSISTED_CHUNK_TOKENS)  # products of fewer rows take as long: they read the weights meanwhile
_NODES_PER_LAYER = {QKV_ALONE: 15, ALL_GROUPS: 33}


@dataclass(frozen=True, slots=True)
class ChunkGraph:
    """A captured chunk and its shape: the work orders of all the shape's module groups are read."""

    shape: PassShape
    captured: CapturedPass


class ChunkGraphs:
    """The graphs of the assist lane. Used by the launching thread only."""

    def __init__(
        self, driver: Driver, decoder: Decoder, hand_offs: HandOffMemory, tile_tokens: int, budget_bytes: int
    ) -> None:
        """`tile_tokens`: most tokens per tile of `attend_prefill`. `budget_bytes`: of device memory, for all graphs."""
        self._driver, self._decoder, self._hand_offs = driver, decoder, hand_offs
        self._layers, self._left_bytes = decoder.spec.layers, budget_bytes
        shapes = [_shape(size, groups, tile_tokens) for size in _SIZES for groups in _NODES_PER_LAYER]
        fits = expected_bytes(self._layers) <= budget_bytes
        self._shapes = shapes if fits else []
        self._captured: list[ChunkGraph] = []
        self.failures: list[DriverError] = []  # why chunks have no graphs that were to have one

    @property
    def count(self) -> int:
        """Returns how often `capture_all` calls `advance`."""
        return len(self._shapes)

    def capture_all(self, stream: Stream, wait_until_idle: Callable[[], None], advance: Callable[[], None]) -> None:
        """Captures every graph that has room, and calls `advance` after each.

        The batch in device memory must have no rows, and the work orders must be zeros: each pass runs once before it
        is captured, so that all its kernels are loaded. What cannot be captured is left out (`failures`): such chunks
        are launched kernel by kernel. Raises DriverError if the device has failed.
        """
        for shape in reversed(self._shapes):  # largest first, so that smaller graphs reuse their memory
            steps = self._decoder.make_pass(shape, hand_offs=self._hand_offs)
            issue_pass(steps, stream, self._layers)
            wait_until_idle()
            try:
                self._capture(shape, steps, stream)
            except DriverError as error:
                self.failures.append(error)
                wait_until_idle()  # raises if the device has failed
            advance()

    def _capture(self, shape: PassShape, steps: DecoderPass, stream: Stream) -> None:
        before = self._driver.free_bytes()
        captured = capture_pass(self._driver, steps, stream, self._layers, gate=None)
        taken = max(0, before - self._driver.free_bytes())
        if taken <= self._left_bytes:
            self._left_bytes -= taken
            self._captured.insert(0, ChunkGraph(shape, captured))
        else:
            self._driver.destroy_graph(captured.graph)

    def find(self, shape: PassShape) -> ChunkGraph | None:
        """Returns the smallest graph of a chunk, which computes all but its outputs, or None: it is launched kernel by
        kernel."""
        wanted = replace(shape, outputs=0)
        return next((graph for graph in self._captured if wanted.fits(graph.shape)), None)


def expected_bytes(layers: int) -> int:
    """Returns the device memory that all graphs of a model are expected to take."""
    return len(_SIZES) * layers * sum(_NODES_PER_LAYER.values()) * NODE_BYTES


def _shape(tokens: int, groups: frozenset[int], tile_tokens: int) -> PassShape:
    tiles = ceil_div(tokens, tile_tokens)
    return PassShape(tokens, 0, tiles, 0, most_segments(tokens, 1), has_items=False, context=0, groups=groups)
