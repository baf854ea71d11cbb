"""Converts aliases and settings of adapters to entries of the registry, beside the names, and back. No I/O, no clock.

An entry's key is the kind and the name with a slash between, and its value the packed body. Entries keep the time and
the writer of their setting, so that each instance finds the same last write, also after restarts. `ReplicatedSettings`
has the settings of this instance.
"""

import logging
from collections.abc import Iterable, Iterator

from msgspec import structs

from caraserve.cluster.state.lww_map import SETTING_SEPARATOR, Entry, entry_from_fields
from caraserve.core.adapter_rules import SETTING_KINDS
from caraserve.lora.registry import Setting
from caraserve.lora.replicated_settings import packed, unpacked

log = logging.getLogger(__name__)


def entry_of(setting: Setting, me: str) -> Entry:
    """Returns a setting's entry in the registry. `me`: the name of this instance."""
    key = f"{setting.kind}{SETTING_SEPARATOR}{setting.name}"
    value = () if setting.text is None else (packed(setting.text),)
    return Entry(key, value, setting.hlc, setting.writer or me, deleted=setting.text is None)


def stored_entry_of(setting: Setting, me: str) -> Entry | None:
    """Returns the entry of a setting of an earlier run, or None unless another instance could have sent it: the file
    may have been changed."""
    return entry_from_fields(structs.astuple(entry_of(setting, me)))


def settings_in(entries: Iterable[Entry]) -> Iterator[Setting]:
    """Yields the settings of known kinds that can be read. Those of others stay in the map of entries, for later
    versions."""
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
