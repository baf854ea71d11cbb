"""Random adapters in device memory, batches that use them, and the expected results in fp64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, ALIGN_BYTES, PANEL, RANK_STEP
from caraserve.gpu.kernels import cuda_launch
from caraserve.gpu.kernels.bgmv_work import PLANES, adapter_items, plan_items
from caraserve.gpu.kernels.lora import PLANES as SEGMENT_PLANES
from caraserve.gpu.kernels.lora import Segments, SiteTables, cut_segments, lora_expand, lora_shrink
from caraserve.gpu.kernels.lora_sums import LoraSums
from caraserve.gpu.kernels.norms import add_and_norm
from caraserve.gpu.kernels.work_orders import delta_columns
from caraserve.gpu.weights import TORCH_DTYPES
from caraserve.model.dtype import Dtype
from caraserve.util.units import align_up
from scripts.laboratory.gpu.accelerator import Accelerator

# Allowed error relative to max(1, |value|): the kernels add in fp32 and round the result once; those of segments round
# what shrink has made, too.
TOLERANCE = {Dtype.F32: 3e-5, Dtype.BF16: 2.0**-8, Dtype.F16: 2.0**-10}
SEGMENTS_TOLERANCE = {Dtype.F32: 1e-4, Dtype.BF16: 2.0**-6, Dtype.F16: 2.0**-9}
_NOISE = 0.03  # standard deviation of weights: what adapters add to the output stays near 1
_SCALE = 0.25


@dataclass(frozen=True, slots=True)
class Site:
    """Projections that read the same input, and the rank of each adapter in each of them."""

    inputs: int  # width of the common input
    outputs: tuple[int, ...]  # output width of each projection
    ranks: Sequence[Sequence[int]]  # [projections][slots]; slot 0 is the base model's
    dtypes: Sequence[Dtype]  # [slots]

    @property
    def slots(self) -> int:
        return len(self.dtypes)

    @property
    def columns(self) -> tuple[int, ...]:
        """The first column of each projection in a row of outputs, each a multiple of four."""
        ends = np.cumsum([align_up(width, 4) for width in self.outputs]).tolist()
        return (0, *ends[:-1])

    @property
    def width(self) -> int:
        return align_up(self.columns[-1] + self.outputs[-1], A_COLUMNS)

    def shapes(self, projection: int, slot: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Returns the stored shapes of A [rank, inputs] and B [panels, rank, PANEL], padded as lora_layout.py says."""
        rank = align_up(self.ranks[projection][slot], RANK_STEP)
        panels = align_up(self.outputs[projection], PANEL) // PANEL
        return (rank, align_up(self.inputs, A_COLUMNS)), (panels, rank, PANEL)

    def num_bytes(self, row_slots: Sequence[int]) -> int:
        """Returns how many bytes of adapter weights a batch reads; rows with equal slots share one read."""
        total = 0
        for slot in set(row_slots):
            for projection in range(len(self.outputs)):
                a, b = self.shapes(projection, slot)
                total += (int(np.prod(a)) + int(np.prod(b))) * self.dtypes[slot].itemsize
        return total


class Adapters:
    """Random matrices A and B of one or more layers in one memory pool.

    When the pool is too small for all of them, matrices share memory: the pool is used again from its start.
    """

    def __init__(self, acc: Accelerator, site: Site, layers: int, pool_bytes: int, seed: int = 0) -> None:
        self.site, self._acc = site, acc
        self._generator = acc.generator(seed)
        shape = layers, len(site.outputs), site.slots
        a, b = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        needed = layers * site.num_bytes(range(site.slots)) + 2 * len(site.outputs) * site.slots * layers * ALIGN_BYTES
        self._pool = torch.zeros(min(needed, pool_bytes) + ALIGN_BYTES, dtype=torch.uint8, device=acc.place)
        self._base = align_up(self._pool.data_ptr(), ALIGN_BYTES)
        self._at, self._is_full = 0, False
        for layer in range(layers):
            for projection in range(len(site.outputs)):
                for slot in range(site.slots):
                    if site.ranks[projection][slot]:
                        a[layer, projection, slot], b[layer, projection, slot] = self._place(projection, slot)
        self.a, self.b = (torch.from_numpy(table).to(acc.place) for table in (a, b))
        ranks = np.array([[align_up(rank, RANK_STEP) for rank in of_slots] for of_slots in site.ranks], np.int32)
        self.rank = torch.from_numpy(ranks).to(acc.place)
        self.scale = torch.full((len(site.outputs), site.slots), _SCALE, device=acc.place)
        self.dtype = torch.tensor([dtype.value for dtype in site.dtypes], dtype=torch.int32, device=acc.place)
        self.vectors = torch.zeros_like(self.a[0])  # of no adapter
        self._addresses = a, b

    def tables(self, layer: int) -> cuda_launch.WeightTables:
        """Returns the layer's weights as the raw CUDA kernels take them."""
        parts = self.a[layer], self.b[layer], self.rank, self.scale, self.dtype, self.vectors
        a, b, rank, scale, dtype, vectors = (part.data_ptr() for part in parts)
        return cuda_launch.WeightTables(a, b, rank, scale, dtype, vectors, self.site.slots)

    def site_tables(self, layer: int) -> SiteTables:
        """Returns the layer's weights as the Triton kernels take them."""
        return SiteTables(self.a[layer], self.b[layer], self.rank, self.scale, self.dtype, self.vectors)

    def add_to(self, y: Tensor, x: Tensor, row_slots: Sequence[int], layer: int) -> Tensor:
        """Returns y plus what the adapters add to it, float64, computed row by row without the kernels."""
        result, exact = y.to(torch.float64), x[:, : self.site.inputs].to(torch.float64)
        for row, slot in enumerate(row_slots):
            for projection, (column, width) in enumerate(zip(self.site.columns, self.site.outputs, strict=True)):
                if self.site.ranks[projection][slot]:
                    a, b = self._matrices(layer, projection, slot)
                    result[row, column : column + width] += _SCALE * (exact[row] @ a.T @ b)
        return result

    def _matrices(self, layer: int, projection: int, slot: int) -> tuple[Tensor, Tensor]:
        """Returns A [rank, inputs] and B [rank, outputs] without padding columns, float64."""
        a_shape, b_shape = self.site.shapes(projection, slot)
        a, b = (int(addresses[layer, projection, slot]) - self._base for addresses in self._addresses)
        first = self._view(a, a_shape, self.site.dtypes[slot]).to(torch.float64)[:, : self.site.inputs]
        second = self._view(b, b_shape, self.site.dtypes[slot]).to(torch.float64).transpose(0, 1)
        return first, second.reshape(b_shape[1], -1)[:, : self.site.outputs[projection]]

    def _place(self, projection: int, slot: int) -> tuple[int, int]:
        """Returns the addresses of a new A and B: random weights, with zeros as padding.

        Once the pool is full, memory is used a second time and keeps the values that it has.
        """
        (a_shape, b_shape), dtype = self.site.shapes(projection, slot), self.site.dtypes[slot]
        rank, outputs = self.site.ranks[projection][slot], self.site.outputs[projection]
        shapes: tuple[tuple[int, ...], ...] = (a_shape, b_shape)
        places = []
        for shape in shapes:
            size = align_up(int(np.prod(shape)) * dtype.itemsize, ALIGN_BYTES)
            if self._at + size > self._pool.numel() - ALIGN_BYTES:
                self._at, self._is_full = 0, True
            places.append(self._at)
            self._at += size
        if not self._is_full:
            a, b = (self._view(place, shape, dtype) for place, shape in zip(places, shapes, strict=True))
            for matrix in (a, b):
                values = self._acc.random(self._generator, *matrix.shape, dtype=torch.float32)
                matrix.copy_(values * _NOISE)
            a[rank:], a[:, self.site.inputs :], b[:, rank:] = 0, 0, 0
            if outputs % PANEL:
                b[-1, :, outputs % PANEL :] = 0
        return self._base + places[0], self._base + places[1]

    def _view(self, place: int, shape: tuple[int, ...], dtype: Dtype) -> Tensor:
        start = place + self._base - self._pool.data_ptr()
        size = int(np.prod(shape)) * dtype.itemsize
        return self._pool[start : start + size].view(TORCH_DTYPES[dtype]).view(shape)


class DecodingRows:
    """A batch of decoding rows: activations, work lists and buffers for the raw CUDA kernels."""

    def __init__(self, acc: Accelerator, adapters: Adapters, row_slots: Sequence[int], seed: int = 1) -> None:
        """Creates random activations, with NaN in all padding."""
        self._acc, self.adapters, self.row_slots = acc, adapters, list(row_slots)
        site, rows, generator = adapters.site, len(self.row_slots), acc.generator(seed)
        self.x = acc.random(generator, rows, align_up(site.inputs, A_COLUMNS))
        self.x[:, site.inputs :] = torch.nan  # it shows up in the results if a kernel adds padding
        self.y = torch.full((rows, site.width), torch.nan, dtype=acc.torch_dtype, device=acc.place)
        for column, width in zip(site.columns, site.outputs, strict=True):
            self.y[:, column : column + width] = acc.random(generator, rows, width)
        self.max_rank = max(RANK_STEP, *(align_up(max(ranks), RANK_STEP) for ranks in site.ranks))
        self.part = torch.full(
            (PLANES, rows, len(site.outputs), self.max_rank), torch.nan, dtype=torch.float32, device=acc.place
        )
        by_slot = [
            adapter_items(slot, [ranks[slot] for ranks in site.ranks], dtype, site.outputs)
            for slot, dtype in enumerate(site.dtypes)
        ]
        plan = plan_items(np.array(self.row_slots, np.int32), by_slot)
        self._lists = [_on(acc, part) for part in (plan.shrink, plan.expand, plan.groups)]
        self._counts = _on(acc, np.array([len(plan.shrink), len(plan.expand)], np.int32))

    def issue(self, layer: int) -> None:
        """Launches the shrink kernel and the expand kernel of one layer."""
        site, given = self.adapters.site, self._shrink(layer)
        y = cuda_launch.ActivationRows(self.y.data_ptr(), self.y.stride(0), site.width)
        self._acc.launch(cuda_launch.expand(*given, y, cuda_launch.Projections(site.columns, site.outputs)))

    def added_by_norm(self, layer: int) -> Tensor:
        """Launches the shrink kernel and the expand kernel that leaves its sums apart, and returns what the norm kernel
        reads of the current y once it has added them, [rows, outputs of all projections]."""
        site, tables = self.adapters.site, self.adapters.site_tables(layer)
        columns, stride = delta_columns(site.outputs)
        sums = torch.full((len(self.row_slots), stride), torch.nan, device=self._acc.place)
        target = cuda_launch.ActivationRows(sums.data_ptr(), stride, stride)
        places = cuda_launch.Projections(columns, site.outputs)
        self._acc.settle()  # the sums' memory was filled on another stream
        self._acc.launch(cuda_launch.expand_apart(*self._shrink(layer), target, places))
        slots, added = _on(self._acc, np.array(self.row_slots, np.int32)), []
        for projection, (column, width) in enumerate(zip(site.columns, site.outputs, strict=True)):
            one = slice(projection, projection + 1)
            tables_of_one = replace(tables, rank=tables.rank[one], scale=tables.scale[one], vectors=tables.vectors[one])
            lora = LoraSums(sums[:, columns[projection] :], slots, tables_of_one, {"out": (0, 0)})
            y, out = self.y[:, column : column + width], torch.zeros_like(self.y[:, column : column + width])
            self._acc.settle()
            self._acc.run(partial(add_and_norm, out, y, None, None, lora=lora))
            added.append(out)
        self._acc.settle()
        return torch.cat(added, dim=1)

    def _shrink(
        self, layer: int
    ) -> tuple[int, cuda_launch.WeightTables, cuda_launch.WorkList, cuda_launch.ShrinkBuffer]:
        """Launches the shrink kernel; returns what the launches of expand begin with."""
        shrink, expand, groups = (part.data_ptr() for part in self._lists)
        counts, site, tables = self._counts.data_ptr(), self.adapters.site, self.adapters.tables(layer)
        part = cuda_launch.ShrinkBuffer(self.part.data_ptr(), len(self.row_slots), len(site.outputs), self.max_rank)
        x = cuda_launch.ActivationRows(self.x.data_ptr(), self.x.stride(0), site.inputs)
        grid = cuda_launch.BLOCKS_PER_SM * self._acc.device.kernels.multiprocessors
        self._acc.launch(cuda_launch.shrink(grid, tables, cuda_launch.WorkList(shrink, counts, groups), x, part))
        return grid, tables, cuda_launch.WorkList(expand, counts + 4, groups), part

    def results(self) -> Tensor:
        """Returns the current y without padding, [rows, outputs of all projections]."""
        return self._of_projections(self.y)

    def expected(self, layer: int) -> Tensor:
        """Returns what `issue(layer)` should make of the current y: float64 [rows, outputs of all projections]."""
        return self._of_projections(self.adapters.add_to(self.y, self.x, self.row_slots, layer))

    def _of_projections(self, y: Tensor) -> Tensor:
        site = self.adapters.site
        spans = zip(site.columns, site.outputs, strict=True)
        return torch.cat([y[:, column : column + width] for column, width in spans], dim=1)


class SegmentedRows:
    """Rows of few adapters, as prompts and decode batches of one adapter have them: segments for the Triton kernels."""

    def __init__(
        self, acc: Accelerator, adapters: Adapters, row_slots: Sequence[int], x: Tensor, y: Tensor, max_rank: int
    ) -> None:
        """x: [rows, inputs]; y: [rows, outputs], changed in place; `max_rank`: of the buffers."""
        self._acc, self._adapters, self._x, self._y = acc, adapters, x, y
        order, first, rows, slot = (_on(acc, part) for part in cut_segments(np.array(row_slots, np.int32)))
        self._segments = Segments(order, first, rows, slot)
        shape = (SEGMENT_PLANES, len(row_slots), len(adapters.site.outputs), max_rank)
        self._part = torch.full(shape, torch.nan, dtype=torch.float32, device=acc.place)
        self._shrunk = torch.full(shape[1:], torch.nan, dtype=x.dtype, device=acc.place)

    def issue(self, layer: int) -> None:
        """Launches the kernels of one layer; nothing if no row has an adapter."""
        site, tables = self._adapters.site, self._adapters.site_tables(layer)

        def launch() -> None:
            lora_shrink(self._x, self._part, self._shrunk, self._segments, tables)
            lora_expand(self._y, self._shrunk, self._segments, tables, site.columns, site.outputs)

        if len(self._segments.first):
            self._acc.run(launch)


def _on(acc: Accelerator, array: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(acc.place)
