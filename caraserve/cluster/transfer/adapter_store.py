"""The bytes that this instance holds for the fleet: kept, promised, handed out, let go.

    fetched ─► written to our disk ─► held: others may count on it
    too much on disk, or the plan wants it elsewhere ─► another holder's promise ─► deleted

Whatever only one instance holds is deleted by nobody; what lies in folders of the user's is never deleted.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from caraserve.cluster.membership.node import Node, QueryBody
from caraserve.cluster.routing.cost import Tier
from caraserve.cluster.state.publisher import Publisher
from caraserve.cluster.state.scan import known_adapters
from caraserve.cluster.transfer.delete_lease import DeleteLeases
from caraserve.cluster.transfer.disk_cache import DiskCache, file_size
from caraserve.cluster.transfer.upload import UploadsBusy, UploadServer
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.adapter import RemoteSource, Source
from caraserve.lora.catalog import AdapterReader, stamp
from caraserve.lora.host_loader import Done
from caraserve.lora.manager import AdapterManager
from caraserve.lora.registry import AdapterInfo
from caraserve.util.tasks import Tasks, in_turns

log = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_QUESTION = "hold"  # kind of a question: will you keep this digest for so long?
_PROMISE_S = 30.0
_ANSWER_S = 1.0
_NO, _YES, _LOOKING = range(3)  # answers to it; the last: ask again in a moment
_LOOK_S = 0.25
_SURE_S = 1.0  # after a look at files in a folder, which are not ours


class AdapterStore:
    """See above. Everything here runs on the event loop; disks have threads."""

    def __init__(
        self,
        node: Node,
        manager: AdapterManager,
        reader: AdapterReader,
        stored: DiskCache,
        most_bytes: int,
        now: Callable[[], float],
    ) -> None:
        """`most_bytes`: of other instances' adapters on our disk."""
        self.uploads = UploadServer(manager, self._read_own, self._unread, lambda: node.keys)
        self.wanted: Callable[[str], bool] = lambda name: False  # whether the plan wants an adapter here
        self.cache_full = self.announce_failures = self.deleted = 0
        self._node, self._manager, self._reader = node, manager, reader
        self._publisher: Publisher | None = None
        self._stored, self._most_bytes, self._now = stored, most_bytes, now
        self._copies = DeleteLeases()
        self._held: set[str] = set()
        self._stamps: dict[str, str] = {}  # of files in folders here, when they had those bytes
        self._looked_s: dict[str, float] = {}  # when those files were last as they had been
        self._read: set[str] = set()  # of what is stored: read or written right, since the start
        self._looking: set[str] = set()
        self._looks = asyncio.Lock()
        self._named: set[str] = set()  # digests that some name has meant, since the start
        self._nameless: set[str] = set()  # those of them that no name seems to mean any more, while we look
        self._swept = True
        self._disk = ThreadPoolExecutor(1, "caraserve-stored")
        reader.on_read = self._was_read
        self._tasks = Tasks()
        self._keeping: dict[str, asyncio.Task[None]] = {}

    def begin(self, publisher: Publisher) -> None:
        """After the node has started: takes stock of what an earlier life has kept, and may have promised."""
        self._publisher = publisher
        kept = dict.fromkeys(self._stored.digests(), _PROMISE_S)
        self._copies.restore(set(kept), kept, self._now())
        self._held |= kept.keys()
        self._tasks.start(self._say_kept(kept), "cluster holdings")

    async def _say_kept(self, digests: Iterable[str]) -> None:
        async for digest in in_turns(digests):
            if digest in self._held:
                self._say_held(digest, Tier.DISK)

    def _say_held(self, digest: str, tier: Tier) -> None:
        try:
            self._publisher_now.advertise(digest, tier)
        except CaraServeError as error:  # it is said of so many already
            self.announce_failures += 1
            self._publisher_now.withdraw(digest)
            log.warning("nobody is told that adapter %s is here: %s", digest[:12], error.message)

    async def close(self) -> None:
        """Ends what is under way."""
        await self._tasks.end()
        await asyncio.get_running_loop().run_in_executor(None, self._disk.shutdown)
        self._stored.close()

    # --- what is here ---

    @property
    def num_held(self) -> int:
        """Adapters whose bytes are here to stay."""
        return len(self._held)

    @property
    def stored_bytes(self) -> int:
        """Of what came from others, on our disk."""
        return self._stored.num_bytes

    def holds(self, digest: str) -> bool:
        """Whether its bytes are here to stay, so that others may count on them."""
        return self._copies.has(digest)

    def stored_digests(self) -> list[str]:
        """What came from others and is on our disk."""
        return self._stored.digests()

    def spare(self, digests: Iterable[str]) -> Iterator[tuple[str, str]]:
        """(name, digest) of those that no name which the plan wants here has."""
        for digest in digests:
            version = self._manager.find(digest)
            if version is not None and not any(map(self.wanted, version.names)):
                yield from ((name, digest) for name in version.names)

    # --- names ---

    def named(self, digest: str) -> None:
        """Some name means it."""
        self._named.add(digest)
        self._nameless.discard(digest)

    def loaded(self, info: AdapterInfo) -> None:
        """It lies in a folder here, and some name means it."""
        self.named(info.digest)
        self._stamps[info.digest] = info.stamp
        self._verified(info.digest)

    def renamed(self) -> None:
        """Some name means another thing, or none: what it meant before may be needed no more."""
        self._swept = False

    async def sweep(self) -> None:
        """What has no name is nobody's any more: its last copy may go. One that this instance cannot serve under its
        name is still its name's."""
        if self._swept:
            return
        self._swept = True
        async for digest in in_turns(list(self._held)):
            version = self._manager.find(digest)
            if version is not None and not version.names:
                self._swept = False  # its last requests are under way
            elif version is None and digest in self._named:  # else its name may still be on its way to us
                self._nameless.add(digest)
        if self._nameless:
            async for adapter in known_adapters(self._node):
                self._nameless.discard(adapter.digest)
        while self._nameless:
            digest = self._nameless.pop()
            if self._manager.find(digest) is None:
                self._copies.lost(digest)
                self._delete(digest)

    # --- reading ---

    async def stored_image(self, digest: str, into: NDArray[np.uint8]) -> HostAdapter | None:
        """From our disk; None when it is not there, or not as it should be, or cannot be read now."""
        if digest not in self._stored:
            return None
        try:
            image = await self._on_thread(self._reader.executor, self._stored.read, digest, into)
        except AdapterRejected as error:
            log.warning("%s; it is fetched again", error.message)
            self._lost(digest)
            return None
        except OSError as error:  # too many open files, a disk that hangs: what it holds is still there
            log.warning("adapter %s cannot be read from disk now: %s", digest[:12], error.strerror)
            return None
        self._stored.used(digest)
        self._read.add(digest)
        return image

    def _read_own(self, source: Source, into: NDArray[np.uint8], done: Done) -> None:
        """From our disk alone: what others have, they hand out themselves."""
        if isinstance(source, RemoteSource):
            self._tasks.start(self._read_stored(source.digest, into, done), f"read of adapter {source.digest[:12]}")
        else:
            self._reader.read(source, into, done)

    async def _read_stored(self, digest: str, into: NDArray[np.uint8], done: Done) -> None:
        image = await self.stored_image(digest, into)
        done(image if image is not None else CaraServeError(f"This instance does not have {digest}."))

    def _was_read(self, digest: str, folder: Path, before: str) -> None:
        """For `AdapterReader.on_read`: those who were told that we hold it no more hear that we do."""
        version = self._manager.find(digest)
        if version is None or version.source != folder or not version.names:
            return
        self._stamps[digest] = before
        if digest not in self._held:
            self._verified(digest)
            self._say_held(digest, Tier.HOST)

    # --- writing ---

    async def keep(self, digest: str, image: HostAdapter | None = None) -> None:
        """Writes what has been fetched to our disk, `image` or what the host tier has; then we hold it, and say so.
        Two who ask wait for one writing."""
        task = self._keeping.get(digest)
        if task is None:
            task = self._tasks.start(self._write(digest, image), f"write of adapter {digest[:12]}")
            self._keeping[digest] = task
            task.add_done_callback(lambda _: self._keeping.pop(digest, None))
        await asyncio.shield(task)

    async def _write(self, digest: str, image: HostAdapter | None) -> None:
        try:
            async with self.uploads.image_of(digest) if image is None else nullcontext(image) as lent:
                if not await self._written(lent):
                    self.cache_full += 1
                    return
        except CaraServeError:
            return  # nobody wants it any more
        except UploadsBusy:
            self.cache_full += 1
            return
        except OSError as error:
            self.cache_full += 1
            log.warning("adapter %s cannot be kept on disk: %s", digest[:12], error.strerror)
            return
        self._read.add(digest)
        self._verified(digest)
        self._say_held(digest, Tier.HOST if image is None else Tier.DISK)
        self._swept = False

    async def _written(self, image: HostAdapter) -> bool:
        """Whether there was room for it. Raises OSError."""
        size = file_size(image)
        if not await self._make_room(size):
            return False
        self._stored.reserve(size)  # others that are written meanwhile must not count on it
        try:
            await self._on_thread(self._disk, self._stored.write, image)
            self._stored.added(image.spec.digest, size)
        finally:
            self._stored.reserve(-size)
        return True

    async def _make_room(self, num_bytes: int) -> bool:
        """Lets the least recently used go until so much fits; what the plan wants here stays."""

        def fits() -> bool:
            return self._stored.num_bytes + num_bytes <= self._most_bytes

        async for digest in in_turns(takewhile(lambda _: not fits(), self._stored.digests())):
            version = self._manager.find(digest)
            if version is None or not any(map(self.wanted, version.names)):
                await self.let_go(digest)
        return fits()

    # --- letting go ---

    async def let_go(self, digest: str) -> bool:
        """Deletes what came from others, if one of them promises to keep it; whether it did."""
        if digest not in self._stored or digest in self._keeping:
            return False
        holders = [name for name in self._node.holders(digest) if name != self._node.name]
        random.shuffle(holders)
        for holder in holders[:3]:
            for pause_s in (0.0, _LOOK_S):
                await asyncio.sleep(pause_s)
                number = self._copies.ask(digest, _PROMISE_S, self._now())
                if number is None:
                    return False
                answer = await self._node.query(holder, (KEEP_QUESTION, digest, _PROMISE_S), _ANSWER_S)
                if self._copies.answered(digest, number, answer == (_YES,), self._now()):
                    self._delete(digest)
                    return True
                if answer != (_LOOKING,):
                    break
        return False

    def answer(self, peer: str, body: QueryBody) -> QueryBody:
        """For `NodeListener.answer_query`: another instance would delete, and asks us to keep ours."""
        match body:
            case (_, str(digest), float(ttl_s) | int(ttl_s)) if 0 < ttl_s <= 10 * _PROMISE_S:
                if not self._copies.has(digest):
                    return (_NO,)
                if not self._is_sure(digest):
                    return (_LOOKING,)
                return (_YES if self._copies.promise(digest, ttl_s, self._now()) else _NO,)
        return (_NO,)

    def _is_sure(self, digest: str) -> bool:
        """Whether its bytes are known to be here. If not, we look, for the next time that somebody asks."""
        if digest in self._stored:
            sure = digest in self._read
        else:
            sure = self._now() - self._looked_s.get(digest, -inf) <= _SURE_S
        if not sure and digest not in self._looking:
            self._looking.add(digest)
            self._look_soon(digest).add_done_callback(lambda _: self._looking.discard(digest))
        return sure

    def _verified(self, digest: str) -> None:
        self._held.add(digest)
        self._copies.verified(digest)

    def _unread(self, digest: str, is_changed: bool) -> None:
        """Its bytes could not be lent. An error of the moment is no reason to disown them."""
        if is_changed:
            self._lost(digest)
        else:
            self._look_soon(digest)

    def _look_soon(self, digest: str) -> "asyncio.Task[None]":
        return self._tasks.start(self._look(digest), f"look at adapter {digest[:12]}")

    async def _look(self, digest: str) -> None:
        """Whether its bytes are still here, and as they were. One at a time: it may take a whole adapter's memory."""
        async with self._looks:
            version = self._manager.find(digest)
            if digest in self._stored:
                await self.stored_image(digest, aligned_bytes(self._stored.file_bytes(digest)))
            elif version is not None and isinstance(version.source, Path):
                await self._look_at_folder(digest, version.source, version.num_bytes)

    async def _look_at_folder(self, digest: str, folder: Path, num_bytes: int) -> None:
        found = await self._on_thread(self._reader.executor, stamp, folder)
        if found and found == self._stamps.get(digest):
            self._looked_s[digest] = self._now()
            return
        if found:  # touched, or written anew: only reading tells
            result: asyncio.Future[HostAdapter | CaraServeError] = asyncio.get_running_loop().create_future()

            def done(read: HostAdapter | CaraServeError) -> None:
                if not result.done():
                    result.set_result(read)

            self._reader.read(folder, aligned_bytes(num_bytes), done)
            read = await result
            if isinstance(read, HostAdapter) and read.spec.digest == digest:
                self._looked_s[digest] = self._now()  # `_was_read` has the new stamp
                return
        self._lost(digest)

    def _lost(self, digest: str) -> None:
        """Its bytes turned out to be gone or wrong: nobody may count on us any more."""
        if self._copies.has(digest):
            log.warning("adapter %s can no longer be read here", digest[:12])
        self._copies.lost(digest)
        self._delete(digest)

    def _delete(self, digest: str) -> None:
        """We hold it no more."""
        self._held.discard(digest)
        self._stamps.pop(digest, None)
        self._looked_s.pop(digest, None)
        self._read.discard(digest)
        self._publisher_now.withdraw(digest)
        if digest in self._stored:
            self.deleted += 1
            self._stored.forget(digest)
            self._disk.submit(self._stored.delete, digest)

    @property
    def _publisher_now(self) -> Publisher:
        assert self._publisher is not None, "nothing has begun"
        return self._publisher

    async def _on_thread(self, executor: Any, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
