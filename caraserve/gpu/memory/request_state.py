"""The device's state between iterations: keys and values, and each request slot's KV blocks, tokens, sampling
parameters, and the state of delta nets.

Keys and values are a view of the pool's first bytes, block after block, and in a block layer after layer: `[2, block
tokens, kv heads, head dim]`. The pool decides how many of the blocks may be used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.batch import Batch, BlockGrant, ScheduledRow, SlotStart
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from caraserve.gpu.kernels.delta_net import DeltaNetState
from caraserve.gpu.kernels.paged_cache import PagedCache
from caraserve.gpu.memory.staging_ring import StagingRing
from caraserve.model.plan import DecoderPlan, DeltaNet
from caraserve.util.units import ceil_div

BLOCK_TOKENS = 16
_STEP_BYTES = 4 << 20  # of vectors in fp32, converted and sent at a time


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The arrays on the device."""

    caches: tuple[PagedCache | None, ...]  # by layer; None: without attention
    block_table: Tensor  # int32 [slots, most blocks of a request]
    history: Tensor  # int32 [slots, positions + 1]; a negative token stands for a vector
    sampling: Tensor  # uint8 [slots, bytes of SLOT_SAMPLING]
    delta_nets: Mapping[int, DeltaNetState] = field(default_factory=dict)  # by layer


def block_bytes(plan: DecoderPlan, dtype: torch.dtype) -> int:
    """Returns the bytes of one KV block over all layers."""
    return plan.kv_bytes_per_token(dtype.itemsize) * BLOCK_TOKENS


def slot_state_bytes(plan: DecoderPlan, dtype: torch.dtype) -> int:
    """Returns the bytes of one request slot's delta nets."""
    matrices = sum(4 * net.value_heads * net.key_width * net.value_width for net in plan.delta_nets.values())
    return matrices + sum(dtype.itemsize * _kept(net) * net.channels for net in plan.delta_nets.values())


def make_delta_nets(
    plan: DecoderPlan, dtype: torch.dtype, device: torch.device, slots: int
) -> dict[int, DeltaNetState]:
    """Allocates the states of all request slots, by layer."""

    def made(net: DeltaNet) -> DeltaNetState:
        inputs = torch.zeros((slots, _kept(net), net.channels), dtype=dtype, device=device)
        shape = slots, net.value_heads, net.key_width, net.value_width
        return DeltaNetState(inputs, torch.zeros(shape, dtype=torch.float32, device=device))

    return {layer: made(net) for layer, net in plan.delta_nets.items()}


def _kept(net: DeltaNet) -> int:
    """Returns how many inputs of the convolution are kept."""
    return max(1, net.kernel - 1)


def make_state(
    plan: DecoderPlan,
    dtype: torch.dtype,
    pool: Tensor,
    slots: int,
    max_context: int,
    delta_nets: Mapping[int, DeltaNetState] | None = None,
) -> DeviceState:
    """Allocates the arrays; keys and values are views of `pool`, uint8 [bytes], at a multiple of 16."""
    device = pool.device
    block_table = torch.zeros((slots, ceil_div(max_context, BLOCK_TOKENS)), dtype=torch.int32, device=device)
    block = plan.kv_bytes_per_token(1) * BLOCK_TOKENS  # in numbers
    numbers = pool[: pool.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    caches: list[PagedCache | None] = []
    start = 0
    for layer in plan.layers:
        attention = layer.attention
        if attention is None:
            caches.append(None)
            continue
        row = attention.kv_heads * attention.head_dim  # numbers in one token's keys
        shape = (numbers.numel() // block, BLOCK_TOKENS, attention.kv_heads, attention.head_dim)
        strides = (block, row, attention.head_dim, 1)
        keys, values = (numbers.as_strided(shape, strides, start + half * BLOCK_TOKENS * row) for half in range(2))
        caches.append(PagedCache(keys, values, block_table))
        start += 2 * BLOCK_TOKENS * row
    return DeviceState(
        tuple(caches),
        block_table,
        torch.zeros((slots, max_context + 1), dtype=torch.int32, device=device),
        torch.zeros((slots, SLOT_SAMPLING.itemsize), dtype=torch.uint8, device=device),
        delta_nets or {},
    )


@dataclass(frozen=True, slots=True)
class _PromptVectors:
    """The tokens that a request starts with, and the vectors that some of them stand for: token -1 - i is vector i."""

    token_ids: NDArray[np.int32]
    values: NDArray[np.float32]  # [vectors, hidden]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Device addresses of a matrix with a row for each request slot: a view of a tensor would take 3 µs to make."""

    matrix: Tensor  # kept, as its memory is
    address: int
    row_bytes: int
    item_bytes: int

    @classmethod
    def of(cls, matrix: Tensor) -> "_Rows":
        return cls(matrix, matrix.data_ptr(), matrix.element_size() * matrix.stride(0), matrix.element_size())

    def at(self, slot: int, column: int = 0) -> int:
        return self.address + self.row_bytes * slot + self.item_bytes * column


class RequestSlots:
    """Writes request slots in the compute lane's order; other lanes wait for that lane. Used by the launching thread
    only."""

    def __init__(self, state: DeviceState, ring: StagingRing) -> None:
        self._ring = ring
        self._history, self._table, self._blocks = map(_Rows.of, (state.history, state.sampling, state.block_table))
        self._sampling = np.zeros(state.sampling.shape[0], SLOT_SAMPLING)
        self._vectors: dict[int, _PromptVectors] = {}  # by request slot

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """Prompt lengths, int64 [slots]."""
        tokens: NDArray[np.int64] = self._sampling["prompt_tokens"]
        return tokens

    def apply(self, batch: Batch) -> None:
        """Writes the slots of requests that start with this batch, and the KV blocks that it grants; they are issued
        with the batch, by the next `flush` of the ring."""
        self._ring.flush()  # the same slots, if the previous batch failed before it was issued
        for start in batch.starts:
            self._start(start)
        for grant in batch.grants:
            self._grant(grant)

    def send_vectors(self, rows: Sequence[ScheduledRow], hidden: Tensor, ring: StagingRing) -> None:
        """Writes the vectors among the tokens of `rows` to their places in `hidden`, [tokens, hidden] of a lane, by the
        lane's ring. To be called before the pass is issued, whose embedding leaves these places as they are: vectors
        need no device memory of their own, and a captured pass finds them as well."""
        if not self._vectors:
            return
        first = 0
        for row in rows:
            if row.slot in self._vectors:
                self._send_row(self._vectors[row.slot], row, hidden[first : first + row.count], ring)
            first += row.count

    def free_vectors(self, slot: int) -> None:
        """Frees the vectors of the request in `slot`, which needs them no more."""
        self._vectors.pop(slot, None)

    def _send_row(self, vectors: _PromptVectors, row: ScheduledRow, hidden: Tensor, ring: StagingRing) -> None:
        tokens, width = vectors.token_ids[row.start : row.start + row.count], hidden.shape[1]
        places = np.flatnonzero(tokens < 0)
        step = max(1, _STEP_BYTES // (4 * width))
        for start in range(0, row.count if len(places) else 0, step):
            held = places[(places >= start) & (places < start + step)]
            if len(held):
                # One copy, with zeros between vectors: the embedding overwrites the places of tokens.
                piece = np.zeros((int(held[-1]) + 1 - start, width), np.float32)
                piece[held - start] = vectors.values[-1 - tokens[held]]
                converted = torch.from_numpy(piece).to(hidden.dtype).view(torch.uint8)
                ring.send(hidden[start].data_ptr(), converted.numpy())

    def _start(self, start: SlotStart) -> None:
        tokens = np.array(start.token_ids, np.int32)
        self._ring.send(self._history.at(start.slot), tokens)
        self.free_vectors(start.slot)
        if start.prompt_embeds is not None:
            self._vectors[start.slot] = _PromptVectors(tokens, start.prompt_embeds)
        write_sampling(self._sampling, start.slot, start.sampling)
        record = self._sampling[start.slot : start.slot + 1]
        self._ring.send(self._table.at(start.slot), record)

    def _grant(self, grant: BlockGrant) -> None:
        self._ring.send(self._blocks.at(grant.slot, grant.first), np.array(grant.blocks, np.int32))
