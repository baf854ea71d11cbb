"""A real server over a fake engine with a real catalog, whose adapters can be managed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from caraserve.http.body.sampling import read_defaults
from caraserve.lora.aliases import Aliases
from caraserve.lora.catalog import Catalog
from caraserve.lora.folder_templates import FolderTemplates
from caraserve.lora.management import AdapterManagement
from caraserve.lora.registry import AdapterInfo, Registry
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.lora.served_base import ANY_BASE, ServedBase
from caraserve.lora.settings import SettingsStore
from tests.http import serving as base
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client
from tests.lora.uploads import Receiver, receiving


class CatalogEngine(FakeEngine):
    """A fake engine with the adapters of a real catalog."""

    catalog: Catalog

    def adapters(self) -> list[AdapterInfo]:  # type: ignore[override]
        return self.catalog.all()

    def adapter(self, name: str) -> AdapterInfo:  # type: ignore[override]
        return self.catalog.get(name)


@asynccontextmanager
async def serving(root: Path, **settings: Any) -> AsyncIterator[tuple[Client, Receiver]]:
    """Yields a client of a new server, and what receives uploads to `root`. `settings`: as of `serving.serving`."""
    registry = settings.pop("registry", None) or Registry(None)
    replicated = settings.pop("replicated", None) or ReplicatedSettings(registry)
    base_model: ServedBase = settings.pop("base", ANY_BASE)
    async with receiving(root, registry, base_model) as receiver:
        engine = settings.pop("engine", None) or CatalogEngine()
        engine.catalog = receiver.catalog
        aliases = Aliases(replicated, lambda name: receiver.catalog.find(name) is not None)
        takes = base_model.takes_templates
        store = SettingsStore(replicated, receiver.catalog, read_defaults, takes_folder_templates=takes)
        if takes:
            await FolderTemplates(base_model, store).take_all(receiver.catalog)
        management = AdapterManagement(receiver.uploads, aliases, store)
        try:
            async with base.serving(engine, management=management, **settings) as client:
                yield client, receiver
        finally:
            await store.close()
            await engine.tokenizer.adapter_templates.close()
