"""Labels, pins and request defaults of adapters by name, kept in the registry and, with peers, the same on all.

A pinned adapter is not evicted: from host memory, to which it is read at once where its folder is, or also from the
device, once a request has brought it there. The pin belongs to the name and follows it to another version. It fetches
nothing from other instances.
"""

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeGuard

from caraserve.core.adapter_rules import LABEL_NAME, MAX_LABEL_CHARACTERS, MAX_LABELS, PINNED_SHARE, PINS
from caraserve.errors import AdapterRejected, InvalidRequest
from caraserve.lora.catalog import Catalog
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.util.tasks import Tasks
from caraserve.util.units import human_bytes

log = logging.getLogger(__name__)

_KIND = "adapter"
_HEARD_S = 5.0  # from a deletion until all other instances have heard of it, and this one of what they wrote before


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """What an adapter's requests take where they leave a field out; None: as without the adapter.

    `chat_template`: Jinja text, in place of the model's. `sampling`: values by the names of the request's fields.
    """

    chat_template: str | None = None
    stop: tuple[str, ...] | None = None
    sampling: Mapping[str, float] | None = None

    @property
    def digest(self) -> str:
        """Identifies the values; empty without any."""
        if self == RequestDefaults():
            return ""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


NO_DEFAULTS = RequestDefaults()
ReadDefaults = Callable[[Mapping[str, Any]], RequestDefaults]
"""Checks the defaults among the fields of a JSON object. Raises InvalidRequest."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What an admin has set for an adapter. `pinned`: one of `PINS`, or None. `folder_template`: the chat template that
    its files have brought, in place of the model's where `defaults` has none."""

    labels: Mapping[str, str] = field(default_factory=dict)
    pinned: str | None = None
    defaults: RequestDefaults = NO_DEFAULTS
    folder_template: str | None = None

    @property
    def request_defaults(self) -> RequestDefaults:
        """What requests take where they leave a field out."""
        if self.folder_template is None or self.defaults.chat_template is not None:
            return self.defaults
        return replace(self.defaults, chat_template=self.folder_template)


class SettingsStore:
    """Settings by adapter name. Runs on the event loop."""

    def __init__(
        self,
        settings: ReplicatedSettings,
        catalog: Catalog,
        read_defaults: ReadDefaults,
        *,
        takes_folder_templates: bool = False,
    ) -> None:
        """Applies the settings of earlier runs to the adapters of the start. `takes_folder_templates`: else those that
        other instances or earlier runs have set are left out."""
        self._replicated, self._catalog, self._read_defaults = settings, catalog, read_defaults
        self._takes_folder_templates = takes_folder_templates
        self._writing = asyncio.Lock()
        self._removals = Tasks()
        self._settings: dict[str, AdapterSettings] = {}
        settings.attach(_KIND, self._apply)

    def get(self, name: str) -> AdapterSettings:
        """Returns an adapter's settings."""
        return self._settings.get(name, AdapterSettings())

    async def change(self, name: str, changes: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Replaces fields of an adapter's settings and of their `defaults`, which have been checked, in one write.
        Raises AdapterRejected if the pinned adapters would take more than half of a cache."""
        async with self._writing:
            if (pinned := changes.get("pinned")) is not None:
                self._refuse_too_many(name, pinned)
            settings = replace(self.get(name), **changes)
            await self._write(name, replace(settings, defaults=replace(settings.defaults, **defaults)))

    async def set_folder_template(self, name: str, template: str | None) -> None:
        """Sets the chat template that an adapter's files have brought, or None. Raises AdapterRejected if it is too
        large."""
        async with self._writing:
            if (settings := self.get(name)).folder_template != template:
                await self._write(name, replace(settings, folder_template=template))

    async def _write(self, name: str, settings: AdapterSettings) -> None:
        defaults = settings.defaults
        body: dict[str, Any] = {"labels": dict(settings.labels), "pinned": settings.pinned, **asdict(defaults)}
        body["stop"] = None if defaults.stop is None else list(defaults.stop)  # as JSON has it
        if settings.folder_template is not None:
            body["folder_template"] = settings.folder_template
        await self._replicated.write(_KIND, name, body)

    async def remove(self, name: str) -> None:
        """Removes the settings of an adapter that was deleted."""
        async with self._writing:
            if name in self._settings:
                await self._replicated.write(_KIND, name, None)

    def remove_later(self, name: str, is_deleted: Callable[[], bool]) -> None:
        """Removes the settings that another instance writes before it has heard of a deletion, once they must have
        arrived. `is_deleted`: returns whether the name still stands for no adapter."""

        async def remove() -> None:
            await asyncio.sleep(_HEARD_S)
            if is_deleted():
                await self.remove(name)

        self._removals.start(remove(), f"removal of the settings of {name}")

    async def close(self) -> None:
        """Ends the removals in progress."""
        await self._removals.end()

    def _apply(self, name: str, body: dict[str, Any] | None) -> bool:
        """Takes settings that were changed, here or on another instance. Returns False for invalid ones: those before
        stay."""
        settings = AdapterSettings() if body is None else self._read(body)
        if settings is None:
            log.warning("the settings of %s of another instance are not valid here and are left out", name)
            return False
        if body is None:
            self._settings.pop(name, None)
        else:
            self._settings[name] = settings
        self._catalog.manager.set_pin(name, settings.pinned)
        return True

    def _read(self, body: Mapping[str, Any]) -> AdapterSettings | None:
        """Returns the settings of a stored body; None if one is not valid."""
        labels, pinned = body.get("labels"), body.get("pinned")
        template = body.get("folder_template")
        if not _are_labels(labels) or pinned not in (None, *PINS) or not isinstance(template, str | None):
            return None
        try:
            defaults = self._read_defaults(body)
        except InvalidRequest:
            return None
        return AdapterSettings(labels, pinned, defaults, template if self._takes_folder_templates else None)

    def _refuse_too_many(self, name: str, pinned: str) -> None:
        sizes = {"host": self._catalog.rules.host_bytes, "device": self._catalog.rules.device_bytes}
        wanted = {other: one.pinned for other, one in self._settings.items() if one.pinned} | {name: pinned}
        for cache, size in sizes.items():
            infos = [self._catalog.find(other) for other, pin in wanted.items() if cache in (pin, "host")]
            total = sum({info.digest: info.num_bytes for info in infos if info is not None}.values())
            if total > size // PINNED_SHARE:
                raise AdapterRejected(
                    f"the pinned adapters would take {human_bytes(total)} of the {cache} cache's {human_bytes(size)}; "
                    "half of it at most can be pinned",
                    param="pinned",
                )


def _are_labels(value: Any) -> TypeGuard[dict[str, str]]:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_LABELS
        and all(isinstance(text, str) and len(text) <= MAX_LABEL_CHARACTERS for text in value.values())
        and all(re.fullmatch(LABEL_NAME, name) for name in value)
    )
