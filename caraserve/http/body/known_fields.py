"""Checks the names of a body's fields by a table of its route: served, refused, or ignored.

A field that selects weights, constrains the output, or changes the prompt, the sampling or the response, and is not
served, is refused unless its value asks for nothing. A name in no table is unknown: ignored, unless it looks misspelt.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from caraserve.errors import InvalidRequest
from caraserve.http.body.field_types import BodyField, Fields, shown

MAX_UNKNOWN = 64  # fields of one body that no table names; real clients send about a dozen
_LABEL_CHARACTERS = 256  # of a name, that are looked at
_WEIGHT_WORDS = ("lora", "adapter", "peft")  # in names of fields that select weights
NAME_THE_ADAPTER = "name one adapter as model"
LEAVE_OUT = "leave it out"
_INSTEAD = re.compile(r"send (\w+) instead")

_SHORTEST = 4  # letters of a name, from which one letter more or less is a misspelling; shorter names are all alike
_LONG = 6  # letters of a name, from which one other letter is a misspelling: `type` is not `typ_p`
_LONGEST = 40  # letters; all known names are shorter


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer but is not served; `neutral` values do not. `advice` ends the message."""

    advice: str
    neutral: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class KnownFields:
    """What one route reads, refuses and ignores. A name in none of the three is unknown, and ignored unless it looks
    like a misspelt one, or like one that selects weights, for which `weights_advice` says what works. `types`: of the
    served fields, by name. `is_closed`: nothing is ignored, also no null, because the body says what to store: one that
    is not understood would look done. Compared by identity, so that functions of a table can be cached."""

    types: Mapping[str, BodyField]
    refused: Mapping[str, Refused]
    ignored: frozenset[str] = frozenset()
    weights_advice: str = NAME_THE_ADAPTER
    is_closed: bool = False

    @property
    def served(self) -> Set[str]:
        """The names of the served fields."""
        return self.types.keys()


# --- parts of tables ---


def served(*fields: BodyField) -> dict[str, BodyField]:
    """Returns served fields by their names."""
    return {field.name: field for field in fields}


def refused(advice: str, names: str, *neutral: object) -> dict[str, Refused]:
    """Returns refused fields with one advice, by their `names`, which spaces separate."""
    return dict.fromkeys(names.split(), Refused(advice, neutral))


def instead(name: str, others: str, *neutral: object) -> dict[str, Refused]:
    """Returns refused fields that are served under another `name`; as `refused`."""
    return refused(f"send {name} instead", others, *neutral)


def refused_beside(types: Mapping[str, BodyField], refused: Mapping[str, Refused]) -> dict[str, Refused]:
    """The refused fields of a route that serves `types`. Where another field would have to be sent instead that this
    route refuses too, the advice is the one for that field."""
    beside = {name: one for name, one in refused.items() if name not in types}
    for name, one in beside.items():
        other = _INSTEAD.fullmatch(one.advice)
        if other is not None and other[1] not in types:
            advice = beside[other[1]].advice if other[1] in beside else LEAVE_OUT
            beside[name] = Refused(advice, one.neutral)
    return beside


# --- checks ---


def check_fields(fields: Fields, known: KnownFields) -> None:
    """Raises InvalidRequest for a field that is not served and would change the answer, for one that looks misspelt,
    and for too many unknown ones; in a closed table for any other than the served. Null is the same as absent, but not
    in a closed table."""
    unknown = {}
    for name, value in fields.items():
        if (refusal := known.refused.get(name)) is not None:
            fields.raw(name)  # read: a neutral value is not listed as ignored
            if known.is_closed or (value is not None and value not in refusal.neutral):
                raise InvalidRequest(f"{name} is not supported by this server; {refusal.advice}.", param=name)
        elif name not in known.served and name not in known.ignored:
            unknown[name] = value
            if len(unknown) > MAX_UNKNOWN:  # checked before any comparison: a body may have thousands
                raise InvalidRequest(f"The body has more than {MAX_UNKNOWN} fields that this server does not know.")
    for name, value in unknown.items():
        if (value is not None or known.is_closed) and (advice := _advice(name, known)) is not None:
            raise InvalidRequest(f"Unknown field {shown(name)}; {advice}", param=name[:64])


def _advice(name: str, known: KnownFields) -> str | None:
    """What to do about a field that no table names; None if it may be ignored."""
    meant = _spellings(known).likely(name)
    if meant in known.served:
        return f"did you mean {meant!r}?"
    if known.is_closed:
        return f"{known.refused[meant].advice}." if meant else f"this route takes {', '.join(known.served)}."
    if any(word in name[:_LABEL_CHARACTERS].lower() for word in _WEIGHT_WORDS):
        return f"{known.weights_advice}."
    return None if meant is None else f"{known.refused[meant].advice}."


class _Spellings:
    """Known names by their letters, and by their letters without one of them. A look-up in these takes microseconds;
    comparing all pairs of names would take milliseconds."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: of those that are as near, the first is found."""
        self._whole: dict[str, str] = {}
        self._shorter: dict[str, str] = {}
        for name in names:
            plain = _plain(name)
            self._whole.setdefault(plain, name)
            if len(plain) >= _SHORTEST:
                for at in range(len(plain)):
                    self._shorter.setdefault(plain[:at] + plain[at + 1 :], name)

    def likely(self, name: str) -> str | None:
        """Returns the known name with the same letters, or with one letter more or less; for longer names also one with
        one other letter, or two exchanged."""
        plain = _plain(name)
        if plain in self._whole:
            return self._whole[plain]
        if not _SHORTEST <= len(plain) <= _LONGEST:
            return None
        cut = [plain[:at] + plain[at + 1 :] for at in range(len(plain))]
        met = [self._shorter.get(plain), *map(self._whole.get, cut)]
        if len(plain) >= _LONG:
            met += map(self._shorter.get, cut)
        return next(filter(None, met), None)


def _plain(name: str) -> str:
    """The letters and digits alone, in lower case: `maxTokens`, `max-tokens` and `max_tokens` are the same."""
    return "".join(filter(str.isalnum, name[: 2 * _LONGEST])).lower()


@functools.cache
def _spellings(known: KnownFields) -> _Spellings:
    return _Spellings((*sorted(known.served), *sorted(known.refused)))
