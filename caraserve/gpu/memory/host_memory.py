"""The host memory that the device can access, in one shared region: small copies, results, masks, hand-offs to CPU
workers, and the arena of adapter images.

The region is created before CUDA starts, because the workers' fork server inherits it; the device registers it later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caraserve.core.lora_layout import A_COLUMNS
from caraserve.cpu import handoff
from caraserve.cpu.shared_memory import PAGE_BYTES, SharedRegion
from caraserve.gpu.driver.api import WORD_BYTES
from caraserve.gpu.kernels.work_orders import delta_columns
from caraserve.gpu.memory.sync_slots import sync_slot_bytes
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan, GroupShape
from caraserve.util.units import align_up

SYNC_SLOTS = 2  # assisted chunks in flight
ASSISTED_CHUNK_TOKENS = 128  # a larger GEMM's tiles hold multiprocessors for so long that decoding slows down


@dataclass(frozen=True, slots=True)
class HandOffBuffers:
    """Memory of one assisted chunk: its sync slot, x, deltas, and x as workers widen it to fp32. Offsets into the
    region."""

    sync_slot: int
    x: int
    deltas: int
    wide_x: int


class HostRegion:
    """The whole region. Its pages use no memory until they are written or registered."""

    def __init__(
        self,
        plan: DecoderPlan,
        dtype: Dtype,
        workers: int,
        ring_bytes: Sequence[int],
        result_bytes: int,
        results: int,
        mask_bytes: Sequence[int],
        arena_bytes: int,
    ):
        """`dtype`: in which the device computes. `result_bytes`: size of each of `results` blocks. `ring_bytes`,
        `mask_bytes`: by lane, of iterations and of assisted prefills."""
        self.block_bytes = align_up(handoff.block_bytes(1), PAGE_BYTES)
        hand_offs = len(plan.layers) * plan.most_groups
        x_sizes = x_bytes(plan, dtype), x_bytes(plan, Dtype.F32) * (dtype is not Dtype.F32)
        slot_sizes = (sync_slot_bytes(hand_offs), x_sizes[0], delta_bytes(plan, dtype), x_sizes[1])
        sizes = slot_sizes if workers else (0, 0, 0, 0)
        parts = [PAGE_BYTES, *ring_bytes, *[result_bytes] * results, *mask_bytes, workers * self.block_bytes]
        parts += [*sizes * SYNC_SLOTS, arena_bytes]
        self.region = SharedRegion(sum(align_up(size, PAGE_BYTES) for size in parts))
        self.link_word = self.region.carve(WORD_BYTES).view(np.uint32)  # of an emulated link
        self.rings = [self.region.carve(size) for size in ring_bytes]
        self.results = [self.region.carve(result_bytes) for _ in range(results)]
        self.masks = [self.region.carve(size) for size in mask_bytes]
        self.blocks = self.region.carve(workers * self.block_bytes)
        self.hand_off_buffers = [self._carve(sizes) for _ in range(SYNC_SLOTS)] if workers else []
        self.arena = self.region.carve(arena_bytes)

    def _carve(self, sizes: tuple[int, int, int, int]) -> HandOffBuffers:
        return HandOffBuffers(*(self.region.offset(int(self.region.carve(size).ctypes.data)) for size in sizes))


def x_stride(shape: GroupShape) -> int:
    """Returns the numbers between two rows of x in the region."""
    return align_up(shape.inputs, A_COLUMNS)


def x_bytes(plan: DecoderPlan, dtype: Dtype) -> int:
    """Returns the bytes of the widest x of a chunk."""
    return dtype.itemsize * ASSISTED_CHUNK_TOKENS * max(map(x_stride, plan.group_shapes))


def delta_bytes(plan: DecoderPlan, dtype: Dtype) -> int:
    """Returns the bytes of the widest deltas of a chunk."""
    return dtype.itemsize * ASSISTED_CHUNK_TOKENS * max(delta_columns(shape.widths)[1] for shape in plan.group_shapes)
