"""Settings by kind and name, such as aliases: in the registry of this instance and, with peers, the same on all.

    a request's change ─► registry ─► its user here and the observers, which tell other instances
    another instance's ─► its user here ─► registry

The last write wins, by a hybrid clock, on every instance alike. Removed settings are remembered for 30 days; an
instance that was off for longer brings back what was removed meanwhile.

Settings are kept as JSON texts. What another instance sends is refused, and neither kept nor stored, if its kind is not
known, if it is no valid body of its kind, or if all settings together would take too much memory.
"""

import asyncio
import base64
import binascii
import json
import logging
import re
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from caraserve.core.adapter_rules import MAX_SETTING, SETTING_KINDS
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.registry import Registry, Setting
from caraserve.util.hybrid_clock import HybridClock
from caraserve.util.tasks import Tasks
from caraserve.util.units import human_bytes

log = logging.getLogger(__name__)

_LEVEL = 1  # of zlib: 64 KiB of text take 0.6 ms, a third of the time of the default level
_MOST_BYTES = 64 << 20  # of all texts; 100,000 aliases and 10,000 chat templates of 4 kB
_SETTING_BYTES = 256  # of each setting beside its text
_MOST_REMOVED = 20_000  # remembered; beyond them, the first that were heard of are forgotten
_MOST_VALUES = 1000  # in a body, which has some dozens: 64,000 empty lists are 3 MB of memory in 190 kB of text
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)

SettingObserver = Callable[[Setting], None]
Apply = Callable[[str, dict[str, Any] | None], bool]


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
        self._settings: dict[tuple[str, str], Setting] = {}
        self._num_bytes = 0
        self._removed: dict[tuple[str, str], None] = {}
        self._forgotten: list[tuple[str, str]] = []  # and still in the registry's file
        for setting in registry.settings():
            self._clock.observe(setting.hlc)
            self._keep(setting)
        self._apply: dict[str, Apply] = {}  # by kind
        self._unstored: list[Setting] = []
        self._tasks = Tasks()

    def attach(self, kind: str, apply: Apply) -> None:
        """Calls `apply` with the name and the body of each setting of one kind, and from then on for each change on any
        instance; the body is None if it was removed. `apply` checks the fields, as the body may be of a later version's
        instance, and returns whether it takes the setting. Those of the file that it does not take are left out with a
        complaint."""
        self._apply[kind] = apply
        for setting in [one for one in self._settings.values() if one.kind == kind and one.text is not None]:
            if not self._is_taken(setting):
                self._drop(setting)
                named = f"the settings of {kind} {setting.name!r} in --registry"
                self.complaints.append(f"{named} are not valid and are left out")

    def all(self) -> list[Setting]:
        """Returns all settings, removed ones included."""
        return list(self._settings.values())

    async def write(self, kind: str, name: str, body: dict[str, Any] | None) -> None:
        """Sets or removes (None) the settings of a name. Returns when they are in the registry's file. Raises
        AdapterRejected for a body that is too large, or CaraServeError when the file cannot be written."""
        text = None if body is None else json.dumps(body)
        setting = Setting(kind, name, text, self._clock.next(self._wall_ms()))
        self._refuse_too_large(setting)
        await asyncio.to_thread(self._store, setting, self._take_forgotten())
        self._accept(setting)
        for observe in self._observers:
            observe(setting)

    def _refuse_too_large(self, setting: Setting) -> None:
        if setting.text is None:
            return
        most = SETTING_KINDS[setting.kind]
        if len(setting.text) > most:
            raise AdapterRejected(
                f"the settings of {setting.name!r} take {len(setting.text)} characters as JSON; {most} are allowed"
            )
        if not self._has_room(setting):
            raise AdapterRejected(
                f"the settings of all names together would take over {human_bytes(_MOST_BYTES)}; remove some first"
            )

    def _store(self, setting: Setting, forgotten: list[tuple[str, str]]) -> None:
        if setting.text is not None and len(packed(setting.text)) > MAX_SETTING:
            raise AdapterRejected(
                f"the settings of {setting.name!r} take over {MAX_SETTING} characters, compressed for other instances"
            )
        self._registry.put_settings([setting], forgotten)

    def _take_forgotten(self) -> list[tuple[str, str]]:
        forgotten = [key for key in self._forgotten if key not in self._settings]
        self._forgotten = []
        return forgotten

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
            settings = [one for one in self._unstored if self._settings.get(one.key) is one]  # none is newer
            self._unstored = []
            try:
                await asyncio.to_thread(self._registry.put_settings, settings, self._take_forgotten())
            except CaraServeError as error:  # other instances have them, and send them again after a restart
                log.error("settings of other instances: %s", error.message)

    async def close(self) -> None:
        """Returns when all settings are in the registry's file."""
        await asyncio.gather(*self._tasks)

    def _accept(self, setting: Setting) -> bool:
        """Applies a setting, unless a newer one is here or it is not valid. Returns whether it was applied."""
        old = self._settings.get(setting.key)
        if old is not None and old.order >= setting.order:
            return False
        if not self._has_room(setting):
            log.warning("the %s %s of another instance is left out: there is no room for it", *setting.key)
            return False
        if not self._is_taken(setting):
            return False
        self._keep(setting)
        return True

    def _is_taken(self, setting: Setting) -> bool:
        """Applies a setting. Returns False for one that is not valid."""
        if (apply := self._apply.get(setting.kind)) is None:
            return setting.kind in SETTING_KINDS  # its user comes later
        try:
            return apply(setting.name, None if setting.text is None else body_of(setting))
        except ValueError as error:
            log.warning("%s wrote a %s %s that is no settings: %s", setting.writer, *setting.key, error)
            return False

    def _has_room(self, setting: Setting) -> bool:
        more = _num_bytes(setting) - _num_bytes(self._settings.get(setting.key))
        return more <= 0 or self._num_bytes + more <= _MOST_BYTES

    def _keep(self, setting: Setting) -> None:
        if (old := self._settings.get(setting.key)) is not None:
            self._drop(old)
        self._settings[setting.key] = setting
        self._num_bytes += _num_bytes(setting)
        if setting.text is None:
            self._removed[setting.key] = None
            if len(self._removed) > _MOST_REMOVED:
                self._forgotten.append(first := next(iter(self._removed)))
                self._drop(self._settings[first])

    def _drop(self, setting: Setting) -> None:
        del self._settings[setting.key]
        self._num_bytes -= _num_bytes(setting)
        self._removed.pop(setting.key, None)


def _num_bytes(setting: Setting | None) -> int:
    return 0 if setting is None else _SETTING_BYTES + len(setting.text or "")


def body_of(setting: Setting) -> dict[str, Any]:
    """Returns the JSON object in a setting's text. Raises ValueError for another one, or one that is too large."""
    text = setting.text or ""
    if len(text) > SETTING_KINDS[setting.kind]:
        raise ValueError(f"it has {len(text)} characters")
    if _STRING.sub("", text).count(",") >= _MOST_VALUES:
        raise ValueError(f"it has over {_MOST_VALUES} values")
    try:
        body = json.loads(text)
        json.dumps(body, ensure_ascii=False).encode()  # refuses lone surrogates, of which no response could be made
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(body, dict):
        raise ValueError("it is no JSON object")
    return body


def packed(text: str) -> str:
    """Returns a text compressed, in base64."""
    return base64.b64encode(zlib.compress(text.encode(), _LEVEL)).decode()


def unpacked(text: str, most_bytes: int) -> str:
    """Returns the text that was packed. Raises ValueError, also if it has more than `most_bytes`."""
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(base64.b64decode(text, validate=True), most_bytes + 1)
    except (zlib.error, binascii.Error) as error:
        raise ValueError(f"it is not compressed text: {error}") from None
    if len(plain) > most_bytes or not unpacker.eof:
        raise ValueError(f"it is cut short, or has more than {most_bytes} bytes")
    return plain.decode()
