"""What changes adapters while the server runs, beside the catalog."""

from dataclasses import dataclass

from caraserve.lora.aliases import Aliases
from caraserve.lora.settings import SettingsStore
from caraserve.lora.uploads import AdapterUploads


@dataclass(frozen=True, slots=True)
class AdapterManagement:
    """The uploads, the aliases and the settings of one instance's adapters."""

    uploads: AdapterUploads
    aliases: Aliases
    settings: SettingsStore
