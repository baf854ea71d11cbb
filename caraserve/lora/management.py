"""What changes adapters while the server runs, beside the catalog."""

from collections.abc import Callable
from dataclasses import dataclass

from caraserve.errors import NotFound
from caraserve.lora.aliases import Aliases
from caraserve.lora.refused_folders import RefusedFolders
from caraserve.lora.settings import SettingsStore
from caraserve.lora.uploads import AdapterUploads


@dataclass(frozen=True, slots=True)
class DeletedAdapter:
    """The result of a deletion. `keeps_files`: whether they stay where they are, because they were not uploaded."""

    aliases: tuple[str, ...]
    keeps_files: bool


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

    async def delete(
        self, name: str, check: Callable[[], None], remove_elsewhere: Callable[[], bool], is_deleted: Callable[[], bool]
    ) -> DeletedAdapter:
        """Deletes an adapter with the aliases that stand for it and its settings. Returns when its last request has
        ended. Raises NotFound, AdapterBusy, or as `check`, which is called when it is the name's turn.

        `remove_elsewhere`: removes an adapter that this instance does not have; False if no other has it either.
        `is_deleted`: whether the name stands for no adapter: another instance may have given it to another one
        meanwhile."""
        async with self.uploads.catalog.changing(name):
            check()
            try:
                unregistered = await self.uploads.unregister(name)
            except NotFound:
                if not remove_elsewhere():
                    raise
                unregistered = None
            aliases = tuple(self.aliases.of(name))
            for alias in aliases:
                await self.aliases.remove(alias)
            if is_deleted():
                await self.settings.remove(name)
        if unregistered is not None:
            await self.uploads.ended(unregistered)
        return DeletedAdapter(aliases, keeps_files=unregistered is not None and unregistered.folder is None)
