"""Stores the adapters that this instance holds for the cluster: writes, verifies, advertises and deletes them.

    downloaded ─► written to the disk cache ─► advertised: other instances may rely on it
    disk cache full, or the plan has it elsewhere ─► another holder's promise ─► deleted

An adapter that only one instance holds is not deleted. Files in the user's folders are never deleted.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import takewhile
from math import inf
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from caraserve.cluster.membership.member import Member, QueryBody
from caraserve.cluster.routing.publisher import Publisher
from caraserve.cluster.state.replicated_map import Tier
from caraserve.cluster.transfer.delete_lease import DeleteLeases
from caraserve.cluster.transfer.disk_cache import DiskCache, file_size
from caraserve.cluster.transfer.upload import UploadsBusy, UploadServer
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.adapter import Done, RemoteSource, Source
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.manager import AdapterManager
from caraserve.lora.registry import AdapterInfo
from caraserve.util.tasks import Tasks, in_turns

log = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_QUERY = "hold"  # kind of a query in the protocol: (KEEP_QUERY, digest, seconds for which to keep its bytes)
_PROMISE_S = 30.0
_ANSWER_S = 1.0
_NO, _YES, _CHECKING = range(3)  # answers to it; `_CHECKING`: to be asked again after _RECHECK_S
_RECHECK_S = 0.25
_FOLDER_VALID_S = 1.0  # for which a check of files in a folder holds: users may change them


class AdapterStore:
    """The adapters that this instance holds. Methods run on the event loop; reading and writing run on threads."""

    def __init__(
        self,
        member: Member,
        publisher: Publisher,
        manager: AdapterManager,
        reader: AdapterReader,
        stored: DiskCache,
        most_bytes: int,
        now: Callable[[], float],
    ) -> None:
        """`most_bytes`: size of the disk cache."""
        self.uploads = UploadServer(manager, self._read_own, self._on_upload_failure, lambda: member.keys)
        self.cache_full = self.announce_failures = self.deleted = 0
        self._member, self._publisher, self._manager, self._reader = member, publisher, manager, reader
        self.stored, self._most_bytes, self._now = stored, most_bytes, now
        self._leases = DeleteLeases()
        self._planned: Container[str] = ()  # names that the plan places here
        self._stamps: dict[str, str] = {}  # of files in folders, when they had those bytes
        self._checked_s: dict[str, float] = {}  # when those files were last seen unchanged
        self._read: set[str] = set()  # of the disk cache: read or written without error since the start
        self._checking: set[str] = set()
        self._check_lock = asyncio.Lock()
        self._named: set[str] = set()  # digests that had a name since the start
        self._nameless: set[str] = set()  # those of them that seem to have none now; checked in `sweep`
        self._swept = True
        self._disk = ThreadPoolExecutor(1, "caraserve-stored")
        self._tasks = Tasks()
        self._writes: dict[str, asyncio.Task[None]] = {}

    def begin(self) -> None:
        """Starts, once the member has: advertises the adapters in the disk cache, and keeps them for 30 s, as an
        earlier run may have promised."""
        digests = self.stored.digests()
        self._leases.restore(digests, _PROMISE_S, self._now())
        self._tasks.start(self._advertise_all(digests), "cluster holdings")

    async def _advertise_all(self, digests: Iterable[str]) -> None:
        async for digest in in_turns(digests):
            if self._leases.has(digest):
                self._advertise(digest, Tier.DISK)

    def _advertise(self, digest: str, tier: Tier) -> None:
        try:
            self._publisher.advertise(digest, tier)
        except CaraServeError as error:  # too many are advertised already
            self.announce_failures += 1
            self._publisher.withdraw(digest)
            log.warning("adapter %s is here and cannot be advertised: %s", digest[:12], error.message)

    async def close(self) -> None:
        """Ends all work in progress."""
        await self._tasks.end()
        await asyncio.get_running_loop().run_in_executor(None, self._disk.shutdown)
        self.stored.close()

    # --- adapters held ---

    @property
    def num_held(self) -> int:
        """Number of adapters held."""
        return len(self._leases.digests())

    def holds(self, digest: str) -> bool:
        """Whether an adapter's bytes are on disk here and verified, so that other instances may rely on them."""
        return self._leases.has(digest)

    def set_planned(self, names: Container[str]) -> None:
        """Takes the names of the adapters that the plan places here; they stay in the disk cache."""
        self._planned = names

    def _is_planned(self, names: Iterable[str]) -> bool:
        return any(name in self._planned for name in names)

    def spare(self, digests: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yields (name, digest) of those of these adapters that the plan does not place here."""
        for digest in digests:
            version = self._manager.find(digest)
            if version is not None and not self._is_planned(version.names):
                yield from ((name, digest) for name in version.names)

    # --- names ---

    def named(self, digest: str) -> None:
        """Records that a name stands for this digest."""
        self._named.add(digest)
        self._nameless.discard(digest)

    def loaded(self, info: AdapterInfo) -> None:
        """Records an adapter that was loaded from a folder, as verified and named."""
        self.named(info.digest)
        self._stamps[info.digest] = info.stamp
        self._leases.verified(info.digest)

    def renamed(self) -> None:
        """Records that a name stands for another digest now, or for none, so that `sweep` has work."""
        self._swept = False

    async def sweep(self) -> None:
        """Deletes adapters without a name, even last copies. An adapter with a name in the registry stays, even if this
        instance cannot serve it."""
        if self._swept:
            return
        self._swept = True
        async for digest in in_turns(self._leases.digests()):
            version = self._manager.find(digest)
            if version is not None and not version.names:
                self._swept = False  # its last requests are running
            elif version is None and digest in self._named:  # else its name may still arrive
                self._nameless.add(digest)
        if self._nameless:
            async for adapter in self._member.adapters_in_turns():
                self._nameless.discard(adapter.digest)
        while self._nameless:
            digest = self._nameless.pop()
            if self._manager.find(digest) is None:
                self._delete(digest)

    # --- reading ---

    async def stored_image(self, digest: str, into: NDArray[np.uint8]) -> HostAdapter | None:
        """Reads an adapter from the disk cache; None when it is not there, has changed, or cannot be read now."""
        if digest not in self.stored:
            return None
        try:
            image = await self._on_thread(self._reader.executor, self.stored.read, digest, into)
        except AdapterRejected as error:
            log.warning("%s; it is downloaded again", error.message)
            self._lost(digest)
            return None
        except OSError as error:  # such as too many open files: the adapter's file still exists
            log.warning("adapter %s cannot be read from disk now: %s", digest[:12], error.strerror)
            return None
        self.stored.used(digest)
        self._read.add(digest)
        return image

    def _read_own(self, source: Source, into: NDArray[np.uint8], done: Done) -> None:
        """Reads an adapter from this instance's disk, without a download: other holders upload it themselves."""
        if isinstance(source, RemoteSource):
            self._tasks.start(self._read_stored(source.digest, into, done), f"read of adapter {source.digest[:12]}")
        else:
            self._reader.read(source, into, done)

    async def _read_stored(self, digest: str, into: NDArray[np.uint8], done: Done) -> None:
        image = await self.stored_image(digest, into)
        done(image if image is not None else CaraServeError(f"This instance does not have {digest}."))

    def on_folder_read(self, digest: str, folder: AdapterFolder, before: str) -> None:
        """For `AdapterReader`: advertises an adapter again whose folder had been found changed."""
        version = self._manager.find(digest)
        if version is None or version.source is not folder or not version.names:
            return
        self._stamps[digest] = before
        if not self._leases.has(digest):
            self._leases.verified(digest)
            self._advertise(digest, Tier.HOST)

    # --- writing ---

    async def keep(self, digest: str, image: HostAdapter | None = None) -> None:
        """Writes a downloaded adapter to the disk cache, `image` or the one in the host cache, and advertises it.
        Concurrent calls for one digest share one write."""
        task = self._writes.get(digest)
        if task is None:
            task = self._tasks.start(self._write(digest, image), f"write of adapter {digest[:12]}")
            self._writes[digest] = task
            task.add_done_callback(lambda _: self._writes.pop(digest, None))
        await asyncio.shield(task)

    async def _write(self, digest: str, image: HostAdapter | None) -> None:
        try:
            async with self.uploads.image_of(digest) if image is None else nullcontext(image) as source_image:
                if not await self._written(source_image):
                    self.cache_full += 1
                    return
        except CaraServeError:
            return  # it was unloaded meanwhile
        except UploadsBusy:
            self.cache_full += 1
            return
        except OSError as error:
            self.cache_full += 1
            log.warning("adapter %s cannot be written to disk: %s", digest[:12], error.strerror)
            return
        self._read.add(digest)
        self._leases.verified(digest)
        self._advertise(digest, Tier.HOST if image is None else Tier.DISK)
        self._swept = False

    async def _written(self, image: HostAdapter) -> bool:
        """Writes an image; False if there was no room for it. Raises OSError."""
        size = file_size(image)
        if not await self._make_room(size):
            return False
        self.stored.reserve(size)  # concurrent writes must not use the same room
        try:
            await self._on_thread(self._disk, self.stored.write, image)
            self.stored.added(image.spec.digest, size)
        finally:
            self.stored.reserve(-size)
        return True

    async def _make_room(self, num_bytes: int) -> bool:
        """Deletes the least recently used adapters that the plan does not place here until `num_bytes` more fit.
        Returns whether they do."""

        def fits() -> bool:
            return self.stored.num_bytes + num_bytes <= self._most_bytes

        async for digest in in_turns(takewhile(lambda _: not fits(), self.stored.digests())):
            version = self._manager.find(digest)
            if version is None or not self._is_planned(version.names):
                await self.try_delete(digest)
        return fits()

    # --- deleting ---

    async def try_delete(self, digest: str) -> bool:
        """Deletes a downloaded adapter if another holder promises to keep it. Returns whether it was deleted."""
        if digest not in self.stored or digest in self._writes:
            return False
        holders = [name for name in self._member.holders(digest) if name != self._member.name]
        random.shuffle(holders)
        for holder in holders[:3]:
            for pause_s in (0.0, _RECHECK_S):
                await asyncio.sleep(pause_s)
                number = self._leases.start_delete(digest, _PROMISE_S, self._now())
                if number is None:
                    return False
                answer = await self._member.query(holder, (KEEP_QUERY, digest, _PROMISE_S), _ANSWER_S)
                if self._leases.finish_delete(digest, number, answer == (_YES,), self._now()):
                    self._delete(digest)
                    return True
                if answer != (_CHECKING,):
                    break
        return False

    def answer(self, peer: str, body: QueryBody) -> QueryBody:
        """Answers another instance that would delete an adapter, whether this one promises to keep its own copy."""
        match body:
            case (_, str(digest), float(ttl_s) | int(ttl_s)) if 0 < ttl_s <= 10 * _PROMISE_S:
                if not self._leases.has(digest):
                    return (_NO,)
                if not self._is_present(digest):
                    return (_CHECKING,)
                return (_YES if self._leases.promise(digest, ttl_s, self._now()) else _NO,)
        return (_NO,)

    def _is_present(self, digest: str) -> bool:
        """Whether an adapter's bytes are known to be here. If not, checks them in the background for the next query."""
        if digest in self.stored:
            present = digest in self._read
        else:
            present = self._now() - self._checked_s.get(digest, -inf) <= _FOLDER_VALID_S
        if not present and digest not in self._checking:
            self._checking.add(digest)
            self._start_check(digest).add_done_callback(lambda _: self._checking.discard(digest))
        return present

    def _on_upload_failure(self, digest: str, is_changed: bool) -> None:
        """Handles an upload that could not read an adapter. A passing error only starts a check."""
        if is_changed:
            self._lost(digest)
        else:
            self._start_check(digest)

    def _start_check(self, digest: str) -> "asyncio.Task[None]":
        return self._tasks.start(self._check(digest), f"check of adapter {digest[:12]}")

    async def _check(self, digest: str) -> None:
        """Checks that an adapter's bytes are here and unchanged; one at a time, to bound the memory."""
        async with self._check_lock:
            version = self._manager.find(digest)
            if digest in self.stored:
                await self.stored_image(digest, aligned_bytes(self.stored.file_bytes(digest)))
            elif version is not None and isinstance(version.source, AdapterFolder):
                await self._check_folder(digest, version.source, version.num_bytes)

    async def _check_folder(self, digest: str, folder: AdapterFolder, num_bytes: int) -> None:
        found = await self._on_thread(self._reader.executor, self._reader.stamp, folder.path)
        if found and found == self._stamps.get(digest):
            self._checked_s[digest] = self._now()
            return
        if found:  # touched or rewritten: its digest decides
            result: asyncio.Future[HostAdapter | CaraServeError] = asyncio.get_running_loop().create_future()

            def done(read: HostAdapter | CaraServeError) -> None:
                if not result.done():
                    result.set_result(read)

            self._reader.read(folder, aligned_bytes(num_bytes), done)
            read = await result
            if isinstance(read, HostAdapter) and read.spec.digest == digest:
                self._checked_s[digest] = self._now()  # `on_folder_read` has the new stamp
                return
        self._lost(digest)

    def _lost(self, digest: str) -> None:
        """Removes an adapter whose bytes turned out to be gone or wrong."""
        if self._leases.has(digest):
            log.warning("adapter %s can no longer be read here", digest[:12])
        self._delete(digest)

    def _delete(self, digest: str) -> None:
        """Withdraws an adapter, and deletes it from the disk cache."""
        self._leases.lost(digest)
        self._stamps.pop(digest, None)
        self._checked_s.pop(digest, None)
        self._read.discard(digest)
        self._publisher.withdraw(digest)
        if digest in self.stored:
            self.deleted += 1
            self.stored.forget(digest)
            self._disk.submit(self.stored.delete, digest)

    async def _on_thread(self, executor: Any, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
