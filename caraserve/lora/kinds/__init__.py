"""Kinds of adapters: each file says how the tensors of one kind become A, B and vectors of a module.

To add a kind, write a class like `Lora` in a file of its own and list it in `_KINDS`; code outside the package calls
`register`.
"""

import re
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import Array
from caraserve.lora.kinds.block_diagonal import BlockDiagonalLora
from caraserve.lora.kinds.dora import Dora
from caraserve.lora.kinds.lora import Lora
from caraserve.lora.kinds.lora_bias import LoraBias
from caraserve.lora.kinds.qalora import QaLora
from caraserve.lora.kinds.vera import Vera
from caraserve.lora.peft_fields import Fields, refusal, shown
from caraserve.model.base_linears import BaseLinears
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan

MATRICES = ("A", "B")
VECTORS = "vectors"


class AdapterKind(Protocol):
    """How an adapter with one configuration changes a module: y += scale · B A x, with A and B made of the tensors that
    PEFT saves."""

    title: str  # as people name the kind
    peft_type: str  # as adapter_config.json names the kind
    switch: str | None  # the field that chooses this kind among those of its peft_type; None: for the others
    fields: frozenset[str]  # of the configuration, that the kind applies or refuses
    what: str  # its tensors, in messages
    tensor_name: re.Pattern[
        str
    ]  # of its tensors, with groups `module`, `tensor` and `suffix` (its name in the module), `adapter`
    shared: Mapping[str, int]  # tensors `base_model.NAME` of all modules, and the axis of which each may use a part
    sources: Mapping[str, tuple[str, ...]]  # the tensors of which A, B and, if it has them, `VECTORS` are made
    is_computed: bool  # whether matrices are computed, in float32; else they have the values of tensors

    def __init__(self, fields: Fields, plan: DecoderPlan) -> None:
        """Reads the kind's fields of a configuration. Raises AdapterRejected naming the field."""

    def rank(self, module: str) -> int:
        """Returns the rank of A and B of a module, given by its full name."""

    def scale(self, module: str) -> float:
        """Returns the factor of B A of a module, given by its full name."""

    def shapes(self, rank: int, linear: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes that a module's tensors must have."""

    def matrix(self, name: str, tensors: Mapping[str, Array], linear: LinearPlan) -> Array:
        """Returns A [rank, inputs] or B [outputs, rank], made of its sources."""


@runtime_checkable
class KindWithVectors(AdapterKind, Protocol):
    """How an adapter changes the outputs of a module, too: y = factor · (W x + b + scale · B A x) + bias."""

    def vectors(
        self, tensors: Mapping[str, NDArray[np.float32]], scale: float, linear: LinearPlan, base: BaseLinears | None
    ) -> NDArray[np.float32]:
        """Returns the factor and the bias of every output, [2, outputs]. `base`: the weights of the base model, None:
        it has none. Raises AdapterRejected, and ModelLoadError."""


_KINDS: list[type[AdapterKind]] = [Lora, LoraBias, Dora, QaLora, BlockDiagonalLora, Vera]


def register(kind: type[AdapterKind]) -> None:
    """Adds a kind. Raises ValueError if its peft_type and switch are taken."""
    if any((kind.peft_type, kind.switch) == (known.peft_type, known.switch) for known in _KINDS):
        raise ValueError(f"an adapter kind {kind.peft_type} with switch {kind.switch} is registered already")
    _KINDS.append(kind)


def kinds() -> tuple[type[AdapterKind], ...]:
    """Returns every kind that is served."""
    return tuple(_KINDS)


def kind_of(fields: Fields) -> type[AdapterKind]:
    """Returns the kind of an adapter with this configuration. Raises AdapterRejected."""
    kinds = [kind for kind in _KINDS if kind.peft_type == fields.get("peft_type")]
    chosen = [kind for kind in kinds if kind.switch is not None and fields.get(kind.switch)]
    chosen += [kind for kind in kinds if kind.switch is None]
    if chosen:
        return chosen[0]
    *first, last = dict.fromkeys(kind.peft_type for kind in _KINDS)
    known = f"{', '.join(first)} and {last} are" if first else f"{last} is"
    raise refusal("peft_type", f"is {shown(fields.get('peft_type'))}; only {known} supported")
