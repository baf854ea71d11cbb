"""BD-LoRA: A or B of a module is block-diagonal, and its blocks are stored one below the other."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from caraserve.core.lora_layout import Array
from caraserve.lora.kinds.lora import Lora
from caraserve.lora.peft_fields import Fields, refusal, shown
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan

_FIELD = "use_bdlora"


class BlockDiagonalLora(Lora):
    """The matrices are filled up with zeros, in the stored dtype."""

    title = "BD-LoRA"
    switch: str | None = _FIELD
    fields = Lora.fields | {_FIELD}

    def __init__(self, fields: Fields, plan: DecoderPlan) -> None:
        super().__init__(fields, plan)
        value = fields[_FIELD]
        if not isinstance(value, dict):
            raise refusal(_FIELD, f"is {shown(value)}; an object is needed")
        if unknown := value.keys() - {"target_modules_bd_a", "target_modules_bd_b", "nblocks", "match_strict"}:
            raise refusal(_FIELD, f"has {shown(min(unknown))}; adapters that use it are not supported")
        self._patterns = {"A": _words(value, "target_modules_bd_a"), "B": _words(value, "target_modules_bd_b")}
        self._is_strict = bool(value.get("match_strict", True))
        blocks = value.get("nblocks", 1)
        if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
            raise refusal(_FIELD, f"has nblocks {shown(blocks)}; a positive integer is needed")
        self._blocks = blocks

    def shapes(self, rank: int, linear: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """A block-diagonal matrix has as many columns as one of its blocks."""
        shapes = dict(super().shapes(rank, linear))
        if (name := self._block_diagonal(linear)) is not None:
            rows, columns = shapes[f"lora_{name}"]
            if rows % self._blocks or columns % self._blocks:
                raise refusal(
                    _FIELD,
                    f"has {self._blocks} nblocks, which do not divide {name} of {linear.target}, {rows} × {columns}",
                )
            shapes[f"lora_{name}"] = rows, columns // self._blocks
        return shapes

    def matrix(self, name: str, tensors: Mapping[str, Array], linear: LinearPlan) -> Array:
        """Places the blocks on the diagonal."""
        stored = tensors[f"lora_{name}"]
        if name != self._block_diagonal(linear):
            return stored
        (rows, columns), blocks = stored.shape, self._blocks
        matrix = np.zeros((blocks, rows // blocks, blocks, columns), stored.dtype)
        each = np.arange(blocks)
        matrix[each, :, each] = stored.reshape(blocks, rows // blocks, columns)
        return matrix.reshape(rows, blocks * columns)

    def _block_diagonal(self, linear: LinearPlan) -> str | None:
        """Returns which matrix of a module is block-diagonal. As in peft, a pattern is a part of the module's last
        word. Refuses what peft refuses."""
        found = [name for name, words in self._patterns.items() if any(word in linear.target for word in words)]
        if len(found) > 1 or (self._is_strict and not found):
            raise refusal(_FIELD, f"names {linear.target} {'for A and B' if found else 'neither for A nor for B'}")
        return found[0] if found else None


def _words(value: Mapping[str, Any], name: str) -> list[str]:
    words = value.get(name) or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise refusal(_FIELD, f"has {name} {shown(words)}; a list of names is needed")
    return words
