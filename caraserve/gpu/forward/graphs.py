"""Captured graphs: which passes are captured before serving, and which graph an iteration takes.

A graph is captured for a number of rows or tokens. A smaller batch is filled up with padding rows, which belong to no
request; kernels that read or write keys and values skip them. Everything else a graph finds in device tables, so one
graph serves any mix of adapters and ranks. Graphs share a memory budget that is fixed at start. Those of large prompts,
which a device computes for longer than their kernels take to launch, are captured while the server is idle; all others
before serving. Capturing takes driver locks that the release of a waiting device might need.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch
from caraserve.cpu.masks import masked_rows
from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.forward.decoder import DecoderPass
from caraserve.gpu.forward.lanes import CapturedPass, PassCapturer
from caraserve.gpu.kernels.bgmv_work import MOST_ROWS
from caraserve.gpu.kernels.experts import LAUNCHES
from caraserve.gpu.kernels.lora import most_segments
from caraserve.gpu.memory.pass_shape import Capacity, PassShape, all_groups
from caraserve.model.plan import DecoderPlan

_DECODE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_SEGMENTED_SIZES = (16, 32, 64, 128, 256, 512)
_MIXED_SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Up to 128 tokens take as long as reading the weights. Above 512 all sizes are served: see `_MOST_PADDING_OF_GATED`.
_GATED_SIZES = (64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
# Largest graph as a multiple of the batch's size: beyond it, launching kernel by kernel costs less. Small batches end
# before the next kernel is launched, and large ones compute padding. While a pass that waits for layers is launched
# kernel by kernel, the launching thread does not issue their copies either.
_MOST_PADDING, _MOST_PADDING_OF_LARGE, _MOST_PADDING_OF_GATED = 4.0, 1.15, 4 / 3
_LARGE_TOKENS = 512
# Most tokens of a mixed graph that is captured before serving. Larger passes lose little without one: 32 layers are
# launched in 7 ms, and an H200 computes 256 tokens in 7 ms, 1,024 in 23.
_FIRST_TOKENS = 256
_THINNEST = 2  # one of so many sizes of mixed graphs is captured where not all graphs fit

NODE_BYTES = 8 << 10  # device memory per captured kernel, expected


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A graph's shape. Decode: `size` rows of one token each; mixed: `size` tokens of any rows. `qkv_only`: it has only
    the LoRA kernels of q, k and v. `gated`: it waits for layers that are being copied. `merged`: over weights with a
    merged adapter. `segmented`: of decode, with the LoRA kernels of prompts, too, for adapters of many rows."""

    is_mixed: bool
    size: int
    lora: bool
    qkv_only: bool = False
    gated: bool = False
    merged: bool = False
    segmented: bool = False

    def serves(self, wanted: "Bucket") -> bool:
        """True if an iteration of shape `wanted` may take this graph. One with LoRA serves base rows too."""
        return (
            self.size >= wanted.size
            and (self.is_mixed or not wanted.is_mixed)
            and (not wanted.lora or (self.lora and self.qkv_only <= wanted.qkv_only))
            and (self.gated or not wanted.gated)
            and self.merged == wanted.merged
            and (self.is_mixed or self.segmented or not wanted.segmented)
        )

    @property
    def is_late(self) -> bool:
        """True if it is captured while the server is idle."""
        return self.is_mixed and self.size > _FIRST_TOKENS

    @property
    def cost(self) -> tuple[bool, bool, int, bool, bool, bool]:
        """Sort key among graphs that serve an iteration: the least is the best."""
        return (self.is_mixed, self.gated, self.size, self.lora, not self.qkv_only, self.segmented)


def bucket_of(
    batch: Batch,
    arriving: Collection[int],
    groups: Collection[int],
    attention_inputs: Collection[int],
    *,
    segmented: bool = False,
) -> Bucket | None:
    """Returns the bucket that a batch needs, of exact size, or None if it must be launched kernel by kernel.

    `arriving`: adapter slots whose layers arrive one after another; `groups`: shapes of the groups in which the batch's
    adapters have modules; `attention_inputs`: those of the plan; `segmented`: whether an adapter has more decoding rows
    than BGMV takes."""
    if any(row.prompt_logprobs is not None for row in batch.rows):
        return None  # every token is scored: far more logits than a graph has room for
    slots = {row.adapter_slot for row in batch.rows}
    is_mixed = batch.num_tokens > len(batch.rows)
    merged = batch.merged is not None
    has_lora = not merged and slots != {BASE_ADAPTER_SLOT}
    return Bucket(
        is_mixed=is_mixed,
        size=batch.num_tokens if is_mixed else len(batch.rows),
        lora=has_lora,
        qkv_only=has_lora and set(groups) <= set(attention_inputs),
        gated=not merged and not slots.isdisjoint(arriving),
        merged=merged,
        segmented=has_lora and segmented and not is_mixed,
    )


def buckets(max_rows: int, max_tokens: int, *, merging: bool = False, thinned: int = 1) -> Iterator[Bucket]:
    """Yields all possible buckets, the most useful first. `thinned`: of mixed ones, every so manieth size."""
    for size in _up_to(_DECODE_SIZES, max_rows):
        yield from _variants(size, is_mixed=False, merging=merging)
    for size in _up_to(_SEGMENTED_SIZES, max_rows) if max_rows > MOST_ROWS else ():
        for qkv_only in (True, False):
            yield Bucket(is_mixed=False, size=size, lora=True, qkv_only=qkv_only, segmented=True)
    mixed, gated = (_up_to(sizes, max(max_rows, max_tokens)) for sizes in (_MIXED_SIZES, _GATED_SIZES))
    for size in mixed[::-thinned][::-1]:
        yield from _variants(size, is_mixed=True, merging=merging)
    for size in gated[::-thinned][::-1]:
        for qkv_only in (True, False):
            yield Bucket(is_mixed=True, size=size, lora=True, qkv_only=qkv_only, gated=True)


def _variants(size: int, *, is_mixed: bool, merging: bool) -> Iterator[Bucket]:
    yield Bucket(is_mixed, size, lora=False)
    yield Bucket(is_mixed, size, lora=True, qkv_only=True)
    yield Bucket(is_mixed, size, lora=True)
    if merging:
        yield Bucket(is_mixed, size, lora=False, merged=True)


def _up_to(sizes: tuple[int, ...], most: int) -> list[int]:
    """Returns the sizes below `most`, and `most` itself."""
    return [*(size for size in sizes if size < most), most]


@dataclass(slots=True)
class GraphSet:
    """The buckets of one backend: what to capture within a memory budget, and which to take."""

    max_rows: int
    max_tokens: int
    budget_bytes: int
    expected_bytes: int  # of each graph
    merging: bool = False
    _captured: dict[Bucket, int] = field(default_factory=dict)  # bytes
    _chosen: dict[Bucket, Bucket | None] = field(default_factory=dict)  # results of `choose`

    @property
    def num_bytes(self) -> int:
        """Bytes that graphs take."""
        return sum(self._captured.values())

    def to_capture(self) -> list[Bucket]:
        """Returns the most useful buckets that fit, late ones last, and the largest of both first, so that smaller
        graphs reuse their memory. Rather than kinds of graphs, every other size of mixed ones is left out."""
        count = self.budget_bytes // self.expected_bytes
        found = list(buckets(self.max_rows, self.max_tokens, merging=self.merging))
        if len(found) > count:
            found = list(buckets(self.max_rows, self.max_tokens, merging=self.merging, thinned=_THINNEST))
        chosen = found[:count]
        return sorted(chosen, key=lambda bucket: (bucket.is_late, -bucket.size, bucket))

    def captured(self, bucket: Bucket, num_bytes: int) -> bool:
        """Records a graph and its bytes. Returns False if it exceeds the budget: the caller then destroys it."""
        if self.num_bytes + num_bytes > self.budget_bytes:
            return False
        self._captured[bucket] = num_bytes
        self._chosen.clear()
        return True

    def choose(self, wanted: Bucket) -> Bucket | None:
        """Returns the best captured graph for an iteration, or None: kernel by kernel."""
        if wanted not in self._chosen:
            self._chosen[wanted] = self._best(wanted)
        return self._chosen[wanted]

    def _best(self, wanted: Bucket) -> Bucket | None:
        if wanted.size > (self.max_tokens if wanted.is_mixed else self.max_rows):
            raise AssertionError(f"an iteration of {wanted.size} exceeds the backend's limits")
        most, padding = self._most_size(wanted), _MOST_PADDING_OF_GATED if wanted.gated else _MOST_PADDING_OF_LARGE
        serving = [
            bucket
            for bucket in self._captured
            if bucket.serves(wanted)
            and bucket.size <= (padding * wanted.size if bucket.is_mixed and bucket.size > _LARGE_TOKENS else most)
        ]
        return min(serving, key=lambda bucket: (bucket.cost, bucket), default=None)

    def _most_size(self, wanted: Bucket) -> float:
        """Returns the largest size of a graph without much padding."""
        return max(self._ideal_size(wanted), _MOST_PADDING * wanted.size)

    def _ideal_size(self, wanted: Bucket) -> int:
        """Size of the best possible bucket, captured or not, that serves."""
        every = buckets(self.max_rows, self.max_tokens, merging=self.merging)
        serving = (bucket for bucket in every if bucket.serves(wanted))
        ideal = min(serving, key=lambda bucket: (bucket.cost, bucket), default=None)
        return 0 if ideal is None else ideal.size


# Most prompts of a mixed graph, and adapters that have prompts or many decoding rows: programs for more than the batch
# has would start for nothing. A batch that exceeds them is launched kernel by kernel.
_PROMPTS, _SEGMENTED_ADAPTERS = 16, 16


def expert_nodes(plan: DecoderPlan) -> int:
    """Returns the kernels of the experts in all layers."""
    return LAUNCHES * len(plan.moes)


def shape_for(plan: DecoderPlan, bucket: Bucket, capacity: Capacity, max_context: int) -> PassShape:
    """Returns the shape of the largest batch that a bucket takes."""
    groups = plan.attention_inputs if bucket.qkv_only else all_groups(plan)
    if not bucket.is_mixed:
        segments = bucket.size // (MOST_ROWS + 1) if bucket.segmented else 0  # each has more rows than BGMV takes
        return PassShape(bucket.size, bucket.size, 0, bucket.size, segments, bucket.lora, max_context, groups)
    rows = min(capacity.rows, bucket.size)
    tiles = bucket.size // capacity.tile_tokens + min(rows, _PROMPTS)
    adapters = min(capacity.adapters, rows, _SEGMENTED_ADAPTERS)
    segments = most_segments(bucket.size, adapters) if bucket.lora else 0
    return PassShape(bucket.size, rows, tiles, rows, segments, bucket.lora, max_context, groups)


@dataclass(frozen=True, slots=True)
class Passes:
    """How passes are made and issued to be captured."""

    make: Callable[[Bucket, PassShape], DecoderPass]
    stream: Stream
    wait_until_idle: Callable[[], None]


class CapturedGraphs:
    """The captured graphs of the iteration lane, by bucket. Used by the launching thread only."""

    def __init__(
        self, driver: Driver, graphs: GraphSet, capacity: Capacity, max_context: int, plan: DecoderPlan
    ) -> None:
        self._plan, self._graphs, self._capacity, self._max_context = plan, graphs, capacity, max_context
        self._captured: dict[Bucket, tuple[CapturedPass, PassShape]] = {}
        self._late: deque[Bucket] = deque()
        self._capturer = PassCapturer(driver, len(plan.layers))
        self.failures = self._capturer.failures

    def capture_first(self, passes: Passes, gates: torch.device, advance: Callable[[], None]) -> None:
        """Captures the buckets that have room and are not late, and calls `advance` after each. `gates`: where the
        words are that graphs wait for.

        The batch in device memory must have no rows: each pass runs once before it is captured, so that all its kernels
        are loaded. What cannot be captured is left out (`failures`): iterations that would take it are launched kernel
        by kernel. Raises DriverError if the device has failed.
        """
        chosen = self._graphs.to_capture()
        self._gates = torch.zeros(max(1, len(chosen)), dtype=torch.int32, device=gates)
        for bucket in chosen[: self.count]:
            self._capture(bucket, passes)
            advance()
        self._late.extend(chosen[self.count :])

    def capture_next(self, passes: Passes) -> bool:
        """Captures one late bucket, of which there must be one, as `capture_first` captures others. Returns whether
        there is another."""
        self._capture(self._late.popleft(), passes)
        return self.has_late

    @property
    def has_late(self) -> bool:
        """True if late buckets have not been captured."""
        return bool(self._late)

    @property
    def count(self) -> int:
        """Returns the number of buckets that `capture_first` processes."""
        return sum(not bucket.is_late for bucket in self._graphs.to_capture())

    @property
    def total(self) -> int:
        """Returns the number of all buckets, late ones too."""
        return len(self._graphs.to_capture())

    def _capture(self, bucket: Bucket, passes: Passes) -> None:
        shape = shape_for(self._plan, bucket, self._capacity, self._max_context)
        gate = self._gates[len(self._captured)].data_ptr() if bucket.gated else None
        keep = partial(self._graphs.captured, bucket)
        captured = self._capturer.capture(passes.make(bucket, shape), passes.stream, gate, keep, passes.wait_until_idle)
        if captured is not None:
            self._captured[bucket] = captured, shape

    def find(self, batch: Batch, shape: PassShape, arriving: Collection[int]) -> CapturedPass | None:
        """Returns the graph for a batch, or None: it is launched kernel by kernel."""
        inputs = self._plan.attention_inputs
        wanted = bucket_of(batch, arriving, shape.groups, inputs, segmented=shape.segments > 0)
        chosen = None if wanted is None else self._graphs.choose(wanted)
        if chosen is None:
            return None
        captured, largest = self._captured[chosen]
        if largest.outputs > self._capacity.logits_rows and masked_rows(batch.rows):
            return None  # the graph overwrites the logits of its first outputs before their masks are there
        return captured if shape.fits(largest) else None
