"""The interface between the engine and a device: running batches, copying adapters, sizing the KV cache.

`cpu/backend.py` (Numba) and `gpu/backend.py` (CUDA) implement it. No torch; NumPy arrays only for bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import Batch, StepResult
from caraserve.core.lora_layout import AdapterSpec, HostAdapter


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Device memory that KV blocks and adapters share. The engine keeps their total within `num_bytes`. The backend
    picks addresses and compacts by moving adapters, so only totals matter."""

    num_bytes: int
    block_bytes: int  # of a KV block
    granule_bytes: int  # an adapter takes a multiple of it, and so do all KV blocks together
    adapter_bytes: int  # the most that adapters may take together
    least_blocks: int  # KV blocks that adapters never take


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a backend, fixed when it starts; all memory for them is allocated by then."""

    num_blocks: int  # KV blocks; where memory is shared, their number at the start
    block_tokens: int  # tokens in a KV block
    num_slots: int  # requests that can run at a time
    adapter_slots: int  # entries of the device adapter table, the base model's slot 0 included
    max_step_tokens: int  # tokens in one iteration
    max_context: int  # positions of one request
    embedding_size: int  # numbers in an embedding, and in a vector of `SlotStart.prompt_embeds`
    # Memory of each request slot for a state that its tokens change one after another, beside their keys and values. A
    # row at position 0 begins it; no row can continue from KV blocks alone.
    state_bytes: int = 0
    shared: SharedMemory | None = None  # None: KV blocks and adapters have memory of their own
    assisted_batches: int = 0  # maximum of concurrent assisted prefills; 0: CPU workers help only within iterations
    assisted_chunk_tokens: int | None = None  # computed at a time in an assisted prefill of a side batch
    streamed_batches: int = 0  # maximum of concurrent streamed prefills; 0: a prefill waits for the whole download
    draft_tokens: int = 0  # maximum of drafts in an iteration; 0: rows cannot have any


class Backend(Protocol):
    """A device that runs batches in launch order and copies adapters meanwhile.

    It calls callbacks on a thread of its own; they must only pass their argument to the event loop.
    """

    limits: Limits
    host_memory: NDArray[np.uint8]  # for the host cache; shared with CPU workers, and copied from at full speed

    def launch(self, plan: Batch, done: Callable[[StepResult | Exception], None]) -> None:
        """Queues one batch and returns at once. `done` is called exactly once: for iterations in launch order, for a
        side batch whenever it ends. A side batch begins after the iterations launched before it, and later ones
        overtake it. Starts and grants of all batches take effect in launch order."""

    def load_adapter(
        self,
        adapter: HostAdapter,
        slot: int,
        done: Callable[[Exception | None], None],
        group_ends: Sequence[int] = (),
        layers: int | None = None,
        first_layer: int = 0,
    ) -> None:
        """Binds an adapter to `slot` and copies it to the device beside running iterations, one group of layers after
        another: groups end before the layers `group_ends`, and with the last layer. The copy begins with the group that
        begins at `first_layer`, and those before it come last. `layers`: the number of layers that are in
        `adapter.data` so far, to which `extend_load` adds; None: all. Until all are there, only streamed prefills may
        use the slot, and `first_layer` is 0.

        Batches launched from now on may use the slot. A batch that reaches a layer before its weights have arrived
        waits for them. For a row with `assist`, CPU workers compute the layer's LoRA from `adapter.data` instead.
        `adapter.data` must lie in `host_memory` and must not change until `done`.
        """

    def extend_load(self, slot: int, layers: int) -> None:
        """Continues the load to `slot` as far as layer `layers`: so many layers are in host memory now."""

    def break_load(self, slot: int, cause: Exception) -> None:
        """Ends a load whose other layers will never be in host memory. Streamed prefills that wait for them end with
        `needs_retry`. Then `done` of the load is called with `cause`, unless it failed with another error before."""

    def recall(self, slot: int) -> None:
        """Cancels the streamed prefill of request slot `slot`. It ends with `needs_retry` if it waits for layers that
        are not in host memory, and with its result otherwise."""

    def device_bytes(self, spec: AdapterSpec) -> int:
        """Returns the bytes that an adapter takes on the device. Raises AdapterRejected for one that can never fit."""

    def unload_adapter(self, slot: int) -> None:
        """Unbinds `slot` once every batch launched so far has run, and frees its memory."""

    def release_vectors(self, slot: int) -> None:
        """Frees the vectors that the request in request slot `slot` started with, once every batch launched so far has
        run. The request has ended or starts again with them."""

    def resize_kv(self, blocks: int, done: Callable[[Exception | None], None]) -> None:
        """Sets the KV blocks to [0, blocks), where memory is shared. A smaller number applies to batches launched from
        now on, and adapters may take the memory at once. A larger one applies from `done(None)` on, because adapters
        may have to be moved first. `done(error)`: the device has failed, and there are no more blocks than before."""

    def close(self) -> None:
        """Ends the backend's threads, after every batch launched before has ended with a result or an error."""
