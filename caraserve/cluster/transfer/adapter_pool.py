"""Makes the cluster's adapters available on this instance: adopts registered names, and downloads bytes for requests.

registered name ─► catalog, without bytes ─► a request ─► disk cache, else a download ─► host cache
                                                                           └─► disk cache: `adapter_store.py`
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.cluster.membership.member import Member
from caraserve.cluster.membership.peer_client import PeerClient
from caraserve.cluster.routing.publisher import Publisher
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.cluster.transfer.adapter_store import AdapterStore
from caraserve.cluster.transfer.disk_cache import DiskCache
from caraserve.cluster.transfer.download import Downloader, HolderWatch
from caraserve.cluster.transfer.replaced_folders import ReplacedFolders
from caraserve.core.combined_names import members_of
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import CaraServeError, Forbidden, Unreachable
from caraserve.lora.adapter import AdapterTier, Done, LayersArrived, UploadSource
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.catalog import Catalog
from caraserve.lora.registry import AdapterInfo
from caraserve.model.plan import DecoderPlan
from caraserve.telemetry.prometheus import family
from caraserve.util.tasks import Tasks

log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_UNWANTED_S = 5.0  # for which a download continues without a request: its client may send it again
_HOLDERS_WAIT_S = 0.5  # for which `ensure` waits for a holder: the list of holders may still arrive


@dataclass(slots=True)
class _RequestedDownload:
    scope: asyncio.Timeout
    unwanted_since_s: float | None = None


class AdapterPool:
    """The names and bytes of the cluster's adapters. Methods run on the event loop; disks and sockets have threads."""

    def __init__(
        self,
        member: Member,
        publisher: Publisher,
        catalog: Catalog,
        reader: AdapterReader,
        stored: DiskCache,
        transfers: PeerClient,
        plan: DecoderPlan,
        most_bytes: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most_bytes`: size of the disk cache."""
        self._holders = HolderWatch(member)
        self.downloader = Downloader(self._holders, transfers, plan, now)
        self.store = AdapterStore(member, publisher, catalog.manager, reader, stored, most_bytes, now)
        self._member, self._publisher, self._catalog, self._now = member, publisher, catalog, now
        self._joined_s: float | None = None  # unix time
        self._tasks = Tasks()
        self._complained: set[str] = set()
        self._downloads: dict[str, _RequestedDownload] = {}  # for requests, by digest
        self._replaced = ReplacedFolders(catalog, self._is_lost, now)
        reader.connect(self.fetch, self.store.on_folder_read)

    # --- start and stop ---

    def begin(self) -> None:
        """Starts, once the member has: adds the adapters that are here, and adopts the names in the registry."""
        self._joined_s = time.time()
        for info in self._catalog.all():
            if info.stamp:  # else it came from the registry already
                self.store.loaded(info)
        self.store.begin()
        self._tasks.start(self._adopt_known(), "cluster names")

    async def _adopt_known(self) -> None:
        async for adapter in self._member.adapters_in_turns():
            if self._catalog.find_whole(adapter.name) is None:
                self.adopt(adapter)

    async def run(self) -> None:
        """Deletes adapters without a name, ends downloads without a request, and uses folders again whose names stand
        for adapters that no instance has, until cancelled."""
        self.store.renamed()  # repeats a sweep that failed half way
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self.store.sweep()
            self._end_unwanted()
            await self._replaced.restore()

    async def close(self) -> None:
        """Ends all work in progress."""
        await self._tasks.end()
        await self.store.close()

    def on_holders_change(self) -> None:
        """Wakes downloads that wait for an instance with their adapter."""
        self._holders.notify()

    # --- names ---

    def adopt(self, adapter: RegisteredAdapter) -> None:
        """Adds a name that another instance registered to the catalog. If this instance cannot serve the adapter, other
        instances do."""
        self.store.named(adapter.digest)
        self.store.renamed()
        self._replaced.adopted(adapter, is_new=self._is_new(adapter.name))
        try:
            self._catalog.adopt(adapter.name, adapter.digest, adapter.rank, adapter.num_bytes, adapter.facts)
        except Forbidden:
            return  # this instance serves only the adapters of its start
        except CaraServeError as error:
            if adapter.digest not in self._complained:
                self._complained.add(adapter.digest)
                log.warning("adapter %s of the cluster cannot be served here: %s", adapter.name, error.message)

    def _is_new(self, name: str) -> bool:
        """Whether a name was registered after this instance has joined."""
        changed_s = self._member.last_changed_s(name)
        return changed_s is not None and self._joined_s is not None and changed_s > self._joined_s

    def _is_lost(self, name: str) -> bool:
        """Whether no instance has the bytes for which a name stands on all instances."""
        meant = self._member.adapter(name)
        return meant is not None and not self._is_available(meant.digest)

    def changed(self, name: str, info: AdapterInfo | None) -> None:
        """Observes the catalog: publishes an adapter that was loaded from a folder here, or unloaded (None)."""
        self._publisher.changed(name, info)
        self._replaced.changed(name)
        if info is not None:
            self.store.loaded(info)
        self.store.renamed()

    async def ensure(self, name: str) -> None:
        """Returns when a request may be submitted: the name stands for the same digest here as in the registry, and its
        bytes are here or can be downloaded, so that no request waits in the queue without end. Raises CaraServeError,
        if no holder is reachable within 0.5 s Unreachable."""
        if self._joined_s is None:
            return  # not a member yet: only adapters of the start are in the catalog, and their folders are here
        for member, _ in members_of(name):  # several of a combination
            await self._ensure(member)

    async def _ensure(self, name: str) -> None:
        digest = self._adopted_digest(name)
        ends_s = self._now() + _HOLDERS_WAIT_S
        while not self._is_available(digest):
            if (left_s := ends_s - self._now()) <= 0:
                raise Unreachable(
                    f"the adapter {name!r} cannot be downloaded now: no instance that has it is reachable",
                    retry_after_s=5.0,
                )
            await self._holders.wait_for_change(left_s)
            digest = self._adopted_digest(name)

    def _adopted_digest(self, name: str) -> str:
        """Adopts a name's digest from the registry and returns it."""
        info, meant = self._catalog.find(name), self._member.adapter(name)
        if meant is not None and (info is None or info.digest != meant.digest):
            self._replaced.adopted(meant, is_new=self._is_new(name))
            self._catalog.adopt(meant.name, meant.digest, meant.rank, meant.num_bytes)
        return self._catalog.get(name).digest

    def can_get(self, name: str) -> bool:
        """Whether the bytes of a named adapter are here or on a reachable instance."""
        members = members_of(name)  # several of a combination
        known = [self._member.adapter(one) or self._catalog.find(one) for one, _ in members]
        return bool(members) and all(one is not None and self._is_available(one.digest) for one in known)

    def _is_available(self, digest: str) -> bool:
        version = self._catalog.manager.find(digest)
        if version is not None and isinstance(version.source, UploadSource):
            return True  # it is being uploaded here
        if version is not None and version.tier not in (AdapterTier.DISK, AdapterTier.FAILED):
            return True  # in memory, or being read
        return self.has(digest) or bool(self._holders.holders(digest))

    def has(self, digest: str) -> bool:
        """Whether all bytes of an adapter are here, in memory or on disk."""
        return self.store.holds(digest) or self._catalog.manager.image(digest) is not None

    # --- bytes ---

    def fetch(self, digest: str, into: NDArray[np.uint8], done: Done, came: LayersArrived) -> None:
        """For `AdapterReader`: reads an adapter that no folder here has from the disk cache, or downloads it."""
        self._tasks.start(self._fetch(digest, into, done, came), f"fetch of adapter {digest[:12]}")

    async def store_planned(self, name: str) -> bool:
        """Stores an adapter that the plan places here, without using the host cache. Returns whether it is held now."""
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
        """Whether the adapter of that name is held here."""
        info = self._catalog.find(name)
        return info is not None and self.store.holds(info.digest)

    async def _fetch(self, digest: str, into: NDArray[np.uint8], done: Done, came: LayersArrived) -> None:
        result: HostAdapter | CaraServeError | None = None
        is_new = False
        try:
            result = await self.store.stored_image(digest, into)
            if result is None:
                result = await self._download(digest, into, came)
                is_new = True
        except CaraServeError as error:
            result = error
        except Exception as error:
            log.exception("adapter %s could not be downloaded", digest[:12])
            result = CaraServeError(f"the adapter {digest[:12]} could not be downloaded: {error}")
        done(result)
        if is_new:
            await self.store.keep(digest)

    async def _download(self, digest: str, into: NDArray[np.uint8], came: LayersArrived) -> HostAdapter:
        """Downloads an adapter for requests. Raises Unreachable, also when no request waits for it any more."""
        try:
            async with asyncio.timeout(None) as scope:
                self._downloads[digest] = _RequestedDownload(scope)
                return await self.downloader.fetch(digest, into, came)
        except TimeoutError:
            log.info("the download of adapter %s ends, as no request waits for it", digest[:12])
            raise Unreachable(f"the download of adapter {digest[:12]} was ended", retry_after_s=1.0) from None
        finally:
            del self._downloads[digest]

    def _end_unwanted(self) -> None:
        """Ends downloads for requests that have all ended 5 s ago."""
        now = self._now()
        for digest, download in self._downloads.items():
            version = self._catalog.manager.find(digest)
            if version is not None and version.pins:
                download.unwanted_since_s = None
            elif download.unwanted_since_s is None:
                download.unwanted_since_s = now
            elif now - download.unwanted_since_s >= _UNWANTED_S and not download.scope.expired():
                download.scope.reschedule(0.0)

    # --- metrics ---

    def families(self, labels: str) -> Iterator[str]:
        """Yields the metric families for GET /metrics. `labels`: those of every sample."""
        counts, store = self.downloader.counts, self.store
        ends = [(f'outcome="ok",{labels}', counts.fetched), (f'outcome="failed",{labels}', counts.failed)]
        yield family("caraserve:adapter_fetches_total", "counter", "Adapters downloaded from other instances.", ends)
        sent_bytes, refusals = store.uploads.sent_bytes, store.uploads.refusals
        for name, text, value in (
            ("adapter_fetches_running", "Downloads in progress.", self.downloader.in_progress),
            ("adapter_fetched_bytes_total", "Bytes of adapters downloaded.", counts.num_bytes),
            ("adapter_fetch_seconds_total", "Time that downloads took.", counts.seconds),
            ("adapter_corrupt_chunks_total", "Downloaded chunks with a wrong hash.", counts.corrupt),
            ("adapter_sent_bytes_total", "Bytes of adapters sent to others.", sent_bytes),
            ("adapter_uploads_refused_total", "Uploads refused because too many were in progress.", refusals),
            ("adapters_held", "Adapters whose bytes this instance holds.", store.num_held),
            ("adapters_stored_bytes", "Bytes in the disk cache of adapters.", store.stored.num_bytes),
            ("adapter_cache_full_total", "Downloaded adapters that the disk had no room for.", store.cache_full),
            ("adapter_announce_failures_total", "Held adapters that could not be announced.", store.announce_failures),
            ("adapters_deleted_total", "Adapters deleted from the disk cache.", store.deleted),
        ):
            kind = "counter" if name.endswith("_total") else "gauge"
            yield family(f"caraserve:{name}", kind, text, [(labels, value)])
