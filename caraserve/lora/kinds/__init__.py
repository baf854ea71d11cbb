"""Kinds of adapters: each file says how the tensors of one kind become A and B of a module, with a numpy reference.

To add a kind, write a class like `Lora` in a file of its own and list it in `_KINDS`; code outside the package calls
`register`.
"""

import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import Array
from caraserve.lora.kinds.lora import Lora
from caraserve.lora.peft_fields import Fields, refusal, shown
from caraserve.model.plan import DecoderPlan

MATRICES = ("A", "B")


class ModuleSettings(Protocol):
    """What a configuration says about each module, by its full name."""

    def rank(self, module: str) -> int:
        """Returns the rank of A and B."""

    def scale(self, module: str) -> float:
        """Returns the factor of B A."""


class AdapterKind(Protocol):
    """How an adapter changes a module: y += scale · B A x, with A and B made of the tensors that PEFT saves."""

    peft_type: str  # as adapter_config.json names the kind
    switch: str | None  # the field that chooses this kind among those of its peft_type; None: for the others
    fields: frozenset[str]  # of the configuration, that `settings` applies or refuses
    what: str  # its tensors, in messages
    tensor_name: re.Pattern[str]  # of its tensors, with groups `module`, `tensor` (its name in the module), `adapter`
    sources: Mapping[str, tuple[str, ...]]  # the tensors of which each of `MATRICES` is made
    is_computed: bool  # whether matrices are computed, in float32; else they are tensors as stored

    def settings(self, fields: Fields, plan: DecoderPlan) -> ModuleSettings:
        """Reads the kind's fields. Raises AdapterRejected naming the field."""

    def shapes(self, rank: int, inputs: int, outputs: int) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes that a module's tensors must have."""

    def matrix(self, name: str, tensors: Mapping[str, Array]) -> Array:
        """Returns A [rank, inputs] or B [outputs, rank], made of its sources."""

    def update(self, tensors: Mapping[str, NDArray[np.float64]], scale: float) -> NDArray[np.float64]:
        """Returns what is added to a module's weight, [outputs, inputs]: the reference for backends."""


_KINDS: list[AdapterKind] = [Lora()]


def register(kind: AdapterKind) -> None:
    """Adds a kind. Raises ValueError if its peft_type and switch are taken."""
    if any((kind.peft_type, kind.switch) == (known.peft_type, known.switch) for known in _KINDS):
        raise ValueError(f"an adapter kind {kind.peft_type} with switch {kind.switch} is registered already")
    _KINDS.append(kind)


def kind_of(fields: Fields) -> AdapterKind:
    """Returns the kind of an adapter with this configuration. Raises AdapterRejected."""
    kinds = [kind for kind in _KINDS if kind.peft_type == fields.get("peft_type")]
    chosen = [kind for kind in kinds if kind.switch is not None and fields.get(kind.switch)]
    chosen += [kind for kind in kinds if kind.switch is None]
    if chosen:
        return chosen[0]
    *first, last = dict.fromkeys(kind.peft_type for kind in _KINDS)
    known = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    raise refusal("peft_type", f"is {shown(fields.get('peft_type'))}; only {known} supported")
