"""The fleet's adapters on this instance: names that others gave, bytes that others hold.

name from the cluster ─► catalog, with no bytes ─► a request ─► our disk, else other instances ─► host tier
                                                                      └─► then our disk: `adapter_store.py`
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from caraserve.cluster.membership.node import Node
from caraserve.cluster.routing.cost import Tier
from caraserve.cluster.state.publisher import Publisher
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.cluster.state.scan import known_adapters
from caraserve.cluster.transfer.adapter_store import AdapterStore
from caraserve.cluster.transfer.disk_cache import DiskCache
from caraserve.cluster.transfer.download import Downloader
from caraserve.cluster.transfer.peer_client import PeerClient
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import CaraServeError, Forbidden, Unreachable
from caraserve.lora.adapter import AdapterTier
from caraserve.lora.catalog import AdapterReader, Catalog
from caraserve.lora.host_loader import Came, Done
from caraserve.lora.registry import AdapterInfo
from caraserve.model.spec import ModelSpec
from caraserve.telemetry.prometheus import family
from caraserve.util.tasks import Tasks

log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_PATIENCE_S = 0.5  # who holds what may still be on its way to us


class NodeHolders:
    """Other instances as the exchange asks for them."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._news = asyncio.Event()

    def holders(self, digest: str) -> Mapping[str, Tier]:
        return {name: tier for name, tier in self._node.holders(digest).items() if name != self._node.name}

    def address(self, name: str) -> str | None:
        record = self._node.record(name)
        return record.address if record is not None else None

    def changed(self) -> None:
        """Somebody came or went, or holds something new."""
        self._news.set()

    async def news(self, timeout_s: float) -> None:
        self._news.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            pass


class AdapterPool:
    """See above. Everything here runs on the event loop; disks and sockets have threads."""

    def __init__(
        self,
        node: Node,
        catalog: Catalog,
        reader: AdapterReader,
        stored: DiskCache,
        transfers: PeerClient,
        model: ModelSpec,
        most_bytes: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most_bytes`: of other instances' adapters on our disk."""
        self._holders = NodeHolders(node)
        self.downloader = Downloader(self._holders, transfers, model, now)
        self.store = AdapterStore(node, catalog.manager, reader, stored, most_bytes, now)
        self._node, self._catalog, self._now = node, catalog, now
        self._publisher: Publisher | None = None
        self._tasks = Tasks()
        self._complained: set[str] = set()
        reader.fetch = self.fetch

    # --- life ---

    def begin(self, publisher: Publisher) -> None:
        """After the node has started: takes stock of what is here, and of the names that are known."""
        self._publisher = publisher
        for info in self._catalog.all():
            if info.stamp:  # else it is a name of the cluster's that has come already
                self.store.loaded(info)
        self.store.begin(publisher)
        self._tasks.start(self._adopt_known(), "cluster names")

    async def _adopt_known(self) -> None:
        async for adapter in known_adapters(self._node):
            if self._catalog.find(adapter.name) is None:
                self.adopt(adapter)

    async def run(self) -> None:
        """Until cancelled: deletes what no name means any more."""
        self.store.renamed()  # should a sweep have failed half way, the next one starts over
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self.store.sweep()

    async def close(self) -> None:
        """Ends what is under way."""
        await self._tasks.end()
        await self.store.close()

    def on_holders_change(self) -> None:
        """Wakes downloads that wait for an instance with their adapter."""
        self._holders.changed()

    # --- names ---

    def adopt(self, adapter: RegisteredAdapter) -> None:
        """A name that another instance gave a meaning. One that cannot be served here is somebody else's to serve."""
        self.store.named(adapter.digest)
        self.store.renamed()
        try:
            self._catalog.adopt(adapter.name, adapter.digest, adapter.rank, adapter.num_bytes)
        except Forbidden:
            return  # the adapters of the start are all that this instance serves
        except CaraServeError as error:
            if adapter.digest not in self._complained:
                self._complained.add(adapter.digest)
                log.warning("adapter %s of the cluster cannot be served here: %s", adapter.name, error.message)

    def changed(self, name: str, info: AdapterInfo | None) -> None:
        """For `Catalog.on_change`: loaded from a folder here, or unloaded."""
        assert self._publisher is not None, "the pool has not begun"
        self._publisher.changed(name, info)
        if info is not None:
            self.store.loaded(info)
        self.store.renamed()

    async def ensure(self, name: str) -> None:
        """Sees to it that a request may be submitted: that the name means here what it means to the cluster, and that
        its bytes can be had, so that nobody waits in a slot for what cannot come. Raises CaraServeError."""
        digest = self._meant(name)
        ends_s = self._now() + _PATIENCE_S
        while not self._is_in_reach(digest):
            if (left_s := ends_s - self._now()) <= 0:
                raise Unreachable(
                    f"the adapter {name!r} cannot be fetched now: no instance that has it is there", retry_after_s=5.0
                )
            await self._holders.news(left_s)
            digest = self._meant(name)

    def _meant(self, name: str) -> str:
        """The digest that a name means to the cluster, and then here, too."""
        info, meant = self._catalog.find(name), self._node.adapter(name)
        if meant is not None and (info is None or info.digest != meant.digest):
            self._catalog.adopt(meant.name, meant.digest, meant.rank, meant.num_bytes)
        return self._catalog.get(name).digest

    def can_get(self, name: str) -> bool:
        """Whether the bytes of what a name means are here, or with somebody who is there."""
        meant = self._node.adapter(name) or self._catalog.find(name)
        return meant is not None and self._is_in_reach(meant.digest)

    def _is_in_reach(self, digest: str) -> bool:
        version = self._catalog.manager.find(digest)
        if version is not None and version.tier not in (AdapterTier.DISK, AdapterTier.FAILED):
            return True  # in memory, or on its way there
        return self.has(digest) or bool(self._holders.holders(digest))

    def find(self, name: str) -> AdapterInfo | None:
        """The adapter of that name if its bytes are here."""
        info = self._catalog.find(name)
        return info if info is not None and self.has(info.digest) else None

    def has(self, digest: str) -> bool:
        """Whether all its bytes are here, be it in memory alone."""
        return self.store.holds(digest) or self._catalog.manager.image(digest) is not None

    # --- bytes ---

    def fetch(self, digest: str, into: NDArray[np.uint8], done: Done, came: Came) -> None:
        """For `AdapterReader.fetch`: an adapter that no folder here has."""
        self._tasks.start(self._fetch(digest, into, done, came), f"fetch of adapter {digest[:12]}")

    async def bring(self, name: str) -> bool:
        """Holds an adapter here because the plan wants that; whether it is so now. It goes by the host tier, whose
        images are those of requests."""
        info = self._catalog.find(name)
        if info is None:
            return False
        digest = info.digest
        if not self.store.holds(digest):
            image = None
            if self._catalog.manager.image(digest) is None:
                try:
                    image = await self.downloader.fetch(digest, aligned_bytes(info.num_bytes))
                except CaraServeError:
                    return False
            await self.store.keep(digest, image)
        return self.store.holds(digest)

    def holds_name(self, name: str) -> bool:
        """The same of what a name means."""
        info = self._catalog.find(name)
        return info is not None and self.store.holds(info.digest)

    async def _fetch(self, digest: str, into: NDArray[np.uint8], done: Done, came: Came) -> None:
        result: HostAdapter | CaraServeError | None = None
        is_new = False
        try:
            result = await self.store.stored_image(digest, into)
            if result is None:
                result = await self.downloader.fetch(digest, into, came)
                is_new = True
        except CaraServeError as error:
            result = error
        except Exception as error:
            log.exception("adapter %s could not be fetched", digest[:12])
            result = CaraServeError(f"the adapter {digest[:12]} could not be fetched: {error}")
        done(result)
        if is_new:
            await self.store.keep(digest)

    # --- numbers ---

    def families(self, labels: str) -> Iterator[str]:
        """For GET /metrics."""
        counts, store = self.downloader.counts, self.store
        ends = [(f'outcome="ok",{labels}', counts.fetched), (f'outcome="failed",{labels}', counts.failed)]
        yield family("caraserve:adapter_fetches_total", "counter", "Adapters fetched from other instances.", ends)
        for name, kind, text, value in (
            ("adapter_fetches_running", "gauge", "Fetches under way.", self.downloader.under_way),
            ("adapter_fetched_bytes_total", "counter", "Bytes of adapters that were fetched.", counts.num_bytes),
            ("adapter_fetch_seconds_total", "counter", "Time that fetches took.", counts.seconds),
            ("adapter_corrupt_chunks_total", "counter", "Wrong bytes that others sent.", counts.corrupt),
            ("adapter_sent_bytes_total", "counter", "Bytes of adapters sent to others.", store.uploads.sent_bytes),
            ("adapter_uploads_refused_total", "counter", "Asked for by too many at once.", store.uploads.refusals),
            ("adapters_held", "gauge", "Adapters whose bytes this instance holds.", store.num_held),
            ("adapters_stored_bytes", "gauge", "Other instances' adapters on this disk.", store.stored_bytes),
            (
                "adapter_cache_full_total",
                "counter",
                "Downloaded adapters that the disk had no room for.",
                store.cache_full,
            ),
            (
                "adapter_announce_failures_total",
                "counter",
                "Held adapters that could not be announced.",
                store.announce_failures,
            ),
            ("adapters_deleted_total", "counter", "Adapters deleted from this disk.", store.deleted),
        ):
            yield family(f"caraserve:{name}", kind, text, [(labels, value)])
