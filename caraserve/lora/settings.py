"""Labels and pins of adapters by name, kept in the registry. They are this instance's own.

A pinned adapter is not evicted: from host memory, to which it is read at once, or also from the device, once a request
has brought it there. The pin belongs to the name and follows it to another version.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from caraserve.config import PINS
from caraserve.errors import AdapterRejected
from caraserve.lora.catalog import Catalog
from caraserve.lora.registry import Registry
from caraserve.util.units import human_bytes

_KIND = "adapter"
_PINNED_SHARE = 2  # all pinned adapters together take at most half of a cache, so that others find room


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What an admin has set for an adapter. `pinned`: one of `PINS`, or None."""

    labels: Mapping[str, str] = field(default_factory=dict)
    pinned: str | None = None


class SettingsStore:
    """Settings by adapter name. Runs on the event loop; the registry is written on threads."""

    def __init__(self, registry: Registry, catalog: Catalog) -> None:
        """Applies the settings of earlier runs to the adapters of the start."""
        self._registry, self._catalog = registry, catalog
        self._writing = asyncio.Lock()
        self._settings: dict[str, AdapterSettings] = {}
        for name, body in registry.settings(_KIND).items():
            labels, pinned = body.get("labels"), body.get("pinned")
            if _are_labels(labels) and (pinned is None or pinned in PINS):
                self._settings[name] = AdapterSettings(labels, pinned)
                catalog.manager.set_pin(name, pinned)
            else:
                registry.complaints.append(f"the settings of {name!r} in --registry are not valid and are left out")

    def get(self, name: str) -> AdapterSettings:
        """Returns an adapter's settings."""
        return self._settings.get(name, AdapterSettings())

    async def set_labels(self, name: str, labels: Mapping[str, str]) -> None:
        """Replaces an adapter's labels."""
        async with self._writing:
            await self._put(name, replace(self.get(name), labels=labels))

    async def set_pin(self, name: str, pinned: str | None) -> None:
        """Pins an adapter, or ends its pin. Raises AdapterRejected if the pinned ones would take more than half of a
        cache."""
        async with self._writing:
            if pinned is not None:
                self._refuse_too_many(name, pinned)
            await self._put(name, replace(self.get(name), pinned=pinned))
            self._catalog.manager.set_pin(name, pinned)

    async def remove(self, name: str) -> None:
        """Removes the settings of an adapter that was deleted."""
        async with self._writing:
            if name in self._settings:
                await asyncio.to_thread(self._registry.put_setting, _KIND, name, None)
                del self._settings[name]
                self._catalog.manager.set_pin(name, None)

    async def _put(self, name: str, settings: AdapterSettings) -> None:
        body: dict[str, Any] = {"labels": dict(settings.labels), "pinned": settings.pinned}
        await asyncio.to_thread(self._registry.put_setting, _KIND, name, body)
        self._settings[name] = settings

    def _refuse_too_many(self, name: str, pinned: str) -> None:
        sizes = {"host": self._catalog.rules.host_bytes, "device": self._catalog.rules.device_bytes}
        wanted = {other: one.pinned for other, one in self._settings.items() if one.pinned} | {name: pinned}
        for cache, size in sizes.items():
            infos = [self._catalog.find(other) for other, pin in wanted.items() if cache in (pin, "host")]
            total = sum({info.digest: info.num_bytes for info in infos if info is not None}.values())
            if total > size // _PINNED_SHARE:
                raise AdapterRejected(
                    f"the pinned adapters would take {human_bytes(total)} of the {cache} cache's {human_bytes(size)}; "
                    "half of it at most can be pinned",
                    param="pinned",
                )


def _are_labels(value: Any) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
