"""The description of a linear module: its parts, which outputs play which role, and how it is stored. Data only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from caraserve.model.formats import WeightFormat
from caraserve.model.formats.plain import PLAIN

Rows = range | tuple[int, ...]  # outputs of a module, in the order in which a backend keeps them


@dataclass(frozen=True, slots=True)
class Part:
    """The outputs of a linear that play one role in its block."""

    role: str  # q, k, v, gate, up, out, down, router, shared_gate, z, a, b
    rows: Rows

    @property
    def outputs(self) -> int:
        return len(self.rows)

    @property
    def index(self) -> slice | list[int]:
        """The rows as an index of arrays whose first axis is the module's outputs."""
        rows = self.rows
        return slice(rows.start, rows.stop, rows.step) if isinstance(rows, range) else list(rows)


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """y = x weightᵀ + bias. Adapters may change any linear of a layer."""

    module: str  # name in checkpoints, as model.layers.0.self_attn.q_proj
    inputs: int
    outputs: int
    parts: tuple[Part, ...]
    bias: bool = False
    transposed: bool = False  # stored as [inputs, outputs]
    format: WeightFormat = PLAIN
    adapter_module: str | None = None  # name in adapters, if it is another

    @classmethod
    def of_role(cls, module: str, inputs: int, outputs: int, role: str, *, bias: bool = False) -> "LinearPlan":
        """Returns a linear with one part, which has all outputs."""
        return cls(module, inputs, outputs, (Part(role, range(outputs)),), bias)

    @property
    def name_in_adapters(self) -> str:
        return self.adapter_module or self.module

    @property
    def target(self) -> str:
        """The last word of the module's name, by which adapters target it."""
        return self.name_in_adapters.rpartition(".")[2]

    @property
    def order(self) -> tuple[int, ...] | None:
        """The outputs in the order of the parts, None if these are ranges that lie one after another and cover them."""
        edges = (0, *(part.rows.stop for part in self.parts if isinstance(part.rows, range)))
        follow = [part.rows for part in self.parts] == [range(*pair) for pair in pairwise(edges)]
        if follow and edges[-1] == self.outputs:
            return None
        return tuple(row for part in self.parts for row in part.rows)


def accumulated(widths: Iterable[int]) -> Iterator[int]:
    """Yields 0 and the running sums of `widths`."""
    total = 0
    yield total
    for width in widths:
        total += width
        yield total


def interleaved_rows(heads: int, head_dim: int, rotated: int) -> tuple[int, ...]:
    """Returns the order of q's or k's outputs that turns rotation of pairs (2i, 2i + 1) into that of (i, i + n)."""
    first = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)]
    return tuple(head * head_dim + row for head in range(heads) for row in first)


def part_rows(sizes: Sequence[tuple[str, int]]) -> tuple[Part, ...]:
    """Returns the parts of a fused module that lie one after another: (role, outputs) each."""
    starts = accumulated(size for _, size in sizes)
    return tuple(Part(role, range(start, start + size)) for start, (role, size) in zip(starts, sizes, strict=False))
