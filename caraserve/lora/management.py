"""What changes adapters while the server runs, beside the catalog."""

from dataclasses import dataclass

from caraserve.lora.aliases import Aliases
from caraserve.lora.uploads import AdapterUploads


@dataclass(frozen=True, slots=True)
class AdapterManagement:
    """The uploads and the aliases of one instance."""

    uploads: AdapterUploads
    aliases: Aliases
