"""A real server over a fake engine with a real catalog, whose adapters can be managed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from caraserve.http.app import make_app, start_http
from caraserve.http.body.sampling import read_defaults
from caraserve.lora.aliases import Aliases
from caraserve.lora.catalog import Catalog
from caraserve.lora.management import AdapterManagement
from caraserve.lora.registry import AdapterInfo, Registry
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.lora.settings import SettingsStore
from tests.http.fake_engine import FakeEngine
from tests.http.serving import Client, http_config, new_metrics
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
    timings = settings.pop("timings", None)
    allow = settings.pop("allow_lora_updates", True)
    registry = settings.pop("registry", None) or Registry(None)
    replicated, cluster = (
        settings.pop("replicated", None) or ReplicatedSettings(registry),
        settings.pop("cluster", None),
    )
    async with receiving(root, registry) as receiver, aiohttp.ClientSession() as session:
        engine, config = settings.pop("engine", None) or CatalogEngine(), http_config(**settings)
        engine.catalog = receiver.catalog
        aliases = Aliases(replicated, lambda name: receiver.catalog.find(name) is not None)
        store = SettingsStore(replicated, receiver.catalog, read_defaults)
        management = AdapterManagement(receiver.uploads, aliases, store)
        app = make_app(
            engine,  # type: ignore[arg-type]
            config,
            new_metrics(),
            allow_lora_updates=allow,
            timings=timings,
            cluster=cluster,
            management=management,
        )
        runner, port = await start_http(app, config)
        try:
            yield Client(session, port), receiver
        finally:
            await runner.cleanup()
            await store.close()
            await engine.tokenizer.adapter_templates.close()
