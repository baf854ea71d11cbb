"""Captured passes: made once before serving, then launched as one operation each."""

import logging
from collections.abc import Callable, Collection

import torch

from caraserve.core.batch import Batch
from caraserve.gpu.driver.api import Driver, DriverError, Stream
from caraserve.gpu.forward.batch import ALL_GROUPS, Capacity, Shape
from caraserve.gpu.forward.graphs import Bucket, GraphSet, bucket_of
from caraserve.gpu.forward.lanes import Pass, Replay, capture_pass, issue_pass
from caraserve.gpu.kernels.lora import most_segments

log = logging.getLogger(__name__)

# What a mixed graph has room for besides its tokens. Programs for more than are there start for nothing; a batch that
# needs more is launched kernel by kernel.
_PROMPTS, _PROMPTS_ADAPTERS = 16, 8


def shape_for(bucket: Bucket, capacity: Capacity, max_context: int) -> Shape:
    """The largest batch that a bucket takes."""
    groups = frozenset({0}) if bucket.qkv_only else ALL_GROUPS
    if not bucket.is_mixed:
        return Shape(bucket.size, bucket.size, 0, bucket.size, 0, bucket.lora, max_context, groups)
    rows = min(capacity.rows, bucket.size)
    tiles = bucket.size // capacity.tile_tokens + min(rows, _PROMPTS)
    adapters = min(capacity.adapters, rows, _PROMPTS_ADAPTERS)
    segments = most_segments(bucket.size, adapters) if bucket.lora else 0
    return Shape(bucket.size, rows, tiles, rows, segments, bucket.lora, max_context, groups)


class Captures:
    """The graphs of the iteration lane, by bucket. The launching thread's alone."""

    def __init__(self, driver: Driver, graphs: GraphSet, capacity: Capacity, max_context: int, layers: int) -> None:
        self._driver, self._graphs, self._capacity = driver, graphs, capacity
        self._max_context, self._layers = max_context, layers
        self._replays: dict[Bucket, tuple[Replay, Shape]] = {}

    def make_gates(self, device: torch.device) -> None:
        """Words by which graphs wait for layers; to be called first."""
        self._gates = torch.zeros(max(1, self.count), dtype=torch.int32, device=device)

    def capture_all(
        self,
        work_of: Callable[[Bucket, Shape], Pass],
        stream: Stream,
        settle: Callable[[], None],
        advance: Callable[[], None],
    ) -> None:
        """Captures every bucket that has room. The batch in device memory is one of no rows: each pass is run once
        before, so that all its kernels are loaded. `settle` waits for the stream; `advance` is called for each. Where
        the driver captures no waits, there are no gated graphs: what would take one is launched kernel by kernel."""
        refusal: DriverError | None = None
        for index, bucket in enumerate(self._graphs.to_capture()):
            if refusal is None or not bucket.gated:
                shape = shape_for(bucket, self._capacity, self._max_context)
                work = work_of(bucket, shape)
                issue_pass(work, stream, self._layers)
                settle()
                try:
                    self._capture(index, bucket, shape, work, stream)
                except DriverError as error:
                    if not bucket.gated:
                        raise
                    refusal = error
            advance()
        if refusal is not None:
            log.warning("no graphs for iterations that wait for adapters: the driver captures no waits (%s)", refusal)

    def _capture(self, index: int, bucket: Bucket, shape: Shape, work: Pass, stream: Stream) -> None:
        gate = self._gates[index].data_ptr() if bucket.gated else None
        before = self._driver.free_bytes()
        replay = capture_pass(self._driver, work, stream, self._layers, gate)
        if self._graphs.captured(bucket, max(0, before - self._driver.free_bytes())):
            self._replays[bucket] = replay, shape
        else:
            self._driver.destroy_graph(replay.graph)

    @property
    def count(self) -> int:
        """How many `capture_all` will make."""
        return len(self._graphs.to_capture())

    def find(self, plan: Batch, shape: Shape, arriving: Collection[int]) -> Replay | None:
        """The graph for a plan; None: it is launched kernel by kernel."""
        wanted = bucket_of(plan, arriving, shape.groups)
        chosen = None if wanted is None else self._graphs.choose(wanted)
        if chosen is None:
            return None
        replay, largest = self._replays[chosen]
        return replay if shape.fits(largest) else None
