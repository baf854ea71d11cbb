"""The result of a stage: figures for a JSON file, and lines for a table."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Figures = dict[str, Any]  # JSON


class WrongResult(Exception):
    """The device computed a wrong result, so its speeds mean nothing."""


@dataclass(frozen=True, slots=True)
class ResultLine:
    """One line of the table. `met` is True if the target was met, None if there is no target."""

    what: str
    value: str
    target: str = ""
    met: bool | None = None


@dataclass(slots=True)
class StageResult:
    """The result of one stage."""

    figures: Figures = field(default_factory=dict)
    lines: list[ResultLine] = field(default_factory=list)

    def add_line(self, what: str, value: str, target: str = "", met: bool | None = None) -> None:
        self.lines.append(ResultLine(what, value, target, met))

    def at_least(self, what: str, value: float, target: float, form: str = ".2f") -> None:
        """Adds a figure that should be at least its target."""
        self.add_line(what, format(value, form), f"≥ {target:g}", value >= target)

    def at_most(self, what: str, value: float, target: float, form: str = ".2f") -> None:
        """Adds a figure that should be at most its target."""
        self.add_line(what, format(value, form), f"≤ {target:g}", value <= target)


def check_close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> float:
    """Raises WrongResult where two tensors differ by more than `tolerance` · max(1, |expected|), or where one has NaN.

    Returns the largest difference, as a fraction of the allowed one. `expected` is best float64.
    """
    expected = expected.to(torch.float64)
    if not expected.numel():
        return 0.0
    apart = (got.to(torch.float64) - expected).abs()
    share = torch.where(apart == 0, 0.0, apart / (tolerance * expected.abs().clamp(min=1.0)))
    share = share.nan_to_num(nan=torch.inf)
    worst = float(share.max())
    if not worst <= 1.0:
        at = torch.unravel_index(share.argmax(), share.shape)
        place = tuple(int(index) for index in at)
        raise WrongResult(f"{what}: at {place} it is {float(got[place])}, and {float(expected[place])} is right")
    return worst


def check_same_bits(what: str, one: Tensor, other: Tensor) -> None:
    """Raises WrongResult unless two tensors are bitwise equal."""
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    if not torch.equal(one.contiguous().view(kind), other.contiguous().view(kind)):
        raise WrongResult(f"{what}: the bits depend on what else is in the batch")
