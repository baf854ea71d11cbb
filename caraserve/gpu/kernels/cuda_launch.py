"""Grid, block and arguments of each call of a raw CUDA kernel, with the exact argument widths that its source declares.

Argument lists are written only here, in sampling.py for its kernels, and in driver/launch.py for the wait for a word.
Addresses are device addresses, strides count numbers.
"""

from dataclasses import dataclass

import numpy as np

from caraserve.core.lora_layout import A_COLUMNS, MAX_RANK, PANEL
from caraserve.cpu.handoff import MOST_SITES
from caraserve.gpu.driver.launch import WARP, Launch, ints, pointers
from caraserve.gpu.kernels.bgmv_work import THREADS
from caraserve.util.units import align_up

BYTES_THREADS = 256  # of kernels that only copy
# words.cu
BLOCK_COPY = np.dtype([(name, np.int64) for name in ("target", "source", "words", "width", "pitch", "spare")])
BLOCKS_PER_SM = 5  # of the BGMV kernels, limited by their registers
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class ActivationRows:
    """Rows of activations in the model's dtype. Rows of inputs are readable up to a multiple of A_COLUMNS, which their
    stride is, too."""

    address: int
    stride: int
    columns: int


@dataclass(frozen=True, slots=True)
class Projections:
    """Columns of up to MOST_SITES projections' outputs in a row, in order."""

    columns: tuple[int, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.columns) > MOST_SITES:
            raise AssertionError(f"{len(self.columns)} sites read the same input; the kernels take up to {MOST_SITES}")

    def are_vectors(self, rows: ActivationRows) -> bool:
        """True if kernels may write four columns at once: each projection begins at a multiple of four, and no other
        has the columns up to the multiple of four after its end, which are overwritten."""
        ends = [start + align_up(width, 4) for start, width in zip(self.columns, self.outputs, strict=True)]
        fit = all(end <= limit for end, limit in zip(ends, (*self.columns[1:], rows.stride), strict=True))
        aligned = all(number % 4 == 0 for number in (rows.stride, *self.columns))
        return fit and aligned and rows.address % _VECTOR_BYTES == 0


@dataclass(frozen=True, slots=True)
class WeightTables:
    """Weights of one layer's projections that read the same input: device addresses of tables [projections, slots]."""

    a: int  # u64 addresses, laid out as in core/lora_layout.py
    b: int
    rank: int  # int32
    scale: int  # fp32
    dtype: int  # int32 [slots]
    vectors: int  # u64 addresses, 0: the adapter has none
    slots: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """Device addresses of a list of items, of the word with their number, and of the groups of rows that they refer
    to."""

    address: int
    count: int
    groups: int


@dataclass(frozen=True, slots=True)
class ShrinkBuffer:
    """fp32 [planes, rows, projections, max_rank], written by shrink and read by expand."""

    address: int
    rows: int
    projections: int
    max_rank: int


def shrink(grid: int, tables: WeightTables, items: WorkList, x: ActivationRows, part: ShrinkBuffer) -> Launch:
    """Returns the launch that computes part = x Aᵀ."""
    _check_rows(x)
    if not 0 < part.max_rank <= MAX_RANK:
        raise AssertionError(f"rank {part.max_rank} is more than the kernels hold")
    table = pointers(tables.a, tables.rank, tables.dtype)
    arguments = (*table, *ints(tables.slots), *pointers(items.address, items.count, items.groups, x.address))
    sizes = ints(part.rows, part.projections, part.max_rank)
    return Launch(
        "bgmv",
        "bgmv_shrink",
        grid,
        THREADS,
        (*arguments, *ints(x.stride, x.columns), *pointers(part.address), *sizes),
    )


def expand(
    grid: int, tables: WeightTables, items: WorkList, part: ShrinkBuffer, y: ActivationRows, projections: Projections
) -> Launch:
    """Returns the launch that computes y += scale · part B, and applies vectors. It must follow shrink's at once."""
    table = pointers(tables.b, tables.rank, tables.dtype, tables.scale, tables.vectors)
    arguments = (*table, *ints(tables.slots), *pointers(items.address, items.count, items.groups, part.address))
    sizes = ints(part.rows, part.projections, part.max_rank)
    target = *pointers(y.address), *ints(y.stride, projections.are_vectors(y)), *_places(projections)
    return Launch("bgmv", "bgmv_expand", grid, THREADS, (*arguments, *sizes, *target), begins_early=True)


def expand_apart(
    grid: int, tables: WeightTables, items: WorkList, part: ShrinkBuffer, sums: ActivationRows, projections: Projections
) -> Launch:
    """Returns the launch that computes sums = part B. `sums`: rows of fp32, in which `projections` have whole panels.
    It must follow shrink's at once."""
    if any(column % PANEL for column in (sums.stride, *projections.columns)):
        raise AssertionError(f"{projections} in {sums} are not whole panels")
    table = pointers(tables.b, tables.rank, tables.dtype)
    arguments = (*table, *ints(tables.slots), *pointers(items.address, items.count, items.groups, part.address))
    sizes = ints(part.rows, part.projections, part.max_rank)
    target = *pointers(sums.address), *ints(sums.stride), *_places(projections)
    return Launch("bgmv", "bgmv_expand_apart", grid, THREADS, (*arguments, *sizes, *target), begins_early=True)


def publish(
    grid: int, order: int, x: ActivationRows, host_stride: int, asked: int, counter: int, outcome: int
) -> Launch:
    """Returns the launch that copies x to host memory, in its own dtype, and then signals the workers. `host_stride`:
    numbers between rows in host memory."""
    _check_rows(x)
    sizes = ints(x.stride, x.columns, host_stride)
    arguments = (*pointers(order, x.address), *sizes, *pointers(asked, counter, outcome))
    return Launch("handoff", "handoff_publish", grid, BYTES_THREADS, arguments)


def wait(order: int, outcome: int, errors: int) -> Launch:
    """Returns the launch that waits until deltas or weights have arrived, or the chunk is aborted."""
    return Launch("handoff", "handoff_wait", 1, WARP, pointers(order, outcome, errors))


def add(
    grid: int,
    order: int,
    outcome: int,
    y: ActivationRows,
    projections: Projections,
    delta_stride: int,
    delta_columns: tuple[int, ...],
) -> Launch:
    """Returns the launch that computes y += deltas and applies the adapter's vectors, if workers computed the deltas.
    `delta_columns`: first column of each projection in a row of deltas."""
    sizes = ints(y.stride, delta_stride, len(projections.outputs), projections.are_vectors(y))
    arguments = (*pointers(order, outcome, y.address), *sizes, *_places(projections), *_of_sites(delta_columns))
    return Launch("handoff", "handoff_add", grid, BYTES_THREADS, arguments)


def scatter_words(copies: int, count: int) -> Launch:
    """Returns the launch of `count` blocks, whose copies (`BLOCK_COPY`) are at `copies` in host memory."""
    return Launch("words", "scatter_words", count, BYTES_THREADS, pointers(copies))


def _places(projections: Projections) -> tuple[np.generic, ...]:
    return *_of_sites(projections.columns), *_of_sites(projections.outputs)


def _of_sites(values: tuple[int, ...]) -> tuple[np.generic, ...]:
    return ints(*values, *(0 for _ in range(MOST_SITES - len(values))))


def _check_rows(rows: ActivationRows) -> None:
    if rows.stride % A_COLUMNS or rows.address % _VECTOR_BYTES or rows.columns > rows.stride:
        raise AssertionError(f"{rows} cannot be read in vectors")
