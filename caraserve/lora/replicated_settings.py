"""Settings by kind and name, such as aliases: in the registry of this instance and, with peers, the same on all.

    a request's change ─► registry ─► its user here and the observers, which tell other instances
    another instance's ─► its user here ─► registry

The last write wins, by a hybrid clock, on every instance alike. Removed settings are remembered for 30 days; an
instance that was off for longer brings back what was removed meanwhile.
"""

import asyncio
import base64
import binascii
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from caraserve.config import MAX_SETTING
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.registry import Registry, Setting
from caraserve.util.hybrid_clock import HybridClock
from caraserve.util.tasks import Tasks

log = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 20  # of a body in JSON
_LEVEL = 1  # of zlib: 64 KiB of text take 0.6 ms, a third of the time of the default level

SettingObserver = Callable[[Setting], None]
Apply = Callable[[str, dict[str, Any] | None], None]


class ReplicatedSettings:
    """All settings. Runs on the event loop; the registry is written on threads."""

    def __init__(
        self,
        registry: Registry,
        observers: Sequence[SettingObserver] = (),
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`observers`: called with each setting that was written on this instance."""
        self.complaints = registry.complaints
        self._registry, self._observers, self._wall_ms = registry, observers, wall_ms
        self._clock = HybridClock()
        self._settings = {setting.key: setting for setting in registry.settings()}
        for setting in self._settings.values():
            self._clock.observe(setting.hlc)
        self._apply: dict[str, Apply] = {}  # by kind
        self._unstored: list[Setting] = []
        self._tasks = Tasks()

    def attach(self, kind: str, apply: Apply) -> dict[str, dict[str, Any]]:
        """Returns the bodies of one kind by name. `apply` is called with the name and the body, None if it was removed,
        for each change on any instance; it checks the fields, as the body may be of a later version's instance."""
        self._apply[kind] = apply
        found = [setting for setting in self._settings.values() if setting.kind == kind]
        return {setting.name: setting.body for setting in found if setting.body is not None}

    def all(self) -> list[Setting]:
        """Returns all settings, removed ones included."""
        return list(self._settings.values())

    async def write(self, kind: str, name: str, body: dict[str, Any] | None) -> None:
        """Sets or removes (None) the settings of a name. Returns when they are in the registry's file. Raises
        AdapterRejected for a body that is too large, or CaraServeError when the file cannot be written."""
        setting = Setting(kind, name, body, self._clock.next(self._wall_ms()))
        await asyncio.to_thread(self._store, setting)
        self._accept(setting)
        for observe in self._observers:
            observe(setting)

    def _store(self, setting: Setting) -> None:
        if setting.body is not None and len(packed(setting.body)) > MAX_SETTING:
            raise AdapterRejected(
                f"the settings of {setting.name!r} take over {MAX_SETTING} characters, compressed for other instances"
            )
        self._registry.put_settings([setting])

    def merge(self, settings: Iterable[Setting]) -> None:
        """Takes changes of other instances. They hold at once, and are in the registry's file soon after."""
        for setting in settings:
            self._clock.observe(setting.hlc)
            if self._accept(setting):
                self._unstored.append(setting)
        if self._unstored and all(task.done() for task in self._tasks):
            self._tasks.start(self._store_merged(), "cluster settings")

    async def _store_merged(self) -> None:
        while self._unstored:
            settings, self._unstored = self._unstored, []
            try:
                await asyncio.to_thread(self._registry.put_settings, settings)
            except CaraServeError as error:  # other instances have them, and send them again after a restart
                log.error("settings of other instances: %s", error.message)

    async def close(self) -> None:
        """Returns when all settings are in the registry's file."""
        await asyncio.gather(*self._tasks)

    def _accept(self, setting: Setting) -> bool:
        """Applies a setting, unless a newer one is here. Returns whether it was applied."""
        old = self._settings.get(setting.key)
        if old is not None and old.order >= setting.order:
            return False
        self._settings[setting.key] = setting
        if (apply := self._apply.get(setting.kind)) is not None:
            apply(setting.name, setting.body)
        return True


def packed(body: dict[str, Any]) -> str:
    """Returns a body as compressed JSON in base64."""
    return base64.b64encode(zlib.compress(json.dumps(body).encode(), _LEVEL)).decode()


def unpacked(text: str) -> dict[str, Any]:
    """Returns the body in a packed text. Raises ValueError."""
    unpacker = zlib.decompressobj()
    try:
        body = json.loads(unpacker.decompress(base64.b64decode(text, validate=True), _MAX_BODY_BYTES))
        json.dumps(body, ensure_ascii=False).encode()  # refuses lone surrogates, of which no response could be made
    except (zlib.error, binascii.Error, ValueError, RecursionError) as error:
        raise ValueError(f"no packed JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("no JSON object")
    return body
