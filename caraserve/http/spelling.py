"""Finds the known field of which an unknown one may be a misspelling."""

from collections.abc import Iterable

_SHORTEST = 4  # letters of a name, from which one letter more or less is a misspelling; shorter names are all alike
_LONG = 6  # letters of a name, from which one other letter is a misspelling: `type` is not `typ_p`
_LONGEST = 40  # letters; all known names are shorter


class Spellings:
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
