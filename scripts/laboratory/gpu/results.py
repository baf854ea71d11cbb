"""The result of a stage: typed figures, and lines for a table."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", covariant=True)


class Outcome(StrEnum):
    """How a stage ended."""

    DONE = "done"
    WRONG = "wrong"  # the device computed a wrong result
    FAILED = "failed"  # an error, or its process died
    KILLED = "killed"  # it took too long
    NOT_BEGUN = "not begun"


class WrongResult(Exception):
    """The device computed a wrong result, so its speeds mean nothing."""


@dataclass(frozen=True, slots=True)
class ResultLine:
    """One line of the table. `met` is True if the target was met, None if there is no target."""

    what: str
    value: str
    target: str = ""
    met: bool | None = None


class Lines:
    """The lines of one stage, in order."""

    def __init__(self) -> None:
        self._lines: list[ResultLine] = []

    @property
    def all(self) -> tuple[ResultLine, ...]:
        return tuple(self._lines)

    def add(self, what: str, value: str, target: str = "", met: bool | None = None) -> None:
        self._lines.append(ResultLine(what, value, target, met))

    def at_least(self, what: str, value: float, target: float, form: str = ".2f") -> None:
        """Adds a figure that should be at least its target."""
        self.add(what, format(value, form), f"≥ {target:g}", value >= target)

    def at_most(self, what: str, value: float, target: float, form: str = ".2f") -> None:
        """Adds a figure that should be at most its target."""
        self.add(what, format(value, form), f"≤ {target:g}", value <= target)


@dataclass(frozen=True, slots=True)
class StageResult(Generic[F]):
    """The result of one stage. `figures` is a dataclass of the stage, which becomes JSON."""

    figures: F
    lines: tuple[ResultLine, ...]


@dataclass(frozen=True, slots=True)
class StageReport:
    """The report of a stage's process. `error` is one sentence on why there is no result; empty with outcome DONE."""

    outcome: Outcome
    error: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # JSON
    lines: tuple[ResultLine, ...] = ()


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
