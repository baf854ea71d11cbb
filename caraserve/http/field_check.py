"""Checks the names of a body's fields before their values are read: what is not served is refused or misspelt. Pure.

Called by each route's parser with its table from `request_schema.py`.
"""

import functools

from caraserve.errors import InvalidRequest
from caraserve.http.request_schema import KnownFields
from caraserve.http.validation import Fields, shown

MAX_UNKNOWN = 64  # fields of one body that no table names; real clients send about a dozen
_SHORTEST = 4  # letters of a name of which one may be less or more; shorter ones are all alike
_LONG = 6  # letters of a name of which one may be another: `type` is not `typ_p`
_LONGEST = 40  # letters; all known names are shorter


def check_fields(fields: Fields, known: KnownFields) -> None:
    """Raises InvalidRequest for a field that would change the answer but is not served, one that looks like a misspelt
    one, and too many unknown ones. Null is the same as absent."""
    unknown = {}
    for name, value in fields.items():
        if (refused := known.refused.get(name)) is not None:
            fields.raw(name)  # read: a neutral value is not listed as ignored
            if value is not None and value not in refused.neutral:
                raise InvalidRequest(f"{name} is not supported by this server; {refused.advice}.", param=name)
        elif name not in known.served and name not in known.ignored:
            unknown[name] = value
            if len(unknown) > MAX_UNKNOWN:  # before any is compared: a body may have thousands
                raise InvalidRequest(f"The body has more than {MAX_UNKNOWN} fields that this server does not know.")
    for name, value in unknown.items():
        if value is not None and (meant := _likely(name, known)) is not None:
            raise InvalidRequest(f"Unknown field {shown(name)}; did you mean {meant!r}?", param=name[:64])


def _likely(name: str, known: KnownFields) -> str | None:
    """The known field that `name` may be a misspelling of: the same letters, or one letter less or more; in longer
    names also another letter, or two exchanged."""
    plain = _plain(name)
    whole, shorter = _spellings(known)
    if plain in whole:
        return whole[plain]
    if not _SHORTEST <= len(plain) <= _LONGEST:
        return None
    cut = [plain[:at] + plain[at + 1 :] for at in range(len(plain))]
    met = [shorter.get(plain), *map(whole.get, cut)]
    if len(plain) >= _LONG:
        met += map(shorter.get, cut)
    return next(filter(None, met), None)


@functools.cache
def _spellings(known: KnownFields) -> tuple[dict[str, str], dict[str, str]]:
    """Every known name by its letters, and by its letters without one of them. Looking names up in these takes
    microseconds, where comparing each with each would take milliseconds."""
    whole: dict[str, str] = {}
    shorter: dict[str, str] = {}
    for name in (*sorted(known.served), *sorted(known.refused)):  # a served name before a refused one that is as near
        plain = _plain(name)
        whole.setdefault(plain, name)
        if len(plain) >= _SHORTEST:
            for at in range(len(plain)):
                shorter.setdefault(plain[:at] + plain[at + 1 :], name)
    return whole, shorter


def _plain(name: str) -> str:
    """The letters and digits alone, in lower case: `maxTokens`, `max-tokens` and `max_tokens` are the same."""
    return "".join(filter(str.isalnum, name[: 2 * _LONGEST])).lower()
