"""What changes adapters while the server runs, beside the catalog."""

from dataclasses import dataclass
from typing import Protocol

from caraserve.errors import NotFound
from caraserve.lora.aliases import Aliases
from caraserve.lora.folder_contents import RefusedFolders
from caraserve.lora.settings import SettingsStore
from caraserve.lora.uploads import AdapterUploads, Unregistered


@dataclass(frozen=True, slots=True)
class DeletedAdapter:
    """The result of a deletion. `keeps_files`: whether files stay, here or elsewhere, as they were not uploaded."""

    aliases: tuple[str, ...]
    keeps_files: bool


class Deletion(Protocol):
    """What a deletion must know of the name, here and on other instances."""

    def check(self) -> None:
        """Refuses the deletion by raising; called when it is the name's turn."""

    def remove_elsewhere(self) -> str | None:
        """Removes an adapter that this instance does not have. Returns its digest, None if no other has it either."""

    def is_deleted(self) -> bool:
        """Whether the name stands for no adapter: another instance may have given it to another one meanwhile."""


@dataclass(frozen=True, slots=True)
class AdapterManagement:
    """The uploads, the aliases and the settings of one instance's adapters."""

    uploads: AdapterUploads
    aliases: Aliases
    settings: SettingsStore

    @property
    def refused(self) -> RefusedFolders:
        """The folders that are not served, and why."""
        return self.uploads.catalog.refused

    async def delete(self, name: str, deletion: Deletion) -> DeletedAdapter:
        """Deletes an adapter with the aliases that stand for it and its settings. Returns when its last request has
        ended. Raises NotFound, AdapterBusy, or as `deletion.check`."""
        async with self.uploads.catalog.changing(name):
            deletion.check()
            try:
                unregistered = await self.uploads.unregister(name)
            except NotFound:
                if (digest := deletion.remove_elsewhere()) is None:
                    raise
                unregistered = Unregistered(None, elsewhere=self.uploads.removed(name, digest))
            aliases = tuple(await self.aliases.remove_of(name))
            if deletion.is_deleted():
                await self.settings.remove(name)
        return DeletedAdapter(aliases, keeps_files=await self.uploads.ended(unregistered))
