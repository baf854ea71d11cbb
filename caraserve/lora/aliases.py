"""Aliases: names that stand for an adapter's name, such as prod for sql-v7, and are switched in one step.

A request resolves its alias once, when it is read. Aliases are this instance's own; those of other instances are set
there.
"""

import asyncio
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from caraserve.errors import AdapterRejected, NotFound
from caraserve.lora.registry import Registry
from caraserve.util.option_values import ADAPTER_NAME

_KIND = "alias"
_MOST_ALIASES = 10_000


@dataclass(frozen=True, slots=True)
class Alias:
    """A name, the adapter that it stands for, and the one before that."""

    name: str
    adapter: str
    previous: str | None = None


class Aliases:
    """Aliases by name. Runs on the event loop; the registry is written on threads."""

    def __init__(self, registry: Registry) -> None:
        """Reads the aliases of earlier runs; adds a complaint to the registry's for each that is not valid."""
        self.version = 0  # changes with every alias
        self._registry = registry
        self._aliases: dict[str, Alias] = {}
        self._writing = asyncio.Lock()
        for name, body in registry.settings(_KIND).items():
            adapter, previous = body.get("adapter"), body.get("previous")
            if _is_name(adapter) and (previous is None or _is_name(previous)):
                self._aliases[name] = Alias(name, adapter, previous)
            else:
                registry.complaints.append(f"the alias {name!r} in --registry is not valid and is left out")

    def all(self) -> list[Alias]:
        """Returns all aliases by name."""
        return sorted(self._aliases.values(), key=lambda alias: alias.name)

    def find(self, name: str) -> Alias | None:
        """Returns the alias of that name, or None."""
        return self._aliases.get(name)

    def get(self, name: str) -> Alias:
        """Returns the alias of that name. Raises NotFound."""
        if (alias := self.find(name)) is None:
            raise NotFound(f"There is no alias {name[:200]!r}; GET /v1/aliases lists them.", param="name")
        return alias

    async def point(self, name: str, adapter: str) -> Alias:
        """Points an alias at an adapter; the one that it stood for before is kept for `roll_back`. Raises
        AdapterRejected if there are too many, or CaraServeError if the registry cannot be written."""
        async with self._writing:
            old = self.find(name)
            if old is None and len(self._aliases) >= _MOST_ALIASES:
                raise AdapterRejected(f"there are {_MOST_ALIASES} aliases already; delete one first", param="name")
            if old is not None and old.adapter == adapter:
                return old
            return await self._put(Alias(name, adapter, None if old is None else old.adapter))

    async def roll_back(self, name: str) -> Alias:
        """Exchanges an alias's adapter and the one before it. Raises NotFound, or AdapterRejected if there is none."""
        async with self._writing:
            old = self.get(name)
            if old.previous is None:
                raise AdapterRejected(f"the alias {name!r} has stood for no adapter but {old.adapter!r}", param="name")
            return await self._put(Alias(name, old.previous, old.adapter))

    async def remove(self, name: str) -> None:
        """Removes an alias. Raises NotFound."""
        async with self._writing:
            self.get(name)
            await asyncio.to_thread(self._registry.put_setting, _KIND, name, None)
            del self._aliases[name]
            self.version += 1

    async def _put(self, alias: Alias) -> Alias:
        body: dict[str, Any] = asdict(alias)
        del body["name"]
        await asyncio.to_thread(self._registry.put_setting, _KIND, alias.name, body)
        self._aliases[alias.name] = alias
        self.version += 1
        return alias


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and ADAPTER_NAME.fullmatch(value) is not None
