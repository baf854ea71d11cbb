"""The seam between the engine and a device: everything the loop and residency may ask of it. Level 1.

Two implementations: `cpu/backend.py` (Numba) and a CUDA one. No torch, numpy arrays only where bytes are meant.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from caraserve.model.layout import AdapterSpec, HostAdapter
from caraserve.plan import Plan, StepResult


@dataclass(frozen=True, slots=True)
class Limits:
    """Fixed when the backend starts; all memory behind them is allocated by then."""

    num_blocks: int  # KV blocks
    block_tokens: int  # tokens in a KV block
    num_slots: int  # requests that can hold device state at once
    adapter_slots: int  # entries of the device adapter table, the base model's slot 0 included
    max_step_tokens: int  # tokens in one iteration
    max_context: int  # positions of one request


class Backend(Protocol):
    """A device that runs plans in launch order and copies adapters beside them.

    Callbacks come on a thread of the backend's own and must only hand over to the event loop.
    """

    limits: Limits

    def launch(self, plan: Plan, done: Callable[[StepResult | Exception], None]) -> None:
        """Queues one iteration. Returns at once. `done` is called exactly once, in launch order."""

    def load_adapter(self, adapter: HostAdapter, slot: int, done: Callable[[Exception | None], None]) -> None:
        """Copies an adapter to the device and binds it to `slot`, beside running iterations.

        A plan launched after `done(None)` may name the slot.
        """

    def unload_adapter(self, slot: int) -> None:
        """Unbinds `slot` once every plan launched so far has run, and gives its memory back."""

    def adapter_bytes(self, adapter: AdapterSpec) -> int:
        """Device bytes that `load_adapter` would take."""

    def close(self) -> None:
        """Ends the backend's threads. Plans launched before are finished or failed, never forgotten."""
