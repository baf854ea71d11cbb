"""Names of combinations: several adapters, each with a weight, that act as one. No I/O.

    sql*0.7+legal*0.3       the sum of 0.7 times what sql adds and 0.3 times what legal does
    sql*-1                  what sql adds, subtracted

A name without a weight has 1. The canonical name has each adapter once, in the order of names, without weights of 1.
"""

import math
import re
from collections.abc import Iterable

from caraserve.core.adapter_rules import ADAPTER_NAME

MAX_MEMBERS = 8
_MARKS = re.compile(r"[*+]")  # no adapter's name has them
_WEIGHT = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]-?[0-9]+)?")

Weighted = tuple[str, float]


def is_combined(name: str) -> bool:
    """Whether a name is that of a combination, and of no adapter."""
    return _MARKS.search(name) is not None


def read_combination(text: str) -> list[Weighted]:
    """Returns the adapters of a combination with their weights, as they are written. Raises ValueError, which says what
    is wrong."""
    parts = [part.strip() for part in text.split("+")]
    if len(parts) > MAX_MEMBERS:
        raise ValueError(f"it has {len(parts)} adapters, and {MAX_MEMBERS} are the most")
    members = [_read_part(part) for part in parts]
    if not math.isfinite(sum(abs(weight) for _, weight in members)):
        raise ValueError("the weights are too large")
    return members


def _read_part(part: str) -> Weighted:
    name, mark, weight = (one.strip() for one in part.partition("*"))
    if not name or (mark and not _WEIGHT.fullmatch(weight)):
        raise ValueError(f"{part[:80]!r} is not NAME or NAME*WEIGHT, such as sql*0.7")
    return name, float(weight) if mark else 1.0


def summed(members: Iterable[Weighted]) -> list[Weighted]:
    """Returns each adapter once, in the order of names, without those whose weights add up to 0. The order of
    `members` changes nothing."""
    weights: dict[str, list[float]] = {}
    for name, weight in members:
        weights.setdefault(name, []).append(weight)
    totals = ((name, math.fsum(some)) for name, some in weights.items())  # each is rounded once, in any order
    return sorted((name, total) for name, total in totals if total)


def combined_name(members: Iterable[Weighted]) -> str:
    """Returns the name of a combination, canonical of what `summed` returns. An adapter with the weight 1 has its own
    name there."""
    return "+".join(name if weight == 1.0 else f"{name}*{weight!r}".replace("e+", "e") for name, weight in members)


def members_of(name: str) -> list[Weighted]:
    """Returns the adapters and weights of a canonical name, also of one adapter's. Empty for any other text."""
    try:
        members = read_combination(name) if is_combined(name) else [(name, 1.0)]
    except ValueError:
        return []
    is_canonical = all(ADAPTER_NAME.fullmatch(one) for one, _ in members) and combined_name(summed(members)) == name
    return members if is_canonical else []
