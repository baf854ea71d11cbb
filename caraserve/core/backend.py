"""The seam between the engine and a device: everything the loop and residency may ask of it.

Two implementations: `cpu/backend.py` (Numba) and a CUDA one. No torch, numpy arrays only where bytes are meant.
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
    """Device memory that KV blocks and adapters share. Whoever admits keeps within it; where things lie is the
    backend's to say: it cures holes by moving, so sums are all that counts."""

    num_bytes: int
    block_bytes: int  # of a KV block
    granule_bytes: int  # an adapter takes whole ones, and so do all KV blocks together
    adapter_bytes: int  # most that adapters may take together
    least_blocks: int  # KV blocks that adapters never take


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed when the backend starts; all memory behind them is allocated by then."""

    num_blocks: int  # KV blocks; where memory is shared, what there are at the start
    block_tokens: int  # tokens in a KV block
    num_slots: int  # requests that can hold device state at once
    adapter_slots: int  # entries of the device adapter table, the base model's slot 0 included
    max_step_tokens: int  # tokens in one iteration
    max_context: int  # positions of one request
    shared: SharedMemory | None = None  # None: KV blocks and adapters have memory of their own
    aside_plans: int = 0  # at most so many plans go aside at a time (`Batch.aside`); 0: the device has no such lane
    streamed_plans: int = 0  # at most so many go aside whose adapter is not all in host memory; 0: it is awaited


class Backend(Protocol):
    """A device that runs plans in launch order and copies adapters beside them.

    Callbacks come on a thread of the backend's own and must only hand over to the event loop.
    """

    limits: Limits
    host_memory: NDArray[np.uint8]  # for the host tier: CPU workers see it, and copies to the device are fast

    def launch(self, plan: Batch, done: Callable[[StepResult | Exception], None]) -> None:
        """Queues one iteration. Returns at once. `done` is called exactly once, in launch order but for plans that go
        aside: these begin after the iterations launched before them, later ones pass them. Starts and grants of all
        plans take effect in launch order."""

    def load_adapter(
        self,
        adapter: HostAdapter,
        slot: int,
        done: Callable[[Exception | None], None],
        group_ends: Sequence[int] = (),
        layers: int | None = None,
    ) -> None:
        """Binds an adapter to `slot` and copies it to the device beside running iterations, one group of layers after
        another: groups end before the layers `group_ends`, and with the last layer. `layers`: so many are in
        `adapter.data` so far, and `extend_load` tells of the others; None: all are. Until all are, only plans aside may
        name the slot, and only where `Limits.streamed_plans` says so.

        Plans launched from now on may name the slot. An iteration that gets to a layer before its weights have arrived
        waits for them or, where `Row.assist` says so, has CPU workers compute the layer's LoRA from `adapter.data`,
        which must lie in `host_memory` and stay as it is until `done`.
        """

    def extend_load(self, slot: int, layers: int) -> None:
        """The first `layers` layers of the adapter that is being loaded to `slot` are in host memory."""

    def break_load(self, slot: int, cause: Exception) -> None:
        """The layers that are not in host memory never will be. Plans aside that wait for them end void; then the
        load's `done` is told `cause`, unless it has been told of another failure before."""

    def recall(self, slot: int) -> None:
        """The plan aside of request slot `slot` ends void, if it waits for layers that are not in host memory;
        otherwise it ends as it would have."""

    def device_bytes(self, spec: AdapterSpec) -> int:
        """What an adapter takes on the device. Raises AdapterRejected for one that can never be there."""

    def unload_adapter(self, slot: int) -> None:
        """Unbinds `slot` once every plan launched so far has run, and gives its memory back."""

    def resize_kv(self, blocks: int, done: Callable[[], None]) -> None:
        """KV blocks are [0, blocks) from now on, where memory is shared. Fewer: for plans launched from now on, and
        what adapters take at once. More: from `done` on, for adapters may have to be moved first."""

    def close(self) -> None:
        """Ends the backend's threads. Plans launched before are finished or failed, never forgotten."""
