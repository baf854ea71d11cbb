"""Captured graphs of assisted chunks, so that a chunk is launched by one call instead of one for each kernel.

A graph is captured for a number of tokens; a shorter chunk is padded. In every layer it hands off all its groups: the
work orders, which a chunk sends before, say for each of them whether workers are asked, where x, deltas and
words are, and for which weights the device waits. So one graph serves any adapter and any sync slot. Sampling is not
part of it: few chunks sample, and the head is a large product.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.forward.decoder import Decoder
from caraserve.gpu.forward.graphs import NODE_BYTES, expert_nodes
from caraserve.gpu.forward.lanes import CapturedPass, PassCapturer
from caraserve.gpu.forward.lora_pass import HandOffMemory
from caraserve.gpu.kernels.lora import most_segments
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS
from caraserve.gpu.memory.pass_shape import PassShape, all_groups
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import ceil_div

_SIZES = (32, 64, ASSISTED_CHUNK_TOKENS)  # products of fewer rows take as long: they read the weights meanwhile
_NODES_PER_HAND_OFF = 6


@dataclass(frozen=True, slots=True)
class ChunkGraph:
    """A captured chunk and its shape: the work orders of all the shape's groups are read."""

    shape: PassShape
    captured: CapturedPass


class ChunkGraphs:
    """The graphs of the assist lane. Used by the launching thread only."""

    def __init__(
        self,
        driver: Driver,
        decoder: Decoder,
        plan: DecoderPlan,
        hand_offs: HandOffMemory,
        tile_tokens: int,
        budget_bytes: int,
    ) -> None:
        """`tile_tokens`: the most of a tile of prefill attention. `budget_bytes`: of device memory, for all graphs."""
        self._decoder, self._hand_offs, self._left_bytes = decoder, hand_offs, budget_bytes
        shapes = [_shape(size, groups, tile_tokens) for size in _SIZES for groups in _variants(plan)]
        fits = expected_bytes(plan) <= budget_bytes
        self._shapes = shapes if fits else []
        self._captured: list[ChunkGraph] = []
        self._capturer = PassCapturer(driver, len(plan.layers))
        self.failures = self._capturer.failures

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
            captured = self._capturer.capture(steps, stream, None, self._keep, wait_until_idle)
            if captured is not None:
                self._captured.insert(0, ChunkGraph(shape, captured))
            advance()

    def _keep(self, num_bytes: int) -> bool:
        """Returns whether a graph of so many bytes fits beside those before it."""
        fits = num_bytes <= self._left_bytes
        self._left_bytes -= num_bytes if fits else 0
        return fits

    def find(self, shape: PassShape) -> ChunkGraph | None:
        """Returns the smallest graph of a chunk, which computes all but its outputs, or None: it is launched kernel by
        kernel."""
        wanted = replace(shape, outputs=0)
        return next((graph for graph in self._captured if wanted.fits(graph.shape)), None)


def expected_bytes(plan: DecoderPlan) -> int:
    """Returns the device memory that all graphs of a model are expected to take."""
    return len(_SIZES) * sum(_nodes(plan, groups) for groups in _variants(plan)) * NODE_BYTES


def _variants(plan: DecoderPlan) -> tuple[frozenset[int], ...]:
    """Returns the group shapes that graphs hand off: q, k and v alone, and all."""
    return plan.attention_inputs, all_groups(plan)


def _nodes(plan: DecoderPlan, groups: frozenset[int]) -> int:
    """Returns the kernels of a pass that hands off these group shapes. A layer of a Llama, with four groups, has nine
    kernels besides: four products, two norms, one for q and k, attention and the activation; with a delta net ten."""
    hand_offs = sum(len(groups.intersection(shapes)) for shapes in plan.shapes_of_groups)
    own = sum(2 * len(shapes) + 1 for shapes in plan.shapes_of_groups) + expert_nodes(plan) + len(plan.delta_nets)
    return own + _NODES_PER_HAND_OFF * hand_offs


def _shape(tokens: int, groups: frozenset[int], tile_tokens: int) -> PassShape:
    tiles = ceil_div(tokens, tile_tokens)
    return PassShape(tokens, 0, tiles, 0, most_segments(tokens, 1), has_items=False, context=0, groups=groups)
