"""Has requests take the chat templates in adapters' folders, for --adapter-chat-templates: each becomes a setting of
its adapter, which all instances share, in place of the model's template and behind one that an admin has set."""

import asyncio
import logging
from pathlib import Path

from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.catalog import Catalog
from caraserve.lora.served_base import ServedBase
from caraserve.lora.settings import SettingsStore

log = logging.getLogger(__name__)


class FolderTemplates:
    """The chat templates in adapters' folders. Runs on the event loop; files are read on threads."""

    def __init__(self, base: ServedBase, settings: SettingsStore) -> None:
        self._base, self._settings = base, settings

    async def take(self, name: str, folder: AdapterFolder) -> None:
        """Sets the template in an adapter's folder as that of the name, or none. Raises AdapterRejected."""

        def read() -> str | None:
            try:
                with folder.opened() as path:
                    return self._base.own_template(path)
            except OSError as error:
                raise AdapterRejected(f"the adapter's folder cannot be read: {error.strerror}") from None

        await self._settings.set_folder_template(name, await asyncio.to_thread(read))

    async def take_all(self, catalog: Catalog) -> None:
        """Sets the templates of all adapters, and from now on that of each that is loaded."""
        catalog.preparations.append(self.take)
        for info in catalog.all():
            if info.facts.template_digest or self._settings.get(info.name).folder_template is not None:
                try:
                    await self.take(info.name, catalog.folders.at(Path(info.path)))
                except CaraServeError as error:
                    log.warning("adapter %s: its chat template is not used: %s", info.name, error.message)
