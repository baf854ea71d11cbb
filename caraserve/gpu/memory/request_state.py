"""The device's state between iterations: keys and values, and each request slot's KV blocks, tokens and sampling
parameters.

Keys and values are a view of the pool's first bytes, block after block: `[block, layer, 2, block tokens, kv heads, head
dim]`. The pool decides how many of the blocks may be used.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.batch import Batch, BlockGrant, SlotStart
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.kernels.attention import PagedCache
from caraserve.gpu.memory.staging_ring import StagingRing
from caraserve.model.spec import ModelSpec
from caraserve.util.units import ceil_div

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The arrays on the device. `caches`: one per layer."""

    caches: tuple[PagedCache, ...]
    block_table: Tensor  # int32 [slots, most blocks of a request]
    history: Tensor  # int32 [slots, positions + 1]
    sampling: Tensor  # uint8 [slots, bytes of SLOT_SAMPLING]


def block_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes of one KV block over all layers."""
    return spec.kv_bytes_per_token(dtype.itemsize) * BLOCK_TOKENS


def make_state(spec: ModelSpec, dtype: torch.dtype, pool: Tensor, slots: int, max_context: int) -> DeviceState:
    """Allocates the arrays; keys and values are views of `pool`, uint8 [bytes], at a multiple of 16."""
    device = pool.device
    block_table = torch.zeros((slots, ceil_div(max_context, BLOCK_TOKENS)), dtype=torch.int32, device=device)
    row = spec.kv_heads * spec.head_dim  # numbers in one token's keys
    half = BLOCK_TOKENS * row
    block = 2 * spec.layers * half
    numbers = pool[: pool.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    shape = (numbers.numel() // block, BLOCK_TOKENS, spec.kv_heads, spec.head_dim)
    strides = (block, row, spec.head_dim, 1)
    halves = [numbers.as_strided(shape, strides, index * half) for index in range(2 * spec.layers)]
    caches = [PagedCache(keys, values, block_table) for keys, values in zip(halves[::2], halves[1::2], strict=True)]
    return DeviceState(
        tuple(caches),
        block_table,
        torch.zeros((slots, max_context + 1), dtype=torch.int32, device=device),
        torch.zeros((slots, SLOT_SAMPLING.itemsize), dtype=torch.uint8, device=device),
    )


class RequestSlots:
    """Writes request slots in the compute lane's order; other lanes wait for that lane. Used by the launching thread
    only."""

    def __init__(self, state: DeviceState, ring: StagingRing) -> None:
        self._state, self._ring = state, ring
        self._sampling = np.zeros(state.sampling.shape[0], SLOT_SAMPLING)

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """Prompt lengths, int64 [slots]."""
        tokens: NDArray[np.int64] = self._sampling["prompt_tokens"]
        return tokens

    def apply(self, batch: Batch) -> None:
        """Writes the slots of requests that start with this batch, and the KV blocks that it grants."""
        for start in batch.starts:
            self._start(start)
        for grant in batch.grants:
            self._grant(grant)

    def _start(self, start: SlotStart) -> None:
        history, table = self._state.history, self._state.sampling
        tokens = np.array(start.token_ids, np.int32)
        self._ring.send(history[start.slot].data_ptr(), tokens, Lane.COMPUTE)
        write_sampling(self._sampling, start.slot, start.sampling)
        record = self._sampling[start.slot : start.slot + 1]
        self._ring.send(table[start.slot].data_ptr(), record, Lane.COMPUTE)

    def _grant(self, grant: BlockGrant) -> None:
        row = self._state.block_table[grant.slot]
        place = row.data_ptr() + row.element_size() * grant.first
        self._ring.send(place, np.array(grant.blocks, np.int32), Lane.COMPUTE)
