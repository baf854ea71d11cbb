"""Latency limits that a request is to meet: read from arguments, applied by `summary.py`. Pure."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.report.columns import Columns
from caraserve.errors import ConfigError

if TYPE_CHECKING:
    from caraserve.bench.report.summary import Summary

LIMITS = ("ttft", "tpot", "tpt", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits; None is no limit. A request meets them all, or it does not meet the SLO."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tpt_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def scaled(cls, base: "Summary", factor: float, limits: tuple[str, ...] = ("tpt",)) -> "Slo":
        """`factor` times the means of a run without LoRA; alone on TPT, as the papers have it, unless told otherwise.

        Raises ConfigError if there is nothing to scale.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"--slo-scale {factor:g}: must be more than 0")
        scaled: dict[str, float] = {}
        for name in limits:
            measured = getattr(base.latency, name)
            if measured is None:
                raise ConfigError(f"--slo-scale: the run without LoRA has no {name.upper()} to scale")
            scaled[f"{name}_ms"] = factor * measured.mean_ms
        return cls(**scaled)

    def limits(self) -> dict[str, float]:
        """Those that are set, by name, in ms."""
        named = {name: getattr(self, f"{name}_ms") for name in LIMITS}
        return {name: limit for name, limit in named.items() if limit is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name.upper()} ≤ {limit:g} ms" for name, limit in self.limits().items()) or "no limit"


def parse_slo(text: str) -> Slo:
    """`ttft:200,tpot:30,e2e:5000` → Slo, in ms. Raises ConfigError that says what would be right."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, colon, digits = (piece.strip() for piece in part.partition(":"))
        try:
            limit = float(digits)
        except ValueError:
            limit = math.nan
        if not colon or name not in LIMITS or not (math.isfinite(limit) and limit > 0):
            raise ConfigError(
                f"--slo {text!r}: {part.strip()!r} is not one of {', '.join(LIMITS)} with ms, as ttft:200"
            )
        if f"{name}_ms" in found:
            raise ConfigError(f"--slo {text!r}: {name} is there twice")
        found[f"{name}_ms"] = limit
    return Slo(**found)


def met(slo: Slo, columns: Columns) -> dict[str, NDArray[np.bool_]]:
    """For each limit that is set, and for `all`, which requests keep it.

    A failed request keeps none. A complete answer of one token has no TPOT and keeps that limit; an answer without
    any token keeps neither TTFT nor TPT, or a server that says nothing would be the best.
    """
    by_limit = {name: _below(name, limit, columns) for name, limit in slo.limits().items()}
    every = columns.ok.copy()
    for kept in by_limit.values():
        every &= kept
    return {**by_limit, "all": every}


def _below(name: str, limit_ms: float, columns: Columns) -> NDArray[np.bool_]:
    values: NDArray[np.float64] = getattr(columns, f"{name}_ms")
    with np.errstate(invalid="ignore"):  # NaN where a request has no such time
        kept: NDArray[np.bool_] = values <= limit_ms
    if name == "tpot":
        kept |= columns.output_tokens == 1
    result: NDArray[np.bool_] = kept & columns.ok
    return result
