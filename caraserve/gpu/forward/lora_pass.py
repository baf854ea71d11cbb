"""The LoRA of a pass: BGMV for decoding rows, segments for prompts and for adapters of many decoding rows, hand-offs to
CPU workers.

A batch may have rows of both kinds: each kind has its own rows of `part`, and both kernels read the same device tables.
Each computes x Aᵀ, which may run beside the base product of x, and adds the product with B to what that has written. A
captured pass has a side stream for the first, so that only the second makes it longer. Of few decoding rows that stream
computes both, and the kernel that reads the base product next adds them (kernels/lora_sums.py). Launched kernel by
kernel, the events would take the host longer than they save the device.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.streams import SideStream
from caraserve.gpu.forward.batch import DeviceBatch
from caraserve.gpu.kernels import cuda_launch, work_orders
from caraserve.gpu.kernels.bgmv_work import most_items
from caraserve.gpu.kernels.cuda_launch import BLOCKS_PER_SM, BYTES_THREADS
from caraserve.gpu.kernels.lora import Segments, SiteTables, lora_expand, lora_shrink
from caraserve.gpu.kernels.lora_sums import LoraSums
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.pass_shape import PassShape
from caraserve.gpu.memory.workspace import MOST_SUMS, Workspace
from caraserve.model.dtype import Dtype
from caraserve.model.linear_plan import accumulated
from caraserve.model.plan import DecoderPlan, GroupShape
from caraserve.util.units import ceil_div

_MOST_HOST_BLOCKS = 32  # of the kernels that read or write host memory: enough to keep the link full
_NUMBERS_PER_THREAD = 4

_Issue = Callable[[Stream], None]


@dataclass(frozen=True, slots=True)
class HandOffMemory:
    """The device memory of a lane's hand-offs. A chunk finds its work orders there; nothing else differs between two
    chunks."""

    orders: Tensor  # int64 [most groups, layers, words], as order_writer.py writes them
    host_strides: Sequence[int]  # by group shape: numbers between rows of x in host memory
    outcome: Tensor  # int32 [1], of the hand-off in progress: the LoRA kernels compute only if it is 0
    asked: Tensor  # int64 [workers]: the incarnation last asked
    flags: Tensor  # int32 [2]: publish's counter, 0 between launches; errors, a bit is set when the chunk is aborted

    @classmethod
    def empty(cls, shape: tuple[int, int, int], workers: int, strides: Sequence[int], device: torch.device) -> Self:
        """Allocates it. `shape`: of the work orders, which are zeros: the device computes, and finds no rank."""
        return cls(
            orders=torch.zeros(shape, dtype=torch.int64, device=device),
            host_strides=strides,
            outcome=torch.zeros(1, dtype=torch.int32, device=device),
            asked=torch.zeros(max(1, workers), dtype=torch.int64, device=device),
            flags=torch.zeros(2, dtype=torch.int32, device=device),
        )

    @property
    def counter(self) -> int:
        """Device address of publish's counter."""
        return self.flags.data_ptr()

    @property
    def errors(self) -> int:
        """Device address of the chunk's error word."""
        return self.flags.data_ptr() + self.flags.element_size()

    def order(self, layer: int, group: int) -> int:
        """Returns the device address of a hand-off's work order."""
        across, along, _ = self.orders.stride()
        return self.orders.data_ptr() + self.orders.element_size() * (group * across + layer * along)


@dataclass(frozen=True, slots=True)
class _SharedBuffers:
    """Buffers and columns of all groups of one shape."""

    x: Tensor  # [most tokens, inputs]
    y: Tensor  # [most tokens, outputs of all sites]
    x_rows: cuda_launch.ActivationRows
    y_rows: cuda_launch.ActivationRows
    projections: cuda_launch.Projections
    delta_columns: tuple[int, ...]
    delta_stride: int

    @classmethod
    def of(cls, shape: GroupShape, x: Tensor, y: Tensor) -> "_SharedBuffers":
        widths, columns = shape.widths, tuple(accumulated(shape.widths))[:-1]
        delta_columns, delta_stride = work_orders.delta_columns(widths)
        x_rows, y_rows = (cuda_launch.ActivationRows(rows.data_ptr(), rows.stride(0), rows.shape[1]) for rows in (x, y))
        return cls(x, y, x_rows, y_rows, cuda_launch.Projections(columns, widths), delta_columns, delta_stride)


class LoraLane:
    """The LoRA state that all passes of one lane share."""

    def __init__(
        self, plan: DecoderPlan, batch: DeviceBatch, tables: AdapterTables, workspace: Workspace, device: GpuDevice
    ) -> None:
        self.batch, self.workspace, self.kernels, self.driver = batch, workspace, device.kernels, device.driver
        activations = workspace.activations
        rows = zip(plan.group_shapes, activations.inputs, activations.outputs, strict=True)
        self.max_rank = workspace.parts[0].shape[-1]
        self.grid = BLOCKS_PER_SM * device.kernels.multiprocessors
        self.buffers = [_SharedBuffers.of(shape, x, y) for shape, x, y in rows]  # by group shape
        self.shapes_of_groups = plan.shapes_of_groups
        groups = [(layer, group) for layer, one in enumerate(plan.layers) for group in one.groups]
        places = [(layer, group.index) for layer, group in groups]
        self.triton_tables = {place: tables.for_triton(*place) for place in places}
        self._raw_tables = {place: tables.for_launch(*place) for place in places}
        self._for_decoding: dict[tuple[int, int], tuple[Launch, Launch]] = {}
        self._roles = {(layer, group.index): [site.role for site in group.sites] for layer, group in groups}

    def pass_over(
        self,
        shape: PassShape,
        assist: HandOffMemory | None = None,
        side: SideStream | None = None,
        added_later: Collection[tuple[int, int]] = (),
    ) -> "LoraPass":
        """Returns the LoRA of a pass of this shape. `side`: for what may run beside the base products. `added_later`:
        layer and index of the groups whose product is next read by a kernel that can add its LoRA."""
        return LoraPass(self, shape, assist, side, added_later)

    def for_decoding(self, layer: int, group: int) -> tuple[Launch, Launch]:
        """Returns the shrink and expand launches of rows that decode. They are the same for every batch, and made
        once."""
        if (layer, group) not in self._for_decoding:
            tables, shape = self._raw_tables[layer, group], self.shapes_of_groups[layer][group]
            items, of, part = self.batch.lists.of(shape), self.buffers[shape], self.part(shape)
            self._for_decoding[layer, group] = (
                cuda_launch.shrink(self.grid, tables, items[0], of.x_rows, part),
                cuda_launch.expand(self.grid, tables, items[1], part, of.y_rows, of.projections),
            )
        return self._for_decoding[layer, group]

    def part(self, shape: int) -> cuda_launch.ShrinkBuffer:
        """Returns what shrink writes for the groups of a shape."""
        room = self.workspace.parts[shape]
        return cuda_launch.ShrinkBuffer(room.data_ptr(), *room.shape[1:])

    def apart(self, layer: int, group: int) -> tuple[Launch, LoraSums]:
        """Returns the launch that leaves the sums of rows that decode apart, which follows their shrink, and where."""
        place, shape = (layer, group), self.shapes_of_groups[layer][group]
        of, sums = self.buffers[shape], self.workspace.sums[shape]
        rows = cuda_launch.ActivationRows(sums.data_ptr(), sums.stride(0), sums.shape[1])
        projections = cuda_launch.Projections(of.delta_columns, of.projections.outputs)
        launch = cuda_launch.expand_apart(
            self.grid, self._raw_tables[place], self.batch.lists.of(shape)[1], self.part(shape), rows, projections
        )
        places = {role: (site, of.delta_columns[site]) for site, role in enumerate(self._roles[place])}
        return launch, LoraSums(sums, self.batch.lora_slots, self.triton_tables[place], places)


class LoraPass:
    """Issues the LoRA of one pass. Allocates nothing on the device. A group is named by its layer and its index in
    it."""

    def __init__(
        self,
        lane: LoraLane,
        shape: PassShape,
        assist: HandOffMemory | None,
        side: SideStream | None,
        added_later: Collection[tuple[int, int]],
    ) -> None:
        self._lane, self._shape, self._assist, self._side = lane, shape, assist, side
        cut, count = lane.batch.segments, shape.segments
        self._segments = Segments(cut.order, cut.first[:count], cut.rows[:count], cut.slot[:count])
        few = side is not None and shape.has_items and not shape.segments and shape.tokens <= MOST_SUMS
        self._apart = {place: lane.apart(*place) for place in added_later if few and self._has(*place)}

    def sums(self, layer: int, group: int) -> LoraSums | None:
        """Returns what the kernel that reads a group's product next has to add, None for nothing."""
        apart = self._apart.get((layer, group))
        return None if apart is None else apart[1]

    def begin(self, layer: int, group: int, stream: Stream) -> None:
        """Starts what a group's LoRA computes of x alone, beside what is issued on `stream` until `add`; without a side
        stream that does all."""
        if self._side is None or not self._has(layer, group):
            return

        def issue(beside: Stream) -> None:
            for shrink, _ in self._parts(layer, group):
                shrink(beside)
            if (layer, group) in self._apart:
                launch, _ = self._apart[layer, group]
                self._lane.kernels.launch(self._sized(launch, layer, group, 1), beside)

        self._side.fork(stream, issue)

    def add(self, layer: int, group: int, stream: Stream, gate: Tensor | None = None) -> None:
        """Adds the LoRA of weights on the device, unless a later kernel does (`sums`). `gate`: int32 [1]; nothing is
        added to prompts if it is not 0."""
        if not self._has(layer, group):
            return
        parts = self._parts(layer, group, gate)
        if self._side is None:
            for shrink, expand in parts:
                shrink(stream)
                expand(stream)
            return
        self._side.join(stream)
        if (layer, group) in self._apart:
            return
        *others, (_, last) = parts  # others: at most one, which adds to other rows
        for _, expand in others:
            self._side.fork(stream, expand)
        last(stream)
        for _ in others:
            self._side.join(stream)

    def publish(self, layer: int, group: int, stream: Stream) -> None:
        """Copies x to the workers unless the layer has arrived; see `DecoderPass.publish`."""
        memory, lane = self._hand_off_memory(), self._lane
        shape = lane.shapes_of_groups[layer][group]
        x = lane.buffers[shape].x_rows
        launch = cuda_launch.publish(
            _host_blocks(self._shape.tokens * x.columns),
            memory.order(layer, group),
            x,
            memory.host_strides[shape],
            memory.asked.data_ptr(),
            memory.counter,
            memory.outcome.data_ptr(),
        )
        lane.kernels.launch(launch, stream)

    def add_handed_off(self, layer: int, group: int, stream: Stream) -> None:
        """Waits, and adds the workers' deltas or the LoRA of weights on the device; nothing if neither came."""
        memory, lane = self._hand_off_memory(), self._lane
        order, outcome = memory.order(layer, group), memory.outcome.data_ptr()
        of = lane.buffers[lane.shapes_of_groups[layer][group]]
        lane.kernels.launch(cuda_launch.wait(order, outcome, memory.errors), stream)
        blocks = min(self._shape.tokens, _MOST_HOST_BLOCKS)
        deltas = of.delta_stride, of.delta_columns
        lane.kernels.launch(cuda_launch.add(blocks, order, outcome, of.y_rows, of.projections, *deltas), stream)
        self.add(layer, group, stream, memory.outcome)

    def _hand_off_memory(self) -> HandOffMemory:
        if self._assist is None:
            raise AssertionError("a pass without memory for hand-offs has none")
        return self._assist

    def _has(self, layer: int, group: int) -> bool:
        """Returns whether an adapter of the batch may have a module of a group."""
        return self._shape.has_lora and self._lane.shapes_of_groups[layer][group] in self._shape.groups

    def _parts(self, layer: int, group: int, gate: Tensor | None = None) -> list[tuple[_Issue, _Issue]]:
        """Returns what issues the products with A and with B, of decoding rows and of segments, if there are any."""
        parts = [self._of_items(layer, group)] if self._shape.has_items else []
        if self._shape.segments:
            tables = self._lane.triton_tables[layer, group]
            shape = self._lane.shapes_of_groups[layer][group]
            parts.append(self._of_segments(shape, tables if gate is None else replace(tables, gate=gate)))
        return parts

    def _of_items(self, layer: int, group: int) -> tuple[_Issue, _Issue]:
        kernels, (shrink, expand) = self._lane.kernels, self._lane.for_decoding(layer, group)
        if self._side is not None:
            shrink, expand = (self._sized(one, layer, group, at) for at, one in enumerate((shrink, expand)))
            expand = replace(expand, begins_early=False)  # it follows the base product
        return lambda stream: kernels.launch(shrink, stream), lambda stream: kernels.launch(expand, stream)

    def _sized(self, launch: Launch, layer: int, group: int, which: int) -> Launch:
        """Returns a launch of no more blocks than there are items: others would take multiprocessors from the base
        product for a microsecond. `which`: 0 for shrink, 1 for expand."""
        outputs = self._lane.buffers[self._lane.shapes_of_groups[layer][group]].projections.outputs
        most = most_items(self._shape.decode_rows, self._lane.max_rank, outputs, Dtype.BF16)
        return replace(launch, grid=min(launch.grid, most[which]))

    def _of_segments(self, shape: int, tables: SiteTables) -> tuple[_Issue, _Issue]:
        of, room, run, cut = self._lane.buffers[shape], self._lane.workspace, self._lane.driver.run, self._segments
        part, shrunk, places = room.parts[shape], room.shrunk[shape], (of.projections.columns, of.projections.outputs)
        return (
            lambda stream: run(stream, lambda: lora_shrink(of.x, part, shrunk, cut, tables)),
            lambda stream: run(stream, lambda: lora_expand(of.y, shrunk, cut, tables, *places)),
        )


def _host_blocks(numbers: int) -> int:
    return min(ceil_div(numbers, BYTES_THREADS * _NUMBERS_PER_THREAD), _MOST_HOST_BLOCKS)
