"""Receives adapters from clients and stores them below the adapter root, each once it is complete and valid.

    body ─► hidden folder in the root ─► checksum, then every tensor checked ─► renamed to the adapter's name ─► catalog

Under a name that stands for no adapter yet, requests are admitted while the body arrives (`upload_stream.py`).

Whatever fails or ends early, the hidden folder is removed; one that a crash leaves is removed at a start an hour later.
"""

import asyncio
import ctypes
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.errors import AdapterRejected, CaraServeError, Forbidden, PayloadTooLarge, ServerBusy, Unreachable
from caraserve.lora.adapter import Adapter
from caraserve.lora.catalog import AdapterReader, Catalog
from caraserve.lora.peft import TENSORS_NAME, inspect_adapter
from caraserve.lora.peft_config import CONFIG_NAME
from caraserve.lora.registry import AdapterInfo
from caraserve.lora.upload_body import MOST_CONFIG_BYTES, UploadBody, config_of
from caraserve.lora.upload_stream import UploadStream
from caraserve.model.safetensors_reader import TensorFile, TensorFileError
from caraserve.model.spec import ModelSpec
from caraserve.util.tasks import Tasks
from caraserve.util.units import human_bytes

log = logging.getLogger(__name__)

_HIDDEN = ".caraserve-upload-"  # begins the names of folders of uploads that are not complete
_MARK = ".caraserve-uploaded"  # file in the folders that DELETE may remove and PUT may replace
_MOST_UPLOADS = 4
_MOST_OVERHEAD_BYTES = 4 * MOST_CONFIG_BYTES  # of a body, beside its tensors
_RETRY_S = 1.0
_HEARD_S = 60.0  # until this instance has heard, or changed again, what a name stands for
_ABANDONED_S = 3600.0  # age of a hidden folder that no upload uses any more
_RENAME_EXCHANGE = 2  # of renameat2
_AT_FDCWD = -100

T = TypeVar("T")
RemovalObserver = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class UploadedAdapter:
    """The result of an upload. `is_new`: whether the name stood for no adapter before."""

    info: AdapterInfo
    is_new: bool


@dataclass(frozen=True, slots=True)
class UploadClaims:
    """What the client says of the body. `checksums`: SHA-256, by the header that states it."""

    num_bytes: int | None = None
    config: str | None = None
    checksums: tuple[tuple[str, bytes], ...] = ()


class AdapterUploads:
    """The uploads of one instance. Runs on the event loop; files are written on threads of its own."""

    def __init__(
        self,
        catalog: Catalog,
        reader: AdapterReader,
        model: ModelSpec,
        root: Path | None,
        most_image_bytes: int,
        observers: Sequence[RemovalObserver] = (),
    ) -> None:
        """`root`: the folder of adapters, None if the server was started without one. `most_image_bytes`: of the
        largest adapter that can be served. `observers`: called with the name and the digest of each adapter that was
        deleted or replaced by an upload."""
        self.catalog, self.reader, self.model, self.most_bytes = catalog, reader, model, most_image_bytes
        self._root, self._observers = root, observers
        self._executor = ThreadPoolExecutor(_MOST_UPLOADS, "caraserve-upload")
        self._removals = Tasks()
        self._under_way: set[str] = set()  # names
        self._discarding: set[tuple[str, str]] = set()  # names and digests whose files are being removed
        if root is not None:
            _remove_abandoned(root)

    async def close(self) -> None:
        """Ends the threads."""
        await self._removals.end()
        self._executor.shutdown()

    async def put(self, name: str, pieces: AsyncIterator[bytes], claims: UploadClaims) -> UploadedAdapter:
        """Stores the adapter that `pieces` bring, and points `name` at it. Raises AdapterRejected, PayloadTooLarge,
        Forbidden or ServerBusy; then nothing has changed."""
        folder = self._check(name, claims)
        with self.catalog.changing(name):
            self._under_way.add(name)
            try:
                return await _Upload(self, name, folder, claims).run(pieces)
            finally:
                self._under_way.remove(name)

    def _check(self, name: str, claims: UploadClaims) -> Path:
        """Returns the folder that will have the adapter's files. Refuses what can be refused before a byte is read."""
        self.catalog.refuse_unchangeable(name)
        if self._root is None:
            raise Forbidden("Uploaded adapters are stored in --adapters-dir; start the server with one.")
        folder = self._root / name
        if os.path.lexists(folder) and not is_uploaded(folder):
            raise AdapterRejected(
                f"{name!r} is a folder in --adapters-dir that was not uploaded, and is not replaced; use another name",
                param="name",
            )
        most_bytes = self.most_bytes + _MOST_OVERHEAD_BYTES
        if (claims.num_bytes or 0) > most_bytes:
            raise PayloadTooLarge(f"The body is larger than {human_bytes(most_bytes)}, which can be served here.")
        if len(self._under_way) >= _MOST_UPLOADS:
            raise ServerBusy(f"{_MOST_UPLOADS} adapters are being uploaded; try again.", retry_after_s=_RETRY_S)
        if any(name == other for other, _ in self._discarding):  # those of the upload could be removed
            raise ServerBusy(f"The former files of {name!r} are being removed; try again.", retry_after_s=_RETRY_S)
        return folder

    async def delete(self, name: str) -> None:
        """Unregisters a name at once, waits until the last request of its adapter has ended, and removes the files if
        they were uploaded, also if the caller is cancelled. Raises NotFound."""
        with self.catalog.changing(name):
            adapter, hidden = await to_its_end(asyncio.ensure_future(self._unregister(name)))
            if hidden is not None:
                await asyncio.shield(self.remove_later(adapter, hidden))
            elif adapter is not None:
                await self.catalog.manager.forgotten(adapter)

    async def _unregister(self, name: str) -> tuple[Adapter | None, Path | None]:
        """Unregisters a name. Returns its adapter, and where its files are now if they were uploaded: under a hidden
        name first, as the next start would find the folder again."""
        info = self.catalog.get(name)
        folder = Path(info.path)
        if self._root is None or folder != self._root / name or not is_uploaded(folder):
            adapter = await self.catalog.unregister(name)
            self.removed(name, info.digest)
            return adapter, None
        try:
            hidden = await self.on_thread(_hide, folder)
        except OSError as error:
            raise CaraServeError(f"the adapter's files cannot be removed: {error.strerror}") from None
        adapter = self.catalog.manager.moved(info.digest, hidden)
        try:
            await self.catalog.unregister(name)
        except CaraServeError:
            await self.on_thread(os.rename, hidden, folder)
            self.catalog.manager.moved(info.digest, folder)
            raise
        self.removed(name, info.digest)
        return adapter, hidden

    def removed(self, name: str, digest: str) -> None:
        """Calls the observers: a name no longer stands for an adapter, whose files are to be removed."""
        for observe in self._observers:
            observe(name, digest)

    async def discard(self, name: str, digest: str) -> None:
        """Removes the files of an adapter that was uploaded here, once the name no longer stands for it: another
        instance has deleted or replaced it. Does nothing if the name still stands for it after a minute, because it was
        uploaded again. Its folder may be shared with that instance and have other files by now; an upload under way
        replaces them itself."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEARD_S):
                while self._stands_for(name, digest):
                    await self.catalog.manager.next_change()
        if self._stands_for(name, digest) or name in self._under_way or (name, digest) in self._discarding:
            return
        self._discarding.add((name, digest))
        try:
            await self._remove_files(name, digest)
        finally:
            self._discarding.remove((name, digest))

    def _stands_for(self, name: str, digest: str) -> bool:
        info = self.catalog.find_whole(name)
        return info is not None and info.digest == digest

    async def _remove_files(self, name: str, digest: str) -> None:
        folder = None if self._root is None else self._root / name
        if folder is None or not await self.on_thread(_has_upload, folder, digest, self.model):
            return
        manager = self.catalog.manager
        adapter = manager.find(digest)
        is_source = adapter is not None and adapter.source == folder
        try:
            hidden = await self.on_thread(_hide, folder)
        except OSError as error:
            log.warning("the files of adapter %s cannot be removed: %s", name, error.strerror)
            return
        self.remove_later(manager.moved(digest, hidden) if is_source else None, hidden)

    async def on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs a function on one of the threads, to its end."""
        return await to_its_end(asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments))

    def remove_later(self, old: Adapter | None, folder: Path) -> "asyncio.Task[None]":
        """Removes the files of an adapter that was replaced or deleted, when its last request has ended."""

        async def remove() -> None:
            if old is not None:
                await self.catalog.manager.forgotten(old)
            await self.on_thread(shutil.rmtree, folder, True)

        return self._removals.start(remove(), f"removal of {folder.name}")


class _Upload:
    """One upload, from its first byte to its name."""

    def __init__(self, uploads: AdapterUploads, name: str, folder: Path, claims: UploadClaims) -> None:
        """`folder`: the one that will have the adapter's files."""
        self._uploads, self._catalog = uploads, uploads.catalog
        self._name, self._folder, self._claims = name, folder, claims
        self._sha256 = hashlib.sha256()
        self._num_bytes = 0
        self._stream: UploadStream | None = None
        self._is_admitted = False  # whether requests may name it

    async def run(self, pieces: AsyncIterator[bytes]) -> UploadedAdapter:
        uploads, on_thread = self._uploads, self._uploads.on_thread
        try:
            hidden = await on_thread(_hidden_folder, self._folder.parent)
        except OSError as error:
            raise _not_written(error) from None
        body = UploadBody(hidden, uploads.most_bytes, self._claims.num_bytes, self._claims.config)
        failure = _broken(self._name, "it has ended early")
        try:
            async for piece in pieces:
                await on_thread(self._take, body, hidden, piece)
                self._admit()
            spec, image = await on_thread(self._checked, body, hidden)
            return await to_its_end(asyncio.ensure_future(self._store(spec, image, hidden)))
        except OSError as error:
            unwritten = _not_written(error)
            failure = _broken(self._name, unwritten.message)
            raise unwritten from None
        except CaraServeError as error:
            failure = _broken(self._name, error.message)
            raise
        finally:
            if self._stream is not None:
                self._stream.fail(failure)  # no effect on one that is stored
            self._catalog.end_upload(self._name)
            await on_thread(self._end, body, hidden)

    def _admit(self) -> None:
        """Lets requests name the adapter once its layout is known, and reports layers that have arrived."""
        if self._stream is not None and not self._is_admitted:
            self._catalog.refuse_too_large(self._stream.spec)
            self._is_admitted = self._catalog.begin_upload(self._name, self._stream, self._stream.spec)
        if self._stream is not None:
            self._stream.announce()

    def _take(self, body: UploadBody, hidden: Path, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._uploads.most_bytes + _MOST_OVERHEAD_BYTES:
            raise PayloadTooLarge(
                f"The body is larger than {human_bytes(self._uploads.most_bytes)}, which can be served here."
            )
        self._sha256.update(piece)
        body.write(piece)
        if self._stream is None and body.has_tensor_header():
            self._add_config(body, hidden)
            if body.has(CONFIG_NAME):
                self._stream = UploadStream(self._name, hidden, self._uploads.model, self._uploads.reader)
        if self._stream is not None:
            self._stream.advance(body.tensor_bytes)

    def _checked(self, body: UploadBody, hidden: Path) -> tuple[AdapterSpec, HostAdapter | None]:
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
                return image.spec, image
        spec = inspect_adapter(hidden, self._uploads.model)
        self._catalog.refuse_too_large(spec)
        return spec, None

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

    async def _store(self, spec: AdapterSpec, image: HostAdapter | None, hidden: Path) -> UploadedAdapter:
        """Lets the requests that wait for the image go on, then stores the adapter."""
        if self._is_admitted:
            self._catalog.identify_upload(self._name, spec.digest)
        if self._stream is not None:
            self._stream.complete(image)
        old = self._catalog.find_whole(self._name)
        if old is not None and old.digest == spec.digest and old.targets:
            return UploadedAdapter(old, is_new=False)
        replaced = await self._uploads.on_thread(_give_name, hidden, self._folder)
        adapter = None
        if old is not None and replaced is not None and Path(old.path) == self._folder:
            adapter = self._catalog.manager.moved(old.digest, replaced)
        try:
            info = await self._catalog.add_stored(self._name, spec, self._folder)
        except CaraServeError:
            await self._uploads.on_thread(_take_name, self._folder, replaced)
            if old is not None and adapter is not None:
                self._catalog.manager.moved(old.digest, self._folder)
            raise
        if self._stream is not None:
            self._stream.stored(self._folder)
        if replaced is not None:
            self._uploads.remove_later(adapter, replaced)
        if old is not None and old.digest != spec.digest:  # otherwise the name still stands for the files elsewhere
            self._uploads.removed(self._name, old.digest)
        return UploadedAdapter(info, is_new=old is None)

    def _end(self, body: UploadBody, hidden: Path) -> None:
        body.close()
        if self._stream is not None:
            self._stream.close()
        shutil.rmtree(hidden, ignore_errors=True)


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Awaits work that is not cancelled half way: a caller that is cancelled waits for it first."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():  # a thread may be writing to memory that is freed next
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise


def is_uploaded(folder: Path) -> bool:
    """Returns whether a folder in the root was made by an upload."""
    return not folder.is_symlink() and (folder / _MARK).is_file()


def _hidden_folder(root: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=root))
    (folder / _MARK).touch()
    return folder


def _give_name(hidden: Path, folder: Path) -> Path | None:
    """Gives a complete folder its name, once its files are on the disk. Returns where the folder is whose place it
    took."""
    hidden.chmod(0o755)  # it was made for its owner alone
    for path in (*hidden.iterdir(), hidden):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if not os.path.lexists(folder):
        os.rename(hidden, folder)
        return None
    replaced = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=folder.parent))  # first: a full disk has no room for it
    _exchange(hidden, folder)
    os.rename(hidden, replaced)
    return replaced


def _take_name(folder: Path, replaced: Path | None) -> None:
    """Undoes `_give_name`."""
    if replaced is not None:
        _exchange(replaced, folder)
    shutil.rmtree(replaced or folder, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Exchanges the names of two folders, in one step where the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number))
    between = one.with_name(f"{one.name}-")
    os.rename(other, between)
    os.rename(one, other)
    os.rename(between, one)


def _hide(folder: Path) -> Path:
    """Gives an adapter's folder a hidden name, and returns it."""
    hidden = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=folder.parent))
    os.rename(folder, hidden)
    os.utime(hidden)  # its requests may still read it when another server with this root removes what is abandoned
    return hidden


def _has_upload(folder: Path, digest: str, model: ModelSpec) -> bool:
    """Returns whether a folder has the files of an uploaded adapter with that digest."""
    try:
        return is_uploaded(folder) and inspect_adapter(folder, model).digest == digest
    except (CaraServeError, OSError):
        return False


def _remove_abandoned(root: Path) -> None:
    """Removes what uploads of an earlier run have left. Newer folders may be of another server with the same root."""
    for folder in root.glob(f"{_HIDDEN}*"):
        with suppress(FileNotFoundError):  # another server removes it at the same time
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                log.warning("removing %r, which an upload has left", str(folder))
                shutil.rmtree(folder, ignore_errors=True)


def _broken(name: str, why: str) -> Unreachable:
    """Returns the error of the requests for an adapter whose upload has failed."""
    return Unreachable(f"the upload of the adapter {name!r} has failed: {why}", retry_after_s=_RETRY_S)


def _not_written(error: OSError) -> CaraServeError:
    return CaraServeError(f"the adapter cannot be stored: {error.strerror}")
