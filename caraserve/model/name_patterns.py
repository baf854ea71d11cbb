"""Regular expressions over the names of modules, as configurations have them, without backtracking. Pure.

Python's `re` can take time that doubles with each character, as with `(a+)+$`, and a configuration may come from
anyone. Here a pattern becomes a graph of steps, and all steps to which a part of a name can lead are followed at once.
What `re` has beyond groups, alternatives, repeats and lookaheads is refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

_MOST_CHARACTERS = 1000  # of a pattern
_MOST_DEPTH = 20  # of groups in groups
_MOST_STEPS = 2000  # of a pattern, with repeats written out
_MOST_TAKEN = 200_000  # for one name, 0.1 s; usual patterns take a hundred
_GROUPS = {"(": None, "(?:": None, "(?=": False, "(?!": True}  # whether a lookahead is negated
_TOKEN = re.compile(
    r"""
    \\. | \[\^?\]?(?:\\.|[^\]\\])*\]            # an escape, a class
    | \(\?[:=!] | \(\?<?.? | [()|]              # groups; those that are refused
    | (?:[*+?]|\{(?:\d+|\d*,\d*)\})\?? | .      # a repeat; any other character
    """,
    re.VERBOSE | re.DOTALL,
)
_REPEAT = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})\??")
_BOUNDS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_END = 0  # the step at which a name has matched


class PatternError(ValueError):
    """A pattern is not read, or takes too long; says why."""


@dataclass(frozen=True, slots=True)
class _Character:
    """One character of some kind, or a place such as the end."""

    pattern: re.Pattern[str]
    after: int = _END


@dataclass(slots=True)
class _Choice:
    """One of several steps."""

    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Lookahead:
    first: int
    is_negated: bool
    after: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Alternatives, each of which is a sequence of items with their repeats. `is_negated`: None if it is no
    lookahead."""

    alternatives: Sequence[Sequence[tuple["_Group | _Character", int, int | None]]]
    is_negated: bool | None = None


class NamePattern:
    """A pattern that is matched from the start of a name, as by `re.match`. Raises PatternError."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MOST_CHARACTERS:
            raise PatternError(f"has {len(pattern)} characters; up to {_MOST_CHARACTERS} are read")
        self._tokens, self._made = _TOKEN.findall(pattern)[::-1], 0
        self._steps: list[_Character | _Choice | _Lookahead | None] = [None]
        whole = self._alternatives(None, 0)
        if self._tokens:
            raise PatternError("has a ) too many")
        self._first = self._after_group(whole, _END)

    def matches(self, name: str) -> bool:
        """Returns whether the pattern matches from the start of a name. Raises PatternError if that takes long."""
        return _Match(self._steps, name).reaches(self._first, 0)

    def _alternatives(self, is_negated: bool | None, depth: int) -> _Group:
        """Reads up to the end of a group."""
        if depth > _MOST_DEPTH:
            raise PatternError(f"has groups in groups {depth} deep; up to {_MOST_DEPTH} are read")
        found: list[list[tuple[_Group | _Character, int, int | None]]] = [[]]
        while self._tokens and self._tokens[-1] != ")":
            token = self._tokens.pop()
            if token == "|":
                found.append([])
                continue
            if _REPEAT.fullmatch(token):
                raise PatternError(f"repeats nothing, or a repeat, with {token}")
            item: _Group | _Character
            if token in _GROUPS:
                item = self._alternatives(_GROUPS[token], depth + 1)
                if not self._tokens:
                    raise PatternError("has a group without an end")
                self._tokens.pop()
            else:
                item = _character(token)
            found[-1].append((item, *self._repeats()))
        return _Group(found, is_negated)

    def _repeats(self) -> tuple[int, int | None]:
        """Reads how often an item is repeated: at least, at most."""
        match = _REPEAT.fullmatch(self._tokens[-1]) if self._tokens else None
        if match is None:
            return 1, 1
        self._tokens.pop()
        if match[1]:
            return _BOUNDS[match[1]]
        least = int(match[2] or 0)
        most = (int(match[4]) if match[4] else None) if match[3] else least
        if max(least, most or 0) > _MOST_STEPS:
            raise PatternError(f"repeats {match[0]}; up to {_MOST_STEPS} times are read")
        return least, most

    def _after_group(self, group: _Group, after: int) -> int:
        """Adds the steps of a group that `after` follows; returns the first."""
        if group.is_negated is not None:
            ahead = self._after_group(_Group(group.alternatives), _END)
            return self._added(_Lookahead(ahead, group.is_negated, after))
        firsts = []
        for items in group.alternatives:
            first = after
            for item, least, most in reversed(items):
                first = self._after_item(item, least, most, first)
            firsts.append(first)
        return firsts[0] if len(firsts) == 1 else self._added(_Choice(firsts))

    def _after_item(self, item: _Group | _Character, least: int, most: int | None, after: int) -> int:
        first = after
        if most is None:
            again = _Choice()
            first = self._added(again)
            again.steps += [self._once(item, first), after]
        else:
            for _ in range(most - least):
                first = self._added(_Choice([self._once(item, first), after]))
        for _ in range(least):
            first = self._once(item, first)
        return first

    def _once(self, item: _Group | _Character, after: int) -> int:
        if isinstance(item, _Group):
            self._count()
            return self._after_group(item, after)
        return self._added(_Character(item.pattern, after))

    def _added(self, step: _Character | _Choice | _Lookahead) -> int:
        self._count()
        self._steps.append(step)
        return len(self._steps) - 1

    def _count(self) -> None:
        self._made += 1
        if self._made > _MOST_STEPS:
            raise PatternError(f"has more than {_MOST_STEPS} steps with its repeats written out")


def _character(token: str) -> _Character:
    if token.startswith("(?") or (token[0] == "\\" and token[1:].isdigit()):
        raise PatternError(f"has {token}, which is not read; groups are (…), (?:…), (?=…) and (?!…)")
    try:
        return _Character(re.compile(token))
    except re.error as error:
        raise PatternError(f"has {token}: {error}") from None


class _Match:
    """Follows the steps of a pattern through a name."""

    def __init__(self, steps: Sequence[_Character | _Choice | _Lookahead | None], name: str) -> None:
        self._steps, self._name, self._taken = steps, name, 0
        self._ahead: dict[tuple[int, int], bool] = {}  # results of lookaheads by their first step and place

    def reaches(self, first: int, at: int) -> bool:
        """Returns whether steps from one on lead to the end, from a place in the name on."""
        following = {first}
        while following:
            todo, seen, following = [*following], set[int](), set()
            while todo:
                index = todo.pop()
                if index in seen:
                    continue
                seen.add(index)
                match self._steps[index]:
                    case None:
                        return True
                    case _Choice(steps):
                        todo += steps
                    case _Lookahead(ahead, is_negated, after):
                        if self._is_ahead(ahead, at) != is_negated:
                            todo.append(after)
                    case _Character(pattern, after):
                        found = pattern.match(self._name, at)
                        if found is not None and found.end() > at:
                            following.add(after)
                        elif found is not None:
                            todo.append(after)
            self._taken += len(seen)
            if self._taken > _MOST_TAKEN:
                raise PatternError(f"takes more than {_MOST_TAKEN} steps for {self._name}")
            at += 1
        return False

    def _is_ahead(self, first: int, at: int) -> bool:
        if (first, at) not in self._ahead:
            self._ahead[first, at] = self.reaches(first, at)
        return self._ahead[first, at]


@lru_cache(maxsize=1024)
def name_pattern(pattern: str) -> NamePattern:
    """Returns a pattern; the last ones are kept."""
    return NamePattern(pattern)
