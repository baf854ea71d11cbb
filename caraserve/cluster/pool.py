"""The fleet's adapters on this instance: names that others gave, bytes that others hold, copies that are kept. Level 4.

    name from the cluster ─► catalog, with no bytes ─► a request ─► our disk, else other instances ─► host tier
                                                                          └─► then our disk, and we hold it, too
    too much on disk, or the plan wants it elsewhere ─► another holder's promise ─► deleted

Whatever only one instance holds is deleted by nobody; what lies in folders of the user's is never deleted.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from caraserve.adapters.catalog import AdapterReader, Catalog, Done
from caraserve.adapters.registry import AdapterInfo
from caraserve.adapters.version import Pooled, Source
from caraserve.adapters.version import Tier as LocalTier
from caraserve.cluster.copies import Copies
from caraserve.cluster.cost import Tier
from caraserve.cluster.exchange import Exchange
from caraserve.cluster.facts import Adapter
from caraserve.cluster.lending import Lending
from caraserve.cluster.node import Body, Node
from caraserve.cluster.publisher import Publisher
from caraserve.cluster.stored import Stored, size_of
from caraserve.cluster.transfers import Transfers
from caraserve.errors import AdapterRejected, CaraServeError, Forbidden, NotFound
from caraserve.exposition import family
from caraserve.model.layout import HostAdapter
from caraserve.model.spec import ModelSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

HOLD = "hold"  # kind of a question: will you keep this digest for so long?
_PROMISE_S = 30.0
_ANSWER_S = 1.0
_SWEEP_S = 1.0


class Holders:
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


class Pool:
    """See above. Everything here runs on the event loop; disks and sockets have threads."""

    def __init__(
        self,
        node: Node,
        catalog: Catalog,
        reader: AdapterReader,
        stored: Stored,
        transfers: Transfers,
        model: ModelSpec,
        most_bytes: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most_bytes`: of other instances' adapters on our disk."""
        holders = Holders(node)
        self.exchange = Exchange(holders, transfers, model, now)
        self.lending = Lending(catalog.residency, self._read_own, self._lost, lambda: node.keys)
        self.wanted: Callable[[str], bool] = lambda name: False  # whether the plan wants an adapter here
        self.unkept = self.deleted = 0
        self._node, self._catalog, self._reader = node, catalog, reader
        self._publisher: Publisher | None = None
        self._stored, self._most_bytes, self._now = stored, most_bytes, now
        self._copies = Copies()
        self._held: set[str] = set()
        self._named: set[str] = set()  # digests that some name has meant, since the start
        self._swept = True
        self._disk = ThreadPoolExecutor(1, "caraserve-stored")
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._complained: set[str] = set()
        node.on_held = holders.changed
        reader.fetch = self.fetch

    # --- life ---

    def begin(self, publisher: Publisher) -> None:
        """After the node has started: takes stock of what is here, and of the names that are known."""
        self._publisher = publisher
        for info in self._catalog.all():
            self._named.add(info.digest)
            self._verified(info.digest)
        kept = dict.fromkeys(self._stored.digests(), _PROMISE_S)  # whatever an earlier life promised
        self._copies.restore(set(kept), kept, self._now())
        for digest in kept:
            self._held.add(digest)
            publisher.hold(digest, Tier.DISK)
        for adapter in list(self._node.adapters()):
            if self._catalog.find(adapter.name) is None:
                self.adopt(adapter)

    async def run(self) -> None:
        """Until cancelled: deletes what no name means any more."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            if not self._swept:
                self._sweep()

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._disk.shutdown)
        self._stored.close()

    # --- names ---

    def adopt(self, adapter: Adapter) -> None:
        """A name that another instance gave a meaning. One that cannot be served here is somebody else's to serve."""
        self._named.add(adapter.digest)
        try:
            self._catalog.adopt(adapter.name, adapter.digest, adapter.rank, adapter.num_bytes)
        except Forbidden:
            return  # the adapters of the start are all that this instance serves
        except CaraServeError as error:
            if adapter.digest not in self._complained:
                self._complained.add(adapter.digest)
                log.warning("adapter %s of the cluster cannot be served here: %s", adapter.name, error.message)
        self._swept = False  # what it meant before may be needed no more

    def changed(self, name: str, info: AdapterInfo | None) -> None:
        """For `Catalog.on_change`: loaded from a folder here, or unloaded."""
        self._publisher_now.changed(name, info)
        if info is not None:
            self._named.add(info.digest)
            self._verified(info.digest)
        self._swept = False

    async def ensure(self, name: str) -> None:
        """Begins to fetch an adapter that a request will want, so that it may be submitted. Raises CaraServeError."""
        if self._catalog.find(name) is None:
            adapter = self._node.adapter(name)
            if adapter is None:
                raise NotFound(f"the model {name!r} does not exist", param="model")
            self._catalog.adopt(adapter.name, adapter.digest, adapter.rank, adapter.num_bytes)
        version = self._catalog.residency.find(self._catalog.get(name).digest)
        if version is not None:
            self._catalog.residency.prefetch(version)

    def find(self, name: str) -> AdapterInfo | None:
        """The adapter of that name if its bytes are here."""
        info = self._catalog.find(name)
        return info if info is not None and self.has(info.digest) else None

    def has(self, digest: str) -> bool:
        """Whether all its bytes are here, be it in memory alone."""
        return self.holds(digest) or self._catalog.residency.image(digest) is not None

    # --- bytes ---

    def fetch(self, digest: str, into: NDArray[np.uint8], done: Done) -> None:
        """For `AdapterReader.fetch`: an adapter that no folder here has."""
        self._start(self._fetch(digest, into, done))

    async def bring(self, name: str) -> bool:
        """Has an adapter here, and holds it, because the plan wants that; whether it is so now. Requests go first."""
        info = self._catalog.find(name)
        version = self._catalog.residency.find(info.digest) if info is not None else None
        if version is None:
            return False
        self._catalog.residency.prefetch(version)
        while version.tier is LocalTier.READING:
            await self._catalog.residency.next_change()
        if not self.holds(version.digest) and self.has(version.digest):
            await self._keep(version.digest)
        return self.holds(version.digest)

    def holds_name(self, name: str) -> bool:
        """The same of what a name means."""
        info = self._catalog.find(name)
        return info is not None and self.holds(info.digest)

    def holds(self, digest: str) -> bool:
        """Whether its bytes are here to stay, so that others may count on them."""
        return self._copies.has(digest)

    def stored_digests(self) -> list[str]:
        """What came from others and is on our disk."""
        return self._stored.digests()

    def spare(self, digests: Iterable[str]) -> Iterator[tuple[str, str]]:
        """(name, digest) of those that no name which the plan wants here has."""
        for digest in digests:
            version = self._catalog.residency.find(digest)
            if version is not None and not any(map(self.wanted, version.names)):
                yield from ((name, digest) for name in version.names)

    async def let_go(self, digest: str) -> bool:
        """Deletes what came from others, if one of them promises to keep it; whether it did."""
        if digest not in self._stored or digest in self._keeping:
            return False
        holders = [name for name in self._node.holders(digest) if name != self._node.name]
        random.shuffle(holders)
        for holder in holders[:3]:
            number = self._copies.ask(digest, _PROMISE_S, self._now())
            if number is None:
                return False
            answer = await self._node.ask(holder, (HOLD, digest, _PROMISE_S), _ANSWER_S)
            if self._copies.answered(digest, number, answer == (1,), self._now()):
                self._delete(digest)
                return True
        return False

    def answer(self, peer: str, body: Body) -> Body:
        """For `Node.on_question`: another instance would delete, and asks us to keep ours."""
        match body:
            case (_, str(digest), float(ttl_s) | int(ttl_s)) if 0 < ttl_s <= 10 * _PROMISE_S:
                return (int(self._copies.promise(digest, ttl_s, self._now())),)
        return (0,)

    async def _fetch(self, digest: str, into: NDArray[np.uint8], done: Done) -> None:
        result: HostAdapter | CaraServeError | None = None
        is_new = False
        try:
            result = await self._stored_image(digest, into)
            if result is None:
                result = await self.exchange.fetch(digest, into)
                is_new = True
        except CaraServeError as error:
            result = error
        except Exception as error:
            log.exception("adapter %s could not be fetched", digest[:12])
            result = CaraServeError(f"the adapter {digest[:12]} could not be fetched: {error}")
        done(result)
        if is_new:
            await self._keep(digest)

    async def _stored_image(self, digest: str, into: NDArray[np.uint8]) -> HostAdapter | None:
        """From our disk; None when it is not there, or not as it should be."""
        if digest not in self._stored:
            return None
        try:
            image = await self._on_thread(self._reader.executor, self._stored.read, digest, into)
        except AdapterRejected as error:
            log.warning("%s; it is fetched again", error.message)
            self._lost(digest)
            return None
        self._stored.used(digest)
        return image

    async def _keep(self, digest: str) -> None:
        """Writes what has been fetched to our disk; then we hold it, and say so. Two who ask wait for one writing."""
        task = self._keeping.get(digest)
        if task is None:
            task = self._keeping[digest] = self._start(self._write(digest))
            task.add_done_callback(lambda _: self._keeping.pop(digest, None))
        await asyncio.shield(task)

    async def _write(self, digest: str) -> None:
        try:
            async with self.lending.image_of(digest) as image:
                size = size_of(image)
                if not await self._make_room(size):
                    self.unkept += 1
                    return
                await self._on_thread(self._disk, self._stored.write, image)
        except CaraServeError:
            return  # nobody wants it any more
        except OSError as error:
            self.unkept += 1
            log.warning("adapter %s cannot be kept on disk: %s", digest[:12], error.strerror)
            return
        self._stored.added(digest, size)
        self._verified(digest)
        self._publisher_now.hold(digest, Tier.HOST)
        self._swept = False

    async def _make_room(self, num_bytes: int) -> bool:
        """Lets the least recently used go until so much fits; what the plan wants here stays."""
        for digest in self._stored.digests():
            if self._stored.num_bytes + num_bytes <= self._most_bytes:
                break
            version = self._catalog.residency.find(digest)
            if version is None or not any(map(self.wanted, version.names)):
                await self.let_go(digest)
        return self._stored.num_bytes + num_bytes <= self._most_bytes

    @property
    def _publisher_now(self) -> Publisher:
        assert self._publisher is not None, "the pool has not begun"
        return self._publisher

    def _verified(self, digest: str) -> None:
        self._held.add(digest)
        self._copies.verified(digest)

    def _sweep(self) -> None:
        """What has no name is nobody's any more: its last copy may go."""
        self._swept = True
        for digest in list(self._held):
            version = self._catalog.residency.find(digest)
            if version is not None and not version.names:
                self._swept = False  # its last requests are under way
            elif version is None and digest in self._named:  # else its name may still be on its way to us
                self._copies.lost(digest)
                self._delete(digest)

    def _lost(self, digest: str) -> None:
        """Its bytes turned out to be gone or wrong: nobody may count on us any more."""
        if self._copies.has(digest):
            log.warning("adapter %s can no longer be read here", digest[:12])
        self._copies.lost(digest)
        self._delete(digest)

    def _delete(self, digest: str) -> None:
        """We hold it no more."""
        self._held.discard(digest)
        self._publisher_now.drop(digest)
        if digest in self._stored:
            self.deleted += 1
            self._stored.forget(digest)
            self._disk.submit(self._stored.delete, digest)

    def _read_own(self, source: Source, into: NDArray[np.uint8], done: Done) -> None:
        """From our disk alone: what others have, they hand out themselves."""
        if isinstance(source, Pooled):
            self._start(self._read_stored(source.digest, into, done))
        else:
            self._reader.read(source, into, done)

    async def _read_stored(self, digest: str, into: NDArray[np.uint8], done: Done) -> None:
        image = await self._stored_image(digest, into)
        done(image if image is not None else CaraServeError(f"This instance does not have {digest}."))

    async def _on_thread(self, executor: Any, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- numbers ---

    def families(self, labels: str) -> Iterator[str]:
        """For GET /metrics."""
        counts, lending = self.exchange.counts, self.lending
        ends = [(f'outcome="ok",{labels}', counts.fetched), (f'outcome="failed",{labels}', counts.failed)]
        yield family("caraserve:adapter_fetches_total", "counter", "Adapters fetched from other instances.", ends)
        for name, kind, text, value in (
            ("adapter_fetches_running", "gauge", "Fetches under way.", self.exchange.under_way),
            ("adapter_fetched_bytes_total", "counter", "Bytes of adapters that were fetched.", counts.num_bytes),
            ("adapter_fetch_seconds_total", "counter", "Time that fetches took.", counts.seconds),
            ("adapter_corrupt_chunks_total", "counter", "Wrong bytes that others sent.", counts.corrupt),
            ("adapter_sent_bytes_total", "counter", "Bytes of adapters sent to others.", lending.sent_bytes),
            ("adapter_uploads_refused_total", "counter", "Asked for by too many at once.", lending.refusals),
            ("adapters_held", "gauge", "Adapters whose bytes this instance holds.", len(self._held)),
            ("adapters_stored_bytes", "gauge", "Other instances' adapters on this disk.", self._stored.num_bytes),
            ("adapters_unkept_total", "counter", "Fetched adapters with no room on disk.", self.unkept),
            ("adapters_deleted_total", "counter", "Adapters deleted from this disk.", self.deleted),
        ):
            yield family(f"caraserve:{name}", kind, text, [(labels, value)])
