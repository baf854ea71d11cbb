"""What a stage found: figures for a file, lines for a short table."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Figures = dict[str, Any]  # JSON


class WrongResult(Exception):
    """A device computed something else than it should have: nothing it does fast counts."""


@dataclass(frozen=True, slots=True)
class ResultLine:
    """One line of the table. `met`: whether the target was; None: there is none."""

    what: str
    value: str
    target: str = ""
    met: bool | None = None


@dataclass(slots=True)
class StageResult:
    """Of one stage."""

    figures: Figures = field(default_factory=dict)
    lines: list[ResultLine] = field(default_factory=list)

    def add_line(self, what: str, value: str, target: str = "", met: bool | None = None) -> None:
        self.lines.append(ResultLine(what, value, target, met))

    def at_least(self, what: str, value: float, target: float, form: str = ".2f") -> None:
        """A figure that is to reach a target."""
        self.add_line(what, format(value, form), f"≥ {target:g}", value >= target)

    def at_most(self, what: str, value: float, target: float, form: str = ".2f") -> None:
        """A figure that is not to pass a target."""
        self.add_line(what, format(value, form), f"≤ {target:g}", value <= target)


def check_close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> float:
    """`expected`: float64. Raises WrongResult where the two differ by more than the tolerance, of 1 or of the expected
    value if that is larger; no number is never close. Returns the largest share of what is allowed."""
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
    """Raises WrongResult unless two results are equal to the bit."""
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    if not torch.equal(one.contiguous().view(kind), other.contiguous().view(kind)):
        raise WrongResult(f"{what}: the bits depend on what else is in the batch")
