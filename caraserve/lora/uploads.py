"""Receives adapters from clients and stores them below the adapter root, each once it is complete and valid.

    body ─► hidden folder in the root ─► checksum, then every tensor checked ─► renamed to the adapter's name ─► catalog

Under a name that stands for no adapter yet, requests are admitted while the body arrives (`upload_stream.py`). Bodies
for one name may arrive at the same time; they are stored one after the other, in the order in which they are complete.
Whatever fails or ends early, the hidden folder is removed.
"""

import asyncio
import hashlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from caraserve.core.adapter_facts import AdapterFacts
from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import (
    AdapterAliased,
    AdapterBusy,
    AdapterRejected,
    CaraServeError,
    Forbidden,
    PayloadTooLarge,
    ServerBusy,
    Unreachable,
    VersionDiffers,
)
from caraserve.lora.adapter import Adapter
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.adapter_reader import AdapterReader, log_notes
from caraserve.lora.catalog import Catalog
from caraserve.lora.folder_contents import TENSORS_NAME, stamp
from caraserve.lora.inspections import Inspection
from caraserve.lora.peft import WholeFileNeeded
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.lora.registry import AdapterInfo
from caraserve.lora.turns import Turns
from caraserve.lora.upload_body import MOST_CONFIG_BYTES, MOST_OTHER_BYTES, UploadBody, config_of
from caraserve.lora.upload_folders import UploadFolders, is_uploaded, not_written, write_through
from caraserve.lora.upload_stream import UploadStream
from caraserve.model.opened_file import TensorFileError
from caraserve.model.safetensors_reader import TensorFile
from caraserve.util.tasks import Tasks
from caraserve.util.units import human_bytes

log = logging.getLogger(__name__)

_WRITERS = 4  # threads
_MOST_OVERHEAD_BYTES = 4 * MOST_CONFIG_BYTES  # of a body, beside its tensors
_RETRY_S = 1.0
_MOST_UPLOADS, _MOST_OF_CLIENT = 16, 4  # at the same time
_MOST_WAITING = 64  # of a client
_HEARD_S = 60.0  # until this instance has heard, or changed again, what a name stands for

T = TypeVar("T")
RemovalObserver = Callable[[str, str], "asyncio.Task[bool]"]
"""Has other instances remove the files that a name stood for, by its digest. Returns a task whose result is whether one
of them keeps files of the name, which were not uploaded."""
CheckUpload = Callable[[str | None], None]
"""Refuses an upload by raising: before its body is read (None), then by its digest when it is to be stored."""


@dataclass(frozen=True, slots=True)
class UploadedAdapter:
    """The result of an upload: what the name stands for, and what it stood for before."""

    info: AdapterInfo
    old: AdapterInfo | None
    skipped: tuple[str, ...] = ()  # files of the body that were left out

    @property
    def is_new(self) -> bool:
        """Whether the name stood for no adapter before."""
        return self.old is None


@dataclass(frozen=True, slots=True)
class UploadClaims:
    """What the client says of the body. `checksums`: SHA-256, by the header that states it. `client`: its sender."""

    num_bytes: int | None = None
    config: str | None = None
    checksums: tuple[tuple[str, bytes], ...] = ()
    client: str = ""


@dataclass(frozen=True, slots=True)
class Unregistered:
    """An adapter that a name no longer stands for: its record, None if this instance has none, and, if its files were
    uploaded here, their folder and the removal under way. `keeps_files`: whether it has files here that stay.
    `elsewhere`: whether it has some on other instances."""

    adapter: Adapter | None
    folder: AdapterFolder | None = None
    removal: "asyncio.Task[None] | None" = None
    keeps_files: bool = False
    elsewhere: "Sequence[asyncio.Task[bool]]" = ()


class AdapterUploads:
    """The uploads of one instance. Runs on the event loop; files are written on threads of its own."""

    def __init__(
        self,
        catalog: Catalog,
        reader: AdapterReader,
        root: Path | None,
        most_image_bytes: int,
        observers: Sequence[RemovalObserver] = (),
    ) -> None:
        """`root`: the folder of adapters, None if the server was started without one. `most_image_bytes`: of the
        largest adapter that can be served. `observers`: called with the name and the digest of each adapter that was
        deleted or replaced by an upload."""
        self.catalog, self.reader, self.most_bytes = catalog, reader, most_image_bytes
        self._root, self._observers = root, observers
        self._folders = None if root is None else UploadFolders(root)
        self._executor = ThreadPoolExecutor(_WRITERS, "caraserve-upload")
        self._places = Turns(  # by client: one's slow uploads leave room for others
            _upload_refused, of_key=_MOST_OF_CLIENT, of_all=_MOST_UPLOADS, waiting=_MOST_WAITING
        )
        self._removals = Tasks()
        self._under_way: Counter[str] = Counter()  # names

    async def close(self) -> None:
        """Ends the threads, and removes all hidden folders."""
        await self._removals.end()
        if self._folders is not None:
            await self.on_thread(self._folders.close)
        self._executor.shutdown()

    async def put(
        self, name: str, pieces: AsyncIterator[bytes], claims: UploadClaims, check: CheckUpload = lambda digest: None
    ) -> UploadedAdapter:
        """Stores the adapter that `pieces` bring, and points `name` at it. Raises AdapterRejected, PayloadTooLarge,
        Forbidden, AdapterBusy, ServerBusy, or as `check`; then nothing has changed."""
        self.catalog.refuse_unchangeable(name)
        if self._root is None or self._folders is None:
            raise Forbidden(
                "Uploaded adapters are stored in --adapters-dir; start the server with one that can be written."
            )
        folder, most_bytes = self._root / name, self.most_bytes + MOST_OTHER_BYTES + _MOST_OVERHEAD_BYTES
        if (claims.num_bytes or 0) > most_bytes:
            raise PayloadTooLarge(f"The body is larger than {human_bytes(most_bytes)}, which can be served here.")
        async with self.catalog.changing(name):  # what can be refused before a byte is read
            check(None)
            await self.on_thread(refuse_own, folder)
        async with self._places.taken(claims.client):
            self._under_way[name] += 1
            try:
                return await _Upload(self, self._folders, name, folder, claims, check).run(pieces)
            finally:
                self._under_way[name] -= 1
                self._under_way += Counter()  # drops names without any

    async def unregister(self, name: str) -> Unregistered:
        """Unregisters a name, for a caller that is `changing` it. `ended` must be called next. Raises NotFound or
        AdapterBusy."""
        return await to_its_end(asyncio.ensure_future(self._unregister(name)))

    async def _unregister(self, name: str) -> Unregistered:
        info = self.catalog.find_whole(name)
        path = None if self._root is None or info is None else self._root / name
        is_ours = info is not None and path == Path(info.path) and await self.on_thread(is_uploaded, path)
        if info is None or path is None or self._folders is None or not is_ours:
            adapter = await self.catalog.unregister(name)
            if info is None:
                return Unregistered(adapter)
            has_files = bool(info.targets)  # else they are on other instances
            return Unregistered(adapter, keeps_files=has_files, elsewhere=self.removed(name, info.digest))
        folder = self.catalog.folders.at(path)
        try:
            await self.on_thread(self._folders.hide, folder)  # as the next start would find it again
        except OSError as error:
            raise CaraServeError(f"the adapter's files cannot be removed: {error.strerror}") from None
        try:
            adapter = await self.catalog.unregister(name)
        except CaraServeError:
            await self.on_thread(folder.rename, path)
            raise
        elsewhere = self.removed(name, info.digest)
        return Unregistered(adapter, folder, self.remove_later(folder), elsewhere=elsewhere)

    async def ended(self, unregistered: Unregistered) -> bool:
        """Returns when the last request of an unregistered adapter has ended, and its files have been removed: whether
        it has files that stay, here or on an instance that has answered."""
        if unregistered.adapter is not None:
            await self.catalog.manager.forgotten(unregistered.adapter)
        folder, removal = unregistered.folder, unregistered.removal
        if folder is not None and removal is not None and not folder.is_used:  # else another name stands for its files
            await asyncio.shield(removal)
        if asked := unregistered.elsewhere:
            await asyncio.wait(asked)
        return unregistered.keeps_files or any(
            not one.cancelled() and one.exception() is None and one.result() for one in asked
        )

    def removed(self, name: str, digest: str) -> "Sequence[asyncio.Task[bool]]":
        """Calls the observers: a name no longer stands for an adapter, whose files are to be removed."""
        return [observe(name, digest) for observe in self._observers]

    def keeps_files(self, name: str) -> bool:
        """Returns whether the files of a name stay here when it is deleted, because they were not uploaded. Looks at
        the disk, but only at the times of one folder."""
        info, path = self.catalog.find_whole(name), None if self._root is None else self._root / name
        if info is not None and info.targets and path != Path(info.path):
            return True
        return path is not None and stamp(path) != "" and not is_uploaded(path)

    async def discard(self, name: str, digest: str) -> None:
        """Removes the files of an adapter that was uploaded here, once the name no longer stands for it: another
        instance has deleted or replaced it. Does nothing if the name still stands for it after a minute, because it was
        uploaded again. Its folder may be shared with that instance and have other files by now; an upload under way
        replaces them itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEARD_S):
                while self._stands_for(name, digest):
                    await self.catalog.manager.next_change()
        if self._stands_for(name, digest) or name in self._under_way:
            return
        with suppress(AdapterBusy):  # the changes that wait replace or delete the files themselves
            async with self.catalog.changing(name):
                if not self._stands_for(name, digest):
                    await self._remove_files(name, digest)

    def _stands_for(self, name: str, digest: str) -> bool:
        info = self.catalog.find_whole(name)
        return info is not None and info.digest == digest

    async def _remove_files(self, name: str, digest: str) -> None:
        if self._root is None or self._folders is None:
            return
        folder = self.catalog.folders.at(self._root / name)
        if not await self.on_thread(self._has_upload, folder.path, digest):
            return
        try:
            await self.on_thread(self._folders.hide, folder)
        except OSError as error:
            log.warning("the files of adapter %s cannot be removed: %s", name, error.strerror)
            return
        self.catalog.forget_folder(name)  # which the unload found, and took for one that stays
        self.remove_later(folder)

    def _has_upload(self, folder: Path, digest: str) -> bool:
        """Returns whether a folder has the files of an uploaded adapter with that digest."""
        try:
            return is_uploaded(folder) and self.reader.inspect(folder).digest == digest
        except (CaraServeError, OSError):
            return False

    async def on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs a function on one of the threads, to its end."""
        return await to_its_end(asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments))

    def remove_later(self, folder: AdapterFolder) -> "asyncio.Task[None]":
        """Removes a hidden folder when no adapter is read from it any more."""

        async def remove() -> None:
            await folder.unused()
            await self.on_thread(shutil.rmtree, folder.path, True)

        return self._removals.start(remove(), f"removal of the files of {folder.name}")


class _Upload:
    """One upload, from its first byte to its name."""

    def __init__(
        self,
        uploads: AdapterUploads,
        folders: UploadFolders,
        name: str,
        path: Path,
        claims: UploadClaims,
        check: CheckUpload,
    ) -> None:
        """`path`: where the adapter's files will be."""
        self._uploads, self._folders, self._catalog = uploads, folders, uploads.catalog
        self._name, self._path, self._claims, self._check = name, path, claims, check
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0
        self._stream: UploadStream | None = None
        self._may_stream = True  # False: the layout is known only when the whole body has arrived
        self._admitted: AdapterInfo | None = None  # by which requests may name it
        self._has_exchanged = False  # whether the hidden folder is now that of the adapter before

    async def run(self, pieces: AsyncIterator[bytes]) -> UploadedAdapter:
        uploads, on_thread = self._uploads, self._uploads.on_thread
        hidden = self._folders.free_path()
        body = UploadBody(hidden, uploads.most_bytes, self._claims.num_bytes, self._claims.config)
        failure = _broken(self._name, CaraServeError("it has ended early"))
        try:
            await on_thread(self._folders.make, hidden)
            async for piece in pieces:
                await on_thread(self._take, body, hidden, piece)
                self._admit()
            found, image = await on_thread(self._checked, body, hidden)
            facts = await on_thread(self._catalog.rules.base.facts_of, hidden, found)
            await on_thread(write_through, hidden)
            async with self._catalog.changing(self._name):
                self._check(found.digest)
                stored = await to_its_end(asyncio.ensure_future(self._store(found, facts, image, hidden)))
                return replace(stored, skipped=body.names_of_skipped())
        except OSError as error:
            unwritten = not_written(error)
            failure = _broken(self._name, unwritten)
            raise unwritten from None
        except CaraServeError as error:
            failure = _broken(self._name, error)
            raise
        finally:
            if self._stream is not None:
                self._stream.fail(failure)  # no effect on one that is stored
            if self._admitted is not None:
                self._catalog.end_upload(self._admitted)
            await on_thread(self._end, body, hidden)

    def _admit(self) -> None:
        """Lets requests name the adapter once its layout is known, and reports layers that have arrived."""
        if self._stream is not None and self._admitted is None:
            found = Inspection.of(self._stream.spec)
            self._catalog.refuse_unservable(found)
            self._admitted = self._catalog.begin_upload(self._name, self._stream, found)
        if self._stream is not None:
            self._stream.announce()

    def _take(self, body: UploadBody, hidden: Path, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes - body.other_bytes > self._uploads.most_bytes + _MOST_OVERHEAD_BYTES:
            raise PayloadTooLarge(
                f"The body is larger than {human_bytes(self._uploads.most_bytes)}, which can be served here."
            )
        self._sha256.update(piece)
        body.write(piece)
        if self._stream is None and self._may_stream and body.has_tensor_header():
            self._add_config(body, hidden)
            if body.has(CONFIG_NAME):
                try:
                    self._stream = UploadStream(self._name, hidden, self._uploads.reader)
                except WholeFileNeeded:
                    self._may_stream = False
        if self._stream is not None:
            self._stream.advance(body.tensor_bytes)

    def _checked(self, body: UploadBody, hidden: Path) -> tuple[Inspection, HostAdapter | None]:
        """Checks the checksum first, then what the body holds. Returns the adapter's description, and its image if
        requests have wanted it."""
        for header, expected in self._claims.checksums:
            if self._sha256.digest() != expected:
                raise AdapterRejected(
                    f"the body's SHA-256 is {self._sha256.hexdigest()}, not what {header} says", param=header
                )
        body.end()
        self._add_config(body, hidden)
        body.check_complete()
        if self._stream is not None:
            self._stream.advance(body.tensor_bytes)
            if (image := self._stream.image()) is not None:
                return Inspection.of(image.spec), image
        found = self._uploads.reader.inspect(hidden)
        log_notes(self._name, found.notes)
        self._catalog.refuse_unservable(found)
        return found, None

    def _add_config(self, body: UploadBody, hidden: Path) -> None:
        """Adds the configuration that a safetensors file has in its metadata, where there is no other."""
        if not body.is_bare or body.has(CONFIG_NAME):
            return
        try:
            with TensorFile(hidden / TENSORS_NAME) as file:
                config = config_of(file.metadata)
        except TensorFileError as error:
            raise AdapterRejected(str(error)) from None
        if config is not None:
            body.add_config(config)
        body.refuse_missing_config()

    async def _store(
        self, found: Inspection, facts: AdapterFacts, image: HostAdapter | None, hidden: Path
    ) -> UploadedAdapter:
        """Lets the requests that wait for the image go on, then stores the adapter."""
        catalog, on_thread = self._catalog, self._uploads.on_thread
        if self._admitted is not None:
            self._admitted = catalog.identify_upload(self._admitted, found.digest)
        if self._stream is not None:
            self._stream.complete(image)
        old = catalog.find_whole(self._name)
        if old is not None and old.digest == found.digest and old.targets and old.facts == facts:
            if self._stream is not None:
                self._stream.stored(catalog.folders.at(Path(old.path)))
            return UploadedAdapter(old, old)
        replaced = catalog.folders.at(self._path)
        self._has_exchanged = await on_thread(_give_place, hidden, replaced)
        folder = catalog.folders.at(self._path)
        try:
            info = await catalog.add_stored(self._name, found, facts, folder)
        except CaraServeError:
            if self._has_exchanged:
                await on_thread(replaced.exchange, self._path)
                self._has_exchanged = False
            else:
                await on_thread(folder.rename, hidden)
            raise
        if self._stream is not None:
            self._stream.stored(folder)
        if self._has_exchanged:
            self._uploads.remove_later(replaced)
        if old is not None and old.digest != found.digest:  # otherwise the name still stands for the files elsewhere
            self._uploads.removed(self._name, old.digest)
        return UploadedAdapter(info, old)

    def _end(self, body: UploadBody, hidden: Path) -> None:
        body.close()
        if self._stream is not None:
            self._stream.close()
        if not self._has_exchanged:
            shutil.rmtree(hidden, ignore_errors=True)


def _give_place(hidden: Path, replaced: AdapterFolder) -> bool:
    """Gives a complete folder the path of `replaced`, which then has its path. Returns False if there was none."""
    refuse_own(replaced.path)
    if os.path.lexists(replaced.path):
        replaced.exchange(hidden)
        return True
    os.rename(hidden, replaced.path)
    return False


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Awaits work that is not cancelled half way: a caller that is cancelled waits for it first."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():  # a thread may be writing to memory that is freed next
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise


def refuse_own(path: Path) -> None:
    """Raises AdapterRejected for a folder in the root that was not made by an upload."""
    if os.path.lexists(path) and not is_uploaded(path):
        raise AdapterRejected(
            f"{path.name!r} is a folder in --adapters-dir that was not uploaded, and is not replaced; use another name",
            param="name",
        )


def _upload_refused(client: str, has_many: bool) -> ServerBusy:
    text = f"{_MOST_UPLOADS} adapters are being uploaded, or {_MOST_OF_CLIENT} by this client; try again"
    return ServerBusy(text, retry_after_s=_RETRY_S)


def _broken(name: str, why: CaraServeError) -> CaraServeError:
    """Returns the error of the requests for an adapter whose upload has failed: another one if only the name could not
    be given to it, as a request that is sent again is answered by what the name stands for now."""
    if isinstance(why, AdapterBusy | AdapterAliased | VersionDiffers):
        message = f"{name!r} was changed while its adapter was uploaded; send the request again"
        return AdapterBusy(message, retry_after_s=_RETRY_S, param="model")
    return Unreachable(f"the upload of the adapter {name!r} has failed: {why.message}", retry_after_s=_RETRY_S)
