"""Matches the names in an adapter's configuration with the modules of the base model. No I/O.

The names decide ranks and scales, so a name means exactly what it means to peft, or it is refused. peft runs the keys
of `rank_pattern` and `alpha_pattern` as regular expressions; here none is run, because an expression from an untrusted
file can take years. Keys that end a module's name, written with the usual `.`, `\\.`, `.*`, `^` and `$`, are looked up
instead, in a time that does not grow with their number."""

import re
from collections.abc import Iterable
from typing import Generic, TypeVar

from caraserve.model.spec import SITES

Value = TypeVar("Value", int, float)

_PATTERN = re.compile(r"(?P<start>\^?)(?P<any>(?:\.\*(?:\\?\.)?)?)(?P<name>[a-z0-9_.\\]+)\$?")
# An unescaped dot matches any character, but in names of this form only a dot: the words around it are whole words of a
# module's name.
_NAME_END = re.compile(rf"(?:(?:(?:(?:model\.)?layers\.)?[0-9]+\.)?(?:self_attn|mlp)\.)?(?:{'|'.join(SITES)})")


def module_name(layer: int, site: str) -> str:
    """Returns the name of one of `SITES` in the base model, as `model.layers.0.self_attn.q_proj`."""
    return f"model.layers.{layer}.{'self_attn' if site in SITES[:4] else 'mlp'}.{site}"


def name_ends(module: str) -> list[str]:
    """Returns the name and its ends after each dot: `a.b.c` → `a.b.c`, `b.c`, `c`."""
    words = module.split(".")
    return [".".join(words[start:]) for start in range(len(words))]


class PatternTable(Generic[Value]):
    """Values by module name. As in peft, the first pattern that matches the name or an end of it decides."""

    def __init__(self, default: Value, patterns: Iterable[tuple[str, Value]]) -> None:
        """Raises ValueError with the pattern if one is not the end of a module's name."""
        self._default: Value = default
        self._ranked: dict[str, tuple[int, Value]] = {}  # key: see _key; (place in the file, value)
        for place, (pattern, value) in enumerate(patterns):
            self._ranked.setdefault(_key(pattern), (place, value))

    def of(self, module: str) -> Value:
        """Returns the value for a module's full name."""
        whole, *rest = name_ends(module)
        keys = [whole, f"^{whole}", *rest, *(f"*.{end}" for end in rest)]
        return min((self._ranked[key] for key in keys if key in self._ranked), default=(0, self._default))[1]


def _key(pattern: str) -> str:
    """Returns a pattern as a key: `name` for the name or an end of it, `^name` for the whole name, `*.name` for an end
    with something before it. Raises ValueError."""
    match = _PATTERN.fullmatch(pattern)
    name = match["name"].replace("\\.", ".") if match else ""
    if match is None or not _NAME_END.fullmatch(name):
        raise ValueError(pattern)
    if name[0].isdigit() and match["any"] in (".*", ".*."):
        raise ValueError(pattern)  # `.*1.mlp.up_proj` also matches layer 11
    if match["any"].endswith("*"):
        return name
    return f"*.{name}" if match["any"] else match["start"] + name
