"""Aliases: names that stand for an adapter's name, such as prod for sql-v7, and are switched in one step.

A request resolves its alias once, when it is read, on the instance that received it. With peers, aliases are the same
on all instances; the adapter before is part of an alias, so that any instance can roll it back.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from caraserve.errors import AdapterRejected, NotFound
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.util.option_values import ADAPTER_NAME

log = logging.getLogger(__name__)

_KIND = "alias"
_MOST_ALIASES = 10_000


@dataclass(frozen=True, slots=True)
class Alias:
    """A name, the adapter that it stands for, and the one before that."""

    name: str
    adapter: str
    previous: str | None = None


class Aliases:
    """Aliases by name. Runs on the event loop."""

    def __init__(self, settings: ReplicatedSettings, is_known: Callable[[str], bool]) -> None:
        """Reads the aliases of earlier runs; adds a complaint to the settings' for each that is not valid. `is_known`:
        whether a name stands for an adapter on this instance."""
        self.version = 0  # changes with every alias
        self._settings, self._is_known = settings, is_known
        self._aliases: dict[str, Alias] = {}
        self._before: dict[str, str] = {}  # what an alias stood for here, while its adapter is not known here yet
        self._writing = asyncio.Lock()
        settings.attach(_KIND, self._apply)

    def all(self) -> list[Alias]:
        """Returns all aliases by name."""
        return sorted(self._aliases.values(), key=lambda alias: alias.name)

    def names_of(self, adapter: str) -> list[str]:
        """Returns the names of the aliases that stand for an adapter."""
        return sorted(alias.name for alias in self._aliases.values() if alias.adapter == adapter)

    def find(self, name: str) -> Alias | None:
        """Returns the alias of that name, or None."""
        return self._aliases.get(name)

    def get(self, name: str) -> Alias:
        """Returns the alias of that name. Raises NotFound."""
        if (alias := self.find(name)) is None:
            raise NotFound(f"There is no alias {name[:200]!r}; GET /v1/aliases lists them.", param="name")
        return alias

    def target(self, name: str, is_known: Callable[[str], bool]) -> str:
        """Returns the adapter that a name stands for: itself if it is no alias, and the one before while the adapter to
        which another instance has switched the alias is not known here yet. `is_known`: whether a name stands for an
        adapter."""
        if (alias := self.find(name)) is None:
            return name
        if (before := self._before.get(name)) is not None:
            if not is_known(alias.adapter) and is_known(before):
                return before
            del self._before[name]
        return alias.adapter

    async def point(self, name: str, adapter: str) -> Alias:
        """Points an alias at an adapter; the one that it stood for before is kept, for a rollback. Raises
        AdapterRejected if there are too many, or CaraServeError if the registry cannot be written."""
        async with self._writing:
            old = self.find(name)
            if old is None and len(self._aliases) >= _MOST_ALIASES:
                raise AdapterRejected(f"there are {_MOST_ALIASES} aliases already; delete one first", param="name")
            if old is not None and old.adapter == adapter:
                return old
            alias = Alias(name, adapter, None if old is None else old.adapter)
            await self._settings.write(_KIND, name, {"adapter": adapter, "previous": alias.previous})
            return alias

    async def remove(self, name: str) -> None:
        """Removes an alias. Raises NotFound."""
        async with self._writing:
            self.get(name)
            await self._settings.write(_KIND, name, None)

    async def remove_of(self, adapter: str) -> list[str]:
        """Removes the aliases that stand for an adapter when it is their turn. Returns the names of those removed."""
        removed = []
        async with self._writing:
            for name in self.names_of(adapter):
                if (alias := self.find(name)) is None or alias.adapter != adapter:
                    continue  # another instance has changed it while those before it were written
                await self._settings.write(_KIND, name, None)
                removed.append(name)
        return removed

    def _apply(self, name: str, body: dict[str, Any] | None) -> bool:
        """Takes an alias that was changed, here or on another instance. Returns False for one that is not valid: the
        one before stays."""
        alias = None if body is None else _alias(name, body)
        if alias is None and body is not None:
            log.warning("the alias %s of another instance is not valid here and is left out", name)
            return False
        old = self._aliases.pop(name, None)
        before = self._before.pop(name, old.adapter if old is not None else None)
        if alias is not None:
            self._aliases[name] = alias
            if before is not None and not self._is_known(alias.adapter):
                self._before[name] = before
        self.version += 1
        return True


def _alias(name: str, body: dict[str, Any]) -> Alias | None:
    """Returns the alias that settings describe, or None if they are not valid."""
    adapter, previous = body.get("adapter"), body.get("previous")
    return Alias(name, adapter, previous) if _is_name(adapter) and (previous is None or _is_name(previous)) else None


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and ADAPTER_NAME.fullmatch(value) is not None
