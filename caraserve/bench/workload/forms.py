"""Parses the short texts that name a distribution and its parameters, such as `zipf:0.9` or `sticky:0.8,8`."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from caraserve.errors import ConfigError


@cache
def distributions() -> dict[str, Any]:
    """Returns the fitted parameters with their sources: `levels`, `lengths` and `popularity` by name; and the source of
    the sample among the `traces`."""
    source = files("caraserve.bench.workload").joinpath("distributions.json")
    document: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
    return document


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number after the colon. It is required if `default` is None. Both bounds are allowed, unless `above` is set."""

    name: str
    default: float | None = None
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # the value must be above `low`
    whole: bool = False

    def check(self, kind: str, text: str, value: float) -> float:
        """Returns the value, or raises ConfigError if it is out of bounds."""
        if not math.isfinite(value) or not self.low <= value <= self.high or (self.above and value == self.low):
            bounds = (
                f"{'above' if self.above else 'at least'} {self.low:g}" if self.low > -math.inf else "a finite number"
            )
            bounds += f" and at most {self.high:g}" if self.high < math.inf else ""
            raise ConfigError(f"{kind} {text!r}: {self.name} must be {bounds}")
        if self.whole and value != int(value):
            raise ConfigError(f"{kind} {text!r}: {self.name} must be a whole number")
        return value


@dataclass(frozen=True, slots=True)
class Form:
    """The parameters that may follow a distribution's name."""

    parameters: tuple[Parameter, ...] = ()

    def shown(self, name: str) -> str:
        """Returns the notation for error messages: `sticky` becomes `sticky:P[,W]`."""
        needed = ",".join(parameter.name for parameter in self.parameters if parameter.default is None)
        spare = [parameter.name for parameter in self.parameters if parameter.default is not None]
        text = f"{name}:{needed}" if needed else name
        for index, parameter in enumerate(spare):
            text += f"[{',' if needed or index else ':'}{parameter}]"
        return text


def parse_form(kind: str, text: str, forms: Mapping[str, Form]) -> tuple[str, tuple[float, ...]]:
    """Parses `sticky:0.8` into its name and all its numbers, with defaults. Error messages begin with `kind`."""
    name, colon, rest = text.strip().partition(":")
    form = forms.get(name)
    if form is None:
        raise unknown(kind, text, (form.shown(name) for name, form in forms.items()))
    given = rest.split(",") if colon else []
    needed = sum(parameter.default is None for parameter in form.parameters)
    if not needed <= len(given) <= len(form.parameters):
        raise ConfigError(f"{kind} {text!r}: write {form.shown(name)}")
    values = []
    for index, parameter in enumerate(form.parameters):
        if index >= len(given):
            assert parameter.default is not None
            values.append(parameter.default)
            continue
        try:
            value = float(given[index])
        except ValueError:
            raise ConfigError(f"{kind} {text!r}: {given[index]!r} is not a number; write {form.shown(name)}") from None
        values.append(parameter.check(kind, text, value))
    return name, tuple(values)


def unknown(kind: str, text: str, known: Iterable[str]) -> ConfigError:
    """Returns an error which says that `text` does not exist, and lists the `known` names."""
    return ConfigError(f"{kind} {text!r} is not known; there are {', '.join(known)}")
