"""Which folders of --adapters-dir are not served, and why: for the clients that ask for them, beside the log."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST_REFUSED = 1000
_MOST_CHARACTERS = 500  # of a reason


@dataclass(frozen=True, slots=True)
class RefusedFolder:
    """A folder that is not served, by its name, which would be its adapter's."""

    name: str
    reason: str
    since_s: float  # unix time


class RefusedFolders:
    """The newest refusals by name. Runs on the event loop."""

    def __init__(self, roots: Sequence[Path] = (), now: Callable[[], float] = time.time) -> None:
        """`roots`: folders whose paths no client learns."""
        self._roots, self._now = _pattern(roots), now
        self._refusals: dict[str, RefusedFolder] = {}  # the oldest first

    def note(self, name: str, reason: str) -> bool:
        """Records why a folder is not served. Returns False if that is known already."""
        reason = self._roots.sub("--adapters-dir", reason)[:_MOST_CHARACTERS]
        old = self._refusals.get(name)
        if old is not None and old.reason == reason:
            return False
        self._refusals.pop(name, None)
        self._refusals[name] = RefusedFolder(name, reason, self._now())
        if len(self._refusals) > _MOST_REFUSED:
            del self._refusals[next(iter(self._refusals))]
        return True

    def forget(self, name: str) -> None:
        """Removes a name's refusal: its adapter is served, or its folder is gone."""
        self._refusals.pop(name, None)

    def get(self, name: str) -> RefusedFolder | None:
        """Returns a name's refusal, or None."""
        return self._refusals.get(name)

    def all(self) -> list[RefusedFolder]:
        """Returns all refusals by name."""
        return sorted(self._refusals.values(), key=lambda refusal: refusal.name)


def why_alias(name: str) -> str:
    """Returns why a folder is not served whose name is that of an alias."""
    return f"{name!r} is an alias; rename the folder, or delete the alias"


def _pattern(roots: Sequence[Path]) -> re.Pattern[str]:
    """Returns what matches the folders' paths in a text, alone or before a slash; `/` tells nothing and stays."""
    longest_first = sorted((re.escape(str(root)) for root in roots if root != Path("/")), key=len, reverse=True)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(longest_first) or '(?!)'})(?![\w-]|\.\w)")
