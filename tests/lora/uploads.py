"""Bodies of uploads, and what receives them, over a backend that is never used."""

import asyncio
import errno
import io
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from caraserve.lora.adapter import Adapter
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.aliases import Aliases
from caraserve.lora.catalog import Catalog
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft import inspect_adapter
from caraserve.lora.registry import Registry
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.lora.served_base import ANY_BASE, ServedBase
from caraserve.lora.uploads import AdapterUploads, UploadClaims, UploadedAdapter
from tests.cluster.nodes import until
from tests.lora.folders import SPEC
from tests.lora.test_catalog import catalog

LIMIT = 1 << 20
END = bytes(1024)  # of a tar


def entry(name: str, data: bytes = b"", **changes: object) -> bytes:
    """Returns one member of a tar, with `changes` to its header."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in changes.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def tar_of(folder: Path, inside: str = "", form: int = tarfile.PAX_FORMAT) -> bytes:
    """Returns a tar of an adapter's folder, as Python's library writes it."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=form) as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, f"{inside}{path.name}")
    return target.getvalue()


@dataclass
class Receiver:
    """A catalog with uploads below `root`."""

    root: Path
    registry: Registry
    catalog: Catalog
    uploads: AdapterUploads

    async def put(
        self, name: str, body: bytes, claims: UploadClaims | None = None, step: int = 1000
    ) -> UploadedAdapter:
        return await self.uploads.put(name, in_pieces(body, step), claims or UploadClaims(len(body)))

    async def delete(self, name: str) -> None:
        """Deletes an adapter that has no aliases; returns when its last request has ended."""
        async with self.catalog.changing(name):
            unregistered = await self.uploads.unregister(name)
        await self.uploads.ended(unregistered)

    def left(self) -> list[str]:
        """Returns the names of everything in the root; see `left_in`."""
        return left_in(self.root)


class Elsewhere:
    """Other instances, which record the removals that are asked of them."""

    def __init__(self, keeps_files: bool = False) -> None:
        self._keeps_files = keeps_files
        self.removed: list[tuple[str, str]] = []

    def __call__(self, name: str, digest: str) -> asyncio.Task[bool]:
        self.removed.append((name, digest))
        return asyncio.create_task(self._answer())

    async def _answer(self) -> bool:
        return self._keeps_files


class Arriving:
    """An upload of `new` of which all but the last 4,000 bytes have been sent. `is_whole`: whether they come at all."""

    def __init__(self, receiver: Receiver, body: bytes, *, is_whole: bool = True) -> None:
        self._start, self._rest, self._go = body[:-4000], body[-4000:] if is_whole else b"", asyncio.Event()
        self.upload = asyncio.create_task(receiver.uploads.put("new", self._pieces(), UploadClaims(len(body))))

    async def _pieces(self) -> AsyncIterator[bytes]:
        yield self._start
        await self._go.wait()
        if self._rest:
            yield self._rest

    async def end(self) -> str:
        """Sends the rest. Returns the adapter's digest."""
        self._go.set()
        return (await self.upload).info.digest


async def arriving(receiver: Receiver, body: bytes, *, is_whole: bool = True) -> Arriving:
    """Returns an upload once requests may name its adapter."""
    slow = Arriving(receiver, body, is_whole=is_whole)
    await until(lambda: receiver.catalog.find("new") is not None)
    return slow


def read_digest(adapter: Adapter) -> str:
    """Returns the digest of the files from which an adapter is read."""
    assert isinstance(adapter.source, AdapterFolder)
    return inspect_adapter(adapter.source.path, SPEC).digest


def no_room(*arguments: object, **options: object) -> None:
    """Fails as a write to a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def left_in(root: Path) -> list[str]:
    """Returns the names of everything in a root; of the servers' own hidden folders what they contain, with a dot."""
    names = []
    for path in root.iterdir():
        is_servers = path.name.startswith(".caraserve-upload-") and not (path / TENSORS_NAME).exists()
        names += [f".{inside.name}" for inside in path.iterdir()] if is_servers else [path.name]
    return sorted(names)


def aliases_of(receiver: Receiver) -> Aliases:
    """Returns the aliases in the receiver's registry."""
    return Aliases(ReplicatedSettings(receiver.registry), lambda name: receiver.catalog.find(name) is not None)


async def in_pieces(body: bytes, step: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), step):
        yield body[start : start + step]


@asynccontextmanager
async def receiving(
    root: Path, registry: Registry | None = None, base: ServedBase = ANY_BASE
) -> AsyncIterator[Receiver]:
    os.makedirs(root, exist_ok=True)
    reader = AdapterReader(SPEC, lambda call: call())
    registry = registry or Registry(None)
    made = catalog(registry, reader, root, base=base)
    uploads = AdapterUploads(made, reader, root, LIMIT)
    try:
        yield Receiver(root, registry, made, uploads)
    finally:
        await uploads.close()
        reader.close()


def source_path(receiver: Receiver, name: str) -> Path:
    """Returns where the adapter of a name is read from."""
    source = receiver.catalog.pin(name).source
    assert isinstance(source, AdapterFolder)
    return source.path
