"""Attention of large prompt chunks by FlashInfer, in passes that are launched kernel by kernel.

FlashInfer plans a batch on the host and copies the plan from a pinned buffer without waiting. Here an iteration is
planned before the previous one has begun, so several sets of wrappers take turns, each with buffers of its own, and a
set plans again once the copies of its last plan have run. Contexts are not split, which would depend on the batch.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.batch import ScheduledRow
from caraserve.errors import ConfigError
from caraserve.gpu.driver.api import Driver, Event, Stream
from caraserve.gpu.kernels.attention import NO_WINDOW, PagedCache
from caraserve.gpu.memory.request_state import BLOCK_TOKENS
from caraserve.model.dtype import Dtype
from caraserve.model.spec import ModelSpec
from caraserve.util.units import ceil_div

Ints = NDArray[np.int32]
# Smaller chunks are left to our kernel: FlashInfer has others for them, which would have to be loaded, too.
LEAST_TOKENS = 65  # of a batch's requests on average
DTYPES = (Dtype.BF16, Dtype.F16)
_HEAD_DIMS = (64, 128, 256)  # for which it has kernels for Hopper, besides its older ones
_PARTIAL_BYTES = 1 << 20  # of results of split contexts, of which there are none
_LISTS = 4  # of a plan: ends of queries, ends of blocks, tokens in the last block, contexts


def check_flashinfer(spec: ModelSpec, dtype: Dtype) -> None:
    """Raises ConfigError if FlashInfer is not installed or cannot attend in this model."""
    if find_spec("flashinfer") is None:
        raise ConfigError("--attention-backend flashinfer: it is not installed; pip install 'caraserve[flashinfer]'")
    if dtype not in DTYPES:
        raise ConfigError("--attention-backend flashinfer computes in bfloat16 and float16; give --dtype bfloat16")
    if spec.head_dim not in _HEAD_DIMS:
        raise ConfigError(
            f"--attention-backend flashinfer is for heads of {', '.join(map(str, _HEAD_DIMS))} numbers, and this model "
            f"has {spec.head_dim}; leave it out"
        )


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """Consecutive tokens of a batch that see one context, up to their own position. `slot` is None for rows that decode
    between two chunks: FlashInfer's tokens have no gaps."""

    slot: int | None
    tokens: int
    context: int

    def blocks(self, table: Ints) -> Ints:
        """Returns the KV blocks of the context. Rows that decode see as many tokens of block 0 as there are rows; our
        kernel overwrites their results. `table`: int32 [slots, most blocks of a request]."""
        count = ceil_div(self.context, BLOCK_TOKENS)
        return np.zeros(count, np.int32) if self.slot is None else table[self.slot, :count]


def chunk_requests(rows: Sequence[ScheduledRow]) -> tuple[int, list[ChunkRequest]]:
    """Returns the number of tokens before the first prompt chunk, and the requests from there to the last chunk."""
    first, requests, decoding = 0, list[ChunkRequest](), 0
    for row in rows:
        if row.count == 1:
            decoding += 1
            continue
        if not requests:
            first = decoding
        elif decoding:
            requests.append(ChunkRequest(None, decoding, decoding))
        decoding = 0
        requests.append(ChunkRequest(row.slot, row.count, row.start + row.count))
    return first, requests


@dataclass(frozen=True, slots=True)
class PlannedPrefill:
    """The plan of one batch. `wrappers`: of FlashInfer, by attention window."""

    first: int  # token of the batch
    end: int
    wrappers: Mapping[int, Any]

    def attend(self, q: Tensor, cache: PagedCache, out: Tensor, window: int) -> None:
        """Computes attention of all tokens [first, end), of which our kernel must overwrite those that decode.

        q, out: [tokens of the batch, heads · head dim], rows of q at any stride."""
        dim = cache.keys.shape[3]
        queries, results = (part[self.first : self.end].view(self.end - self.first, -1, dim) for part in (q, out))
        self.wrappers[window].run(queries, (cache.keys, cache.values), out=results, enable_pdl=False)


@dataclass(frozen=True, slots=True)
class _WrapperSet:
    """What one plan occupies until its copies have run. `lists`: int32 [_LISTS, requests + 1], pinned."""

    wrappers: Mapping[int, Any]
    lists: Tensor
    copied: Event


class FlashInferPrefill:
    """Plans batches, with each set of wrappers in turn. Used by the launching thread only."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        table_shape: tuple[int, int],
        sets: int,
        driver: Driver,
        stream: Stream,
        device: torch.device,
        send: Callable[[int, Ints], None],
    ) -> None:
        """`table_shape`: slots, most blocks of a request. `send(address, blocks)` copies to the device, in the order of
        `stream`, before the planned pass."""
        import flashinfer  # only where it is asked for: it takes seconds

        self._spec, self._dtype, self._driver, self._stream, self._send = spec, dtype, driver, stream, send
        self.blocks = torch.zeros(table_shape[0] * table_shape[1], dtype=torch.int32, device=device)
        partial = torch.empty(_PARTIAL_BYTES, dtype=torch.uint8, device=device)
        windows = sorted({window or NO_WINDOW for window in spec.windows})
        most = 2 * table_shape[0]  # a chunk in each slot, and rows that decode between any two

        def new_set() -> _WrapperSet:
            wrappers = {window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(partial, "NHD") for window in windows}
            lists = torch.zeros((_LISTS, most + 1), dtype=torch.int32, pin_memory=device.type == "cuda")
            return _WrapperSet(wrappers, lists, driver.create_event())

        self._sets = deque(new_set() for _ in range(sets))

    @property
    def sets(self) -> int:
        """Returns the number of sets of wrappers, which is that of plans in flight."""
        return len(self._sets)

    def plan(self, rows: Sequence[ScheduledRow], table: Ints) -> PlannedPrefill | None:
        """Plans a batch that no graph serves, or returns None if its chunks are too small. `table`: int32 [slots, most
        blocks of a request]. Waits only if as many earlier plans as there are sets of wrappers have not been copied."""
        first, requests = chunk_requests(rows)
        tokens = sum(request.tokens for request in requests)
        if not requests or tokens < LEAST_TOKENS * len(requests):
            return None
        chosen = self._next_set()
        blocks = [request.blocks(table) for request in requests]
        self._send(self.blocks.data_ptr(), np.concatenate(blocks))
        contexts = np.array([request.context for request in requests])
        lists = chosen.lists.numpy()
        lists[0, 1 : len(requests) + 1] = np.cumsum([request.tokens for request in requests])
        lists[1, 1 : len(requests) + 1] = np.cumsum([len(each) for each in blocks])
        lists[2, : len(requests)] = (contexts - 1) % BLOCK_TOKENS + 1
        lists[3, : len(requests)] = contexts
        self._driver.call(self._stream, lambda: self._plan(chosen, len(requests)))
        self._driver.record(chosen.copied, self._stream)
        return PlannedPrefill(first, first + tokens, chosen.wrappers)

    def _next_set(self) -> _WrapperSet:
        oldest = self._sets[0]
        self._sets.rotate(-1)
        if not self._driver.is_done(oldest.copied):
            self._driver.synchronize(oldest.copied)
        return oldest

    def _plan(self, chosen: _WrapperSet, requests: int) -> None:
        query_ends, block_ends = chosen.lists[0, : requests + 1], chosen.lists[1, : requests + 1]
        in_last, contexts = chosen.lists[2, :requests], chosen.lists[3, :requests]
        blocks, spec = self.blocks[: int(block_ends[-1])], self._spec
        for window, wrapper in chosen.wrappers.items():
            wrapper.plan(
                query_ends,
                block_ends,
                blocks,
                in_last,
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                BLOCK_TOKENS,
                causal=True,
                window_left=-1 if window == NO_WINDOW else window - 1,  # without the query itself
                q_data_type=self._dtype,
                seq_lens=contexts,  # otherwise it would make this list itself, in memory that is not pinned
                disable_split_kv=True,
            )
