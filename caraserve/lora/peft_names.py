"""How the names in an adapter's configuration stand for the modules of the base model. Pure.

The names decide ranks and scales, so a name is understood exactly as peft understands it, or it is not accepted. peft
runs the keys of `rank_pattern` and `alpha_pattern` as regular expressions; we run none, because an expression from a
stranger's file can take years. Keys that end a module's name, written with the usual `.`, `\\.`, `.*`, `^` and `$`,
are looked up instead, in a time that does not grow with their number.
"""

import re
from collections.abc import Iterable
from typing import Generic, TypeVar

from caraserve.model.spec import SITES

Value = TypeVar("Value", int, float)

_PATTERN = re.compile(r"(?P<start>\^?)(?P<any>(?:\.\*(?:\\?\.)?)?)(?P<name>[a-z0-9_.\\]+)\$?")
# An unescaped dot matches any character. For names of this form it can only ever meet a dot: the words around it are
# those that stand there in a module's name, at their full length.
_NAME_END = re.compile(rf"(?:(?:(?:(?:model\.)?layers\.)?[0-9]+\.)?(?:self_attn|mlp)\.)?(?:{'|'.join(SITES)})")


def module_name(layer: int, site: str) -> str:
    """The name of one of `SITES` in the base model: `model.layers.0.self_attn.q_proj`."""
    return f"model.layers.{layer}.{'self_attn' if site in SITES[:4] else 'mlp'}.{site}"


def name_ends(module: str) -> list[str]:
    """The name and its ends that begin at a dot: `a.b.c` → `a.b.c`, `b.c`, `c`."""
    words = module.split(".")
    return [".".join(words[start:]) for start in range(len(words))]


class PatternTable(Generic[Value]):
    """Values by module name. As in peft, the first pattern that matches the name or an end of it decides."""

    def __init__(self, default: Value, patterns: Iterable[tuple[str, Value]]) -> None:
        """Raises ValueError naming a pattern that is more than the end of a module's name."""
        self._default: Value = default
        self._ranked: dict[str, tuple[int, Value]] = {}  # key: see _key; (place in the file, value)
        for place, (pattern, value) in enumerate(patterns):
            self._ranked.setdefault(_key(pattern), (place, value))

    def of(self, module: str) -> Value:
        """The value for a module's full name."""
        whole, *rest = name_ends(module)
        keys = [whole, f"^{whole}", *rest, *(f"*.{end}" for end in rest)]
        return min((self._ranked[key] for key in keys if key in self._ranked), default=(0, self._default))[1]


def _key(pattern: str) -> str:
    """`name`: the name or an end of it; `^name`: the whole name; `*.name`: an end with something before it."""
    match = _PATTERN.fullmatch(pattern)
    name = match["name"].replace("\\.", ".") if match else ""
    if match is None or not _NAME_END.fullmatch(name):
        raise ValueError(pattern)
    if name[0].isdigit() and match["any"] in (".*", ".*."):
        raise ValueError(pattern)  # 1.mlp.up_proj after anything is layer 11's as well
    if match["any"].endswith("*"):
        return name
    return f"*.{name}" if match["any"] else match["start"] + name
