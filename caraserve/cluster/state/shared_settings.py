"""Replicates aliases and settings of adapters: entries of the registry, beside the names.

    write on this instance ─► entry, pushed to all peers          entries of other instances ─► ReplicatedSettings

An entry's key is the kind and the name with a slash between, and its value the packed body. Entries keep the time and
the writer of their setting, so that each instance finds the same last write, also after restarts.
"""

import logging
from collections.abc import Iterable, Iterator

from msgspec import structs

from caraserve.cluster.membership.messages import entry_from_fields
from caraserve.cluster.membership.node import Node
from caraserve.cluster.state.lww_map import SETTING_SEPARATOR, Entry
from caraserve.core.adapter_rules import SETTING_KINDS
from caraserve.lora.registry import Setting
from caraserve.lora.replicated_settings import ReplicatedSettings, packed, unpacked
from caraserve.util.tasks import in_turns

log = logging.getLogger(__name__)


class SharedSettings:
    """Keeps the settings of one instance and the cluster's the same."""

    def __init__(self, node: Node, settings: ReplicatedSettings) -> None:
        self._node, self._settings = node, settings

    async def announce(self) -> None:
        """Adds the settings of earlier runs to the registry. Peers that lack one ask for it."""
        async for setting in in_turns(self._settings.all()):
            # As the file may have been changed, its rows are checked like another instance's.
            if (entry := entry_from_fields(structs.astuple(entry_of(setting, self._node.name)))) is not None:
                self._node.restore(entry)

    def changed(self, setting: Setting) -> None:
        """Tells all instances a setting that was written on this one."""
        if not self._node.share(entry_of(setting, self._node.name)):
            log.warning("the %s %s holds on this instance alone: the registry is full", setting.kind, setting.name)

    def apply(self, entries: Iterable[Entry]) -> None:
        """Takes the settings of other instances."""
        self._settings.merge(_valid_settings(entries))


def entry_of(setting: Setting, me: str) -> Entry:
    """Returns a setting's entry in the registry. `me`: the name of this instance."""
    key = f"{setting.kind}{SETTING_SEPARATOR}{setting.name}"
    value = () if setting.text is None else (packed(setting.text),)
    return Entry(key, value, setting.hlc, setting.writer or me, deleted=setting.text is None)


def _valid_settings(entries: Iterable[Entry]) -> Iterator[Setting]:
    """Yields the settings of known kinds. Those of others stay in the map of entries, for later versions."""
    for entry in entries:
        kind, _, name = entry.key.partition(SETTING_SEPARATOR)
        if (most_bytes := SETTING_KINDS.get(kind)) is None:
            continue
        try:
            text = None if entry.deleted else unpacked(str(entry.value[0]), most_bytes)
        except (ValueError, IndexError) as error:
            log.warning("%s wrote settings for %s that cannot be read: %s", entry.node, entry.key, error)
        else:
            yield Setting(kind, name, text, entry.hlc, entry.node)
