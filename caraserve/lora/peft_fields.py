"""Reads single fields of an adapter's configuration, and matches their patterns with the modules of the base model. No
I/O.

Patterns decide ranks and scales, so a pattern means exactly what it means to peft, or it is refused. peft runs the keys
of `rank_pattern` and `alpha_pattern` as regular expressions; here none is run, because an expression from an untrusted
file can take years. Keys that end a module's name, written with the usual `.`, `\\.`, `.*`, `^` and `$`, are looked up
instead, in a time that does not grow with their number."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from caraserve.core.lora_layout import MAX_RANK
from caraserve.errors import AdapterRejected
from caraserve.lora.joined_modules import other_names
from caraserve.model.plan import DecoderPlan
from caraserve.model.vocabulary import vocabulary_modules

Fields = Mapping[str, Any]
Value = TypeVar("Value", int, float)

CONFIG_NAME = "adapter_config.json"
_MAX_ALPHA = 1e9
_PATTERN = re.compile(r"(?P<start>\^?)(?P<any>(?:\.\*(?:\\?\.)?)?)(?P<name>[A-Za-z0-9_.\\]+)\$?")
_NUMBER = "#"  # stands for the number of a layer
_DIGIT, _CHARACTER = re.compile(r"[0-9]"), re.compile(r"\\\.|.", re.DOTALL)
_MOST_FOREIGN = 1000  # patterns with other words, each of which is compared with all shapes of names


def refusal(field: str, what: str) -> AdapterRejected:
    """Returns the error that refuses an adapter because of one field."""
    return AdapterRejected(f"{CONFIG_NAME}: {field} {what}")


def shown(value: Any) -> str:
    """Returns a value of the file for a message: at most 80 characters, all ASCII."""
    return ascii(value)[:80]


def checked_rank(field: str, value: Any) -> int:
    """Checks a rank."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise refusal(field, f"is {shown(value)}; a rank is an integer from 1 to {MAX_RANK}")
    return value


def checked_alpha(field: str, value: Any) -> float:
    """Checks the numerator of a scale."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MAX_ALPHA:
        raise refusal(field, f"is {shown(value)}; a number below {_MAX_ALPHA:.0e} is needed")
    return float(value)


def flag(fields: Fields, field: str) -> bool:
    """Returns a field that is true, false or missing."""
    value = fields.get(field) or False
    if not isinstance(value, bool):
        raise refusal(field, f"is {shown(value)}; true or false is needed")
    return value


def name_ends(module: str) -> list[str]:
    """Returns the name and its ends after each dot: `a.b.c` → `a.b.c`, `b.c`, `c`."""
    words = module.split(".")
    return [".".join(words[start:]) for start in range(len(words))]


class PatternTable(Generic[Value]):
    """Values by module name. As in peft, the first pattern that matches the name or an end of it decides."""

    def __init__(self, default: Value, patterns: Iterable[tuple[str, Value]], plan: DecoderPlan) -> None:
        """Raises ValueError with the pattern if one is not the end of a module's name."""
        self._default: Value = default
        self._ranked: dict[str, tuple[int, Value]] = {}  # key: see _key; (place in the file, value)
        names: _Names | None = None
        for place, (pattern, value) in enumerate(patterns):
            names = names or _Names(plan)
            if (key := _key(pattern, names)) is not None:
                self._ranked.setdefault(key, (place, value))

    def of(self, module: str) -> Value:
        """Returns the value for a module's full name."""
        if not self._ranked:
            return self._default
        whole, *rest = name_ends(module)
        keys = [whole, f"^{whole}", *rest, *(f"*.{end}" for end in rest)]
        return min((self._ranked[key] for key in keys if key in self._ranked), default=(0, self._default))[1]


def pattern_table(
    fields: Fields, field: str, default_field: str, read: Callable[[str, Any], Value], plan: DecoderPlan
) -> PatternTable[Value]:
    """Reads the values of `field` by pattern, and that of all other modules from `default_field`."""
    patterns = fields.get(field) or {}
    if not isinstance(patterns, dict):
        raise refusal(field, "must be an object")
    default = read(default_field, fields.get(default_field))
    try:
        return PatternTable(default, [(pattern, read(field, value)) for pattern, value in patterns.items()], plan)
    except ValueError as error:
        raise refusal(field, f"{shown(error.args[0])} is a regular expression; write it as module names") from None


class _Names:
    """The names of modules, as patterns are compared with them."""

    def __init__(self, plan: DecoderPlan) -> None:
        self.words: list[set[str]] = []  # by their distance from the end
        self._shapes: set[str] = set()  # whole names, with 0 for each digit
        self._foreign = 0
        for name in (*plan.adapter_modules, *vocabulary_modules(plan), *other_names(plan)):
            self._shapes.add(_DIGIT.sub("0", name))
            for distance, word in enumerate(reversed(name.split("."))):
                if distance == len(self.words):
                    self.words.append(set())
                self.words[distance].add(_NUMBER if word.isdigit() else word)

    def may_end(self, pattern: str) -> bool:
        """Returns whether a name may end with what a pattern matches: with its characters, and any in place of a dot
        that is not escaped."""
        self._foreign += 1
        characters = ["." if text == "\\." else None if text == "." else text for text in _CHARACTER.findall(pattern)]
        if self._foreign > _MOST_FOREIGN or "\\" in characters:
            return True
        wanted = ["0" if text is not None and text.isdigit() else text for text in reversed(characters)]
        return any(
            len(shape) >= len(wanted)
            and all(text in (None, found) for text, found in zip(wanted, reversed(shape), strict=False))
            for shape in self._shapes
        )


def _key(pattern: str, names: _Names) -> str | None:
    """Returns a pattern as a key: `name` for the name or an end of it, `^name` for the whole name, `*.name` for an end
    with something before it; None if it matches no module of the base. Raises ValueError."""
    match = _PATTERN.fullmatch(pattern)
    if match is None:
        raise ValueError(pattern)
    # An unescaped dot matches any character, but between whole words of a name only a dot.
    name = match["name"].replace("\\.", ".")
    parts = [_NUMBER if part.isdigit() else part for part in reversed(name.split("."))]
    if len(parts) > len(names.words) or any(part not in here for part, here in zip(parts, names.words, strict=False)):
        if names.may_end(match["name"]):
            raise ValueError(pattern)
        return None
    if name[0].isdigit() and match["any"] in (".*", ".*."):
        raise ValueError(pattern)  # `.*1.mlp.up_proj` also matches layer 11
    if match["any"].endswith("*"):
        return name
    return f"*.{name}" if match["any"] else match["start"] + name
