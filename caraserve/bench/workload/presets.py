"""Reads `presets.csv`: the papers' experimental settings by name, with the assumptions where a paper is incomplete.

In a cell, ` | ` separates the values that the source sweeps; `*` marks the default, otherwise the first value is the
default. `;` separates the ranks of one run. Objectives (`slo`) are METRIC:VALUE, with the value in seconds or as a
multiple (x) of a run without LoRA. Arrivals and popularity `trace` are those of `traces.included_trace`.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Generic, TypeVar

from caraserve.bench.workload.forms import unknown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SweptValue(Generic[T]):
    """The values of one setting that a source sweeps, and the value that runs by default."""

    values: tuple[T, ...]
    default: T


@dataclass(frozen=True, slots=True)
class Preset:
    """One experiment of a paper. Exactly one of `duration_s` and `requests` is given."""

    name: str
    aliases: tuple[str, ...]
    source: str
    base_model: SweptValue[str]
    hardware: str
    servers: int
    lengths: SweptValue[str]
    arrivals: SweptValue[str]
    rates: SweptValue[float] | None  # requests per second; None: all requests arrive at once
    adapters: SweptValue[int]  # 0: the base model alone
    popularity: SweptValue[str]
    ranks: SweptValue[tuple[int, ...]]  # of one run: adapter i has rank ranks[i % len(ranks)]
    duration_s: float | None
    requests: int | None
    concurrency: int | None  # closed loop: clients with one request in flight each; None: open loop, by arrival time
    slo: str | None
    assumptions: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each assumption, and one for each swept setting, which names its default."""
        sweeps: dict[str, SweptValue[str]] = {
            "model": self.base_model,
            "lengths": self.lengths,
            "arrivals": self.arrivals,
            "popularity": self.popularity,
            "ranks": _shown(self.ranks, lambda ranks: ";".join(map(str, ranks))),
            "adapters": _shown(self.adapters, str),
        }
        if self.rates is not None:
            sweeps["requests/s"] = _shown(self.rates, lambda rate: f"{rate:g}")
        chosen = (
            f"The source sweeps {what} over {', '.join(choice.values)}; {choice.default} is the default."
            for what, choice in sweeps.items()
            if len(choice.values) > 1
        )
        return (*self.assumptions, *chosen)


@cache
def load_presets() -> Mapping[str, Preset]:
    """Returns all presets, keyed by their names and by their aliases."""
    text = files("caraserve.bench.workload").joinpath("presets.csv").read_text(encoding="utf-8")
    presets = [_preset(row) for row in csv.DictReader(text.splitlines())]
    return MappingProxyType({name: preset for preset in presets for name in (preset.name, *preset.aliases)})


def find_preset(name: str) -> Preset:
    """Returns the preset with this name or alias, or raises ConfigError with a list of the names that exist."""
    presets = load_presets()
    if name not in presets:
        raise unknown("preset", name, presets)
    return presets[name]


def _preset(row: Mapping[str, str]) -> Preset:
    return Preset(
        name=row["name"],
        aliases=tuple(row["aliases"].split()),
        source=row["source"],
        base_model=_choice(row["base_model"], str),
        hardware=row["hardware"],
        servers=int(row["servers"]),
        lengths=_choice(row["lengths"], str),
        arrivals=_choice(row["arrivals"], str),
        rates=_choice(row["rates"], float) if row["rates"] else None,
        adapters=_choice(row["adapters"], int),
        popularity=_choice(row["popularity"], str),
        ranks=_choice(row["ranks"], lambda cell: tuple(map(int, cell.split(";")))),
        duration_s=float(row["duration_s"]) if row["duration_s"] else None,
        requests=int(row["requests"]) if row["requests"] else None,
        concurrency=int(row["concurrency"]) if row["concurrency"] else None,
        slo=row["slo"] or None,
        assumptions=tuple(row["assumptions"].split(" | ")),
    )


def _choice(cell: str, parse: Callable[[str], T]) -> SweptValue[T]:
    texts = cell.split(" | ")
    marked = [text for text in texts if text.startswith("*")]
    values = tuple(parse(text.removeprefix("*")) for text in texts)
    return SweptValue(values, parse(marked[0].removeprefix("*")) if marked else values[0])


def _shown(choice: SweptValue[T], show: Callable[[T], str]) -> SweptValue[str]:
    return SweptValue(tuple(show(value) for value in choice.values), show(choice.default))
