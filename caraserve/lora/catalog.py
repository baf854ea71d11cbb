"""The adapters of this instance by name: what `/v1/models` lists, and loading and unloading at run time.

Joins the registry (the adapters of earlier runs), the reader of PEFT folders, and `AdapterManager` (where weights are).
"""

import asyncio
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from caraserve.config import DIGEST, check_adapter_name
from caraserve.core.lora_layout import MAX_RANK, AdapterSpec, HostAdapter
from caraserve.errors import AdapterRejected, CaraServeError, ConfigError, Forbidden, NotFound
from caraserve.lora.adapter import Adapter, RemoteSource, Source, UploadSource, too_large
from caraserve.lora.host_loader import Came, Done
from caraserve.lora.manager import AdapterManager
from caraserve.lora.peft import inspect_adapter, read_adapter, resolve_adapter_path
from caraserve.lora.registry import UPLOADING, AdapterInfo, Registry
from caraserve.model.spec import ModelSpec

T = TypeVar("T")
AdapterObserver = Callable[[str, AdapterInfo | None], None]

log = logging.getLogger(__name__)

_FILES = ("adapter_config.json", "adapter_model.safetensors")
_ANYWHERE = (Path("/"),)  # adapters given at the start may be in any folder
_READERS = 2  # threads that read and check adapters: two keep a disk busy, and leave the compute threads alone


@dataclass(frozen=True, slots=True)
class CatalogRules:
    """The limits of adapters that may be loaded, and whether they stay on the device."""

    base_name: str
    roots: tuple[Path, ...]  # adapters of earlier runs and run-time loads must be inside one of these
    device_bytes: int
    host_bytes: int
    keep_on_device: bool  # modes `cached` and `merged`: every adapter is loaded at once and stays
    max_rank: int | None = None  # adapters above it are refused


class AdapterReader:
    """Reads adapter folders on threads of its own, and calls back on the event loop."""

    def __init__(self, spec: ModelSpec, on_loop: Callable[[Callable[[], None]], None]) -> None:
        self._download: Callable[[str, NDArray[np.uint8], Done, Came], None] | None = None
        self._on_read: Callable[[str, Path, str], None] = lambda digest, folder, stamp: None
        self._spec, self._on_loop = spec, on_loop
        self.executor = ThreadPoolExecutor(_READERS, "caraserve-read")
        self._refusals: dict[Path, str] = {}  # last error of each unusable folder: each is logged once

    def connect(
        self,
        download: Callable[[str, NDArray[np.uint8], Done, Came], None],
        on_read: Callable[[str, Path, str], None],
    ) -> None:
        """Connects the reader to a cluster. `download` downloads the adapter of a digest that no local folder has.
        `on_read` is called for each folder read, with its digest, the folder, and the folder's stamp before the
        read."""
        self._download, self._on_read = download, on_read

    def read(
        self, source: Source, into: NDArray[np.uint8], done: Done, came: Came = lambda image, layers: None
    ) -> None:
        """Reads and checks a whole adapter into `into`. Calls `done` on the event loop with the image or the error and,
        during a download, `came` with the layers that have arrived so far."""
        if isinstance(source, UploadSource):
            source.read(into, done, came)
            return
        if isinstance(source, RemoteSource):
            assert self._download is not None, "only a cluster has adapters without a folder"
            self._download(source.digest, into, done, came)
            return
        folder = source

        def work() -> None:
            result: HostAdapter | CaraServeError
            before = stamp(folder)
            try:
                result = read_adapter(folder, self._spec, into)
            except CaraServeError as error:
                result = error
            except OSError as error:
                result = AdapterRejected(f"{folder.name}: the adapter cannot be read: {error.strerror}")
            self._on_loop(lambda: deliver(result, before))

        def deliver(result: HostAdapter | CaraServeError, before: str) -> None:
            if isinstance(result, CaraServeError) and self._refusals.get(folder) != result.message:
                self._refusals[folder] = result.message
                log.warning("adapter folder %r cannot be used: %s", str(folder), result.message)
            done(result)
            if isinstance(result, HostAdapter):
                self._refusals.pop(folder, None)
                self._on_read(result.spec.digest, folder, before)

        self.executor.submit(work)

    def refuse(self, error: CaraServeError, done: Done) -> None:
        """Calls `done` with an error, as `read` does: not before it has returned."""
        self._on_loop(lambda: done(error))

    def close(self) -> None:
        """Ends the threads."""
        self.executor.shutdown(wait=True, cancel_futures=True)


class Catalog:
    """Adapters by name. Runs on the event loop; disk work is done on the reader's threads."""

    def __init__(
        self,
        spec: ModelSpec,
        registry: Registry,
        manager: AdapterManager,
        reader: AdapterReader,
        rules: CatalogRules,
        observers: Sequence[AdapterObserver] = (),
        upload_observers: Sequence[AdapterObserver] = (),
    ) -> None:
        """`observers`: called with the name of each adapter that is loaded or unloaded (None) at run time.
        `upload_observers`: with that of each that takes requests while it is uploaded, and when that ends (None)."""
        self.manager, self.rules = manager, rules
        self._spec, self._registry = spec, registry
        self._reader, self._observers, self._upload_observers = reader, observers, upload_observers
        self._infos: dict[str, AdapterInfo] = {}
        self._uploading: dict[str, AdapterInfo] = {}  # with a random digest; not in `_infos`
        self._changing: set[str] = set()  # names being loaded or unloaded

    def all(self) -> list[AdapterInfo]:
        """Returns all adapters, in the order of registration."""
        return list(self._infos.values())

    def get(self, name: str) -> AdapterInfo:
        """Returns the adapter of that name. Raises NotFound."""
        info = self.find(name)
        if info is None:
            raise NotFound(f"the model {name!r} does not exist", param="model")
        return info

    def find(self, name: str) -> AdapterInfo | None:
        """Returns the adapter of that name, or None. One that is being uploaded counts, if there is no other."""
        return self._infos.get(name) or self._uploading.get(name)

    def find_whole(self, name: str) -> AdapterInfo | None:
        """Returns the adapter of that name, or None; one that is being uploaded does not count."""
        return self._infos.get(name)

    def pin(self, name: str) -> Adapter:
        """Returns the adapter that `name` points at now, pinned for a request. Raises NotFound."""
        self.get(name)
        return self.manager.pin(name)

    async def load(self, name: str, path: str, *, inplace: bool, was_served: bool = False) -> AdapterInfo:
        """Registers the adapter at `path`. Succeeds without effect if the name has the same contents already.
        `was_served`: it may be anywhere, as it was loaded before. Raises AdapterRejected, Forbidden or NotFound."""
        self._refuse_if_all_stay()
        self._check_name(name)
        with self.changing(name):
            info = await self._on_thread(self._inspect, name, path, _ANYWHERE if was_served else self.rules.roots)
            old = self._infos.get(name)
            is_same = old is not None and old.digest == info.digest
            if old is not None and is_same and old.targets:
                return old
            if old is not None and not (inplace or is_same):  # an adapter of other instances gets a local folder now
                raise AdapterRejected(
                    f"The lora adapter {name!r} has already been loaded; set load_inplace to replace it",
                    param="lora_name",
                )
            await self._on_thread(self._registry.put, info)
            self._add(info)
            self._notify(self._observers, name, info)
            return info

    def adopt(self, name: str, digest: str, rank: int, num_bytes: int) -> None:
        """Points a name at an adapter that was registered on another instance, from where its bytes are downloaded when
        a request needs them. Raises AdapterRejected or Forbidden for an adapter that this instance cannot serve; the
        name is then unregistered here, because its former adapter is out of date."""
        try:
            self._refuse_unservable(name, digest, rank, num_bytes)
        except CaraServeError:
            if (old := self._infos.pop(name, None)) is not None:
                self.manager.unregister(name)
                self._leave_folder(old.digest)
            raise
        old = self._infos.get(name)
        self._infos[name] = AdapterInfo(name, digest, digest, rank, (), num_bytes, created_s=time.time())
        self.manager.register(name, digest, RemoteSource(digest), num_bytes)
        if old is not None:
            self._leave_folder(old.digest)

    def _refuse_unservable(self, name: str, digest: str, rank: int, num_bytes: int) -> None:
        self._refuse_if_all_stay()
        self._check_name(name)
        if not (DIGEST.fullmatch(digest) and 0 < rank <= MAX_RANK and num_bytes > 0):
            raise AdapterRejected(f"the adapter {name!r} was registered by another version of this program")
        if (refusal := self._refusal(rank, num_bytes)) is not None:
            raise refusal

    async def unload(self, name: str) -> None:
        """Unregisters the name at once, and returns when the last request of its adapter has ended. Raises NotFound."""
        with self.changing(name):
            adapter = await self.unregister(name)
            if adapter is not None:
                await self.manager.forgotten(adapter)

    async def unregister(self, name: str) -> Adapter | None:
        """Unregisters a name at once, for a caller that is `changing` it. Returns its adapter, which may have requests;
        None if the cluster has unregistered the name meanwhile. Raises NotFound."""
        if name not in self._infos:
            raise NotFound(f"The lora adapter {name!r} cannot be found.", param="lora_name")
        self._refuse_if_all_stay()
        await self._on_thread(self._registry.remove, name)
        if self._infos.pop(name, None) is None:
            return None
        self._notify(self._observers, name, None)
        adapter = self.manager.unregister(name)
        self._leave_folder(adapter.digest)
        return adapter

    # --- uploads ---

    def refuse_unchangeable(self, name: str) -> None:
        """Raises Forbidden or AdapterRejected if no adapter of that name can be loaded at run time."""
        self._refuse_if_all_stay()
        self._check_name(name, "name")

    def refuse_too_large(self, spec: AdapterSpec) -> None:
        """Raises AdapterRejected for an adapter that can never be served."""
        if (refusal := self._refusal(spec.rank, spec.num_bytes)) is not None:
            raise refusal

    def begin_upload(self, name: str, source: UploadSource, spec: AdapterSpec) -> bool:
        """Lets requests name an adapter that is being uploaded, for a caller that is `changing` the name. Returns False
        if the name stands for an adapter: that one serves until the new one is complete."""
        if name in self._infos:
            return False
        digest = secrets.token_hex(32)
        info = self._uploading[name] = AdapterInfo(
            name,
            digest,
            str(self.rules.roots[0] / name),
            spec.rank,
            (),
            spec.num_bytes,
            time.time(),
            state=UPLOADING,
        )
        self.manager.register(name, digest, source, spec.num_bytes)
        self._notify(self._upload_observers, name, info)
        return True

    def identify_upload(self, name: str, digest: str) -> None:
        """Gives an upload that is complete its digest."""
        info = self._uploading[name]
        self.manager.identify(info.digest, digest)
        self._uploading[name] = replace(info, digest=digest)

    def end_upload(self, name: str) -> None:
        """Ends what `begin_upload` began, when the adapter has been added or its upload has failed."""
        if self._uploading.pop(name, None) is None:
            return
        if name not in self._infos:
            self.manager.unregister(name)
        self._notify(self._upload_observers, name, None)

    async def add_stored(self, name: str, spec: AdapterSpec, folder: Path) -> AdapterInfo:
        """Points a name at an adapter whose folder has just been stored and checked, for a caller that is `changing`
        the name. Raises CaraServeError if the registry cannot be written."""
        info = _info_of(name, spec, folder)
        await self._on_thread(self._registry.put, info)
        self._add(info)
        self._notify(self._observers, name, info)
        return info

    def add_at_start(
        self, modules: Iterable[tuple[str, Path]], progress: Callable[[], None], *, found: Collection[str] = ()
    ) -> list[str]:
        """Registers adapters before the server is up: `modules`, and those that the registry has from earlier runs.
        Files that have not changed since the last run are not read again. Returns complaints about adapters that are
        left out.

        `found`: names that were not given by the user but found in --adapters-dir. Such an adapter gets its files' time
        as the time of its creation, so an unload in the cluster after that time still holds. It is left out with a
        complaint if it cannot be served.

        Raises ConfigError if an adapter that the user named cannot be served.
        """
        given, fresh, complaints = dict(modules), [], list(self._registry.complaints)
        for name, path in given.items():
            try:
                info = self._known(name, path) or self._inspect_at_start(name, path, was_found=name in found)
            except CaraServeError as error:
                if name not in found:
                    raise ConfigError(f"adapter {name!r} at {path}: {error.message}") from error
                complaints.append(f"{str(path)!r} in --adapters-dir is left out: {error.message}")
            else:
                if info is not self._registry.get(name):
                    fresh.append(info)
                self._add(info)
            progress()
        remembered = self._registry.all()
        lost = {info: complaint for info in remembered if (complaint := self._recall(info, given)) is not None}
        self._registry.put_many([*fresh, *(replace(info, state="missing") for info in lost)])
        return [*complaints, *lost.values()]

    def _known(self, name: str, path: Path) -> AdapterInfo | None:
        """Returns the registry's entry of an adapter given at the start, or None if there is none or its files have
        changed. Raises CaraServeError for an adapter that cannot be served."""
        check_adapter_name(name, self.rules.base_name)
        known = self._registry.get(name)
        if known is None or (known.path, known.stamp) != (os.path.realpath(path), stamp(path)):
            return None
        if (refusal := self._refusal(known.rank, known.num_bytes)) is not None:
            raise refusal
        return known

    def _inspect_at_start(self, name: str, path: Path, *, was_found: bool) -> AdapterInfo:
        """Reads an adapter that the registry does not have. Raises CaraServeError if it cannot be served."""
        try:
            info = self._inspect(name, os.path.abspath(path), roots=_ANYWHERE)
            return replace(info, created_s=min(info.created_s, _changed_s(path))) if was_found else info
        except OSError as error:
            raise AdapterRejected(f"it cannot be read: {error.strerror}") from None

    async def preloaded(self) -> None:
        """Returns when every adapter is on the device, for modes `cached` and `merged`. Raises ConfigError if one
        cannot be loaded, or if they do not all fit."""
        self._refuse_if_not_all_fit()
        have_all_come = await self.manager.settled()
        for info in self._infos.values():
            if (error := self.manager.error_of(info.name)) is not None:
                raise ConfigError(f"adapter {info.name!r}: {error.message}")
        if not have_all_come:
            self._refuse_if_not_all_fit()
            raise AssertionError("adapters that fit have not come to the device")

    def _refuse_if_not_all_fit(self) -> None:
        """Raises ConfigError if the adapters do not all fit on the device. Those not read yet count with the bytes of
        their image; padding for kernels may add to that."""
        stay = "--loading-mode cached and merged keep all adapters on the device"
        room, most = self.manager.memory, self.rules.device_bytes
        adapters = {info.digest: self.manager.find(info.digest) for info in self._infos.values()}.values()
        if len(adapters) > (places := self.manager.device_cache.places):
            raise ConfigError(f"{stay}, which has places for {places}: {len(adapters)} were given")
        total = sum(room.takes(adapter.device_bytes or adapter.num_bytes) for adapter in adapters if adapter)
        if total > most:
            raise ConfigError(f"{stay}: they take at least {total} bytes there, more than --lora-pool-bytes {most}")

    def _recall(self, info: AdapterInfo, given: dict[str, Path]) -> str | None:
        """Registers an adapter of an earlier run. Returns a complaint if that is not possible."""
        if info.name in given:
            return None
        if info.name == self.rules.base_name:
            return f"adapter {info.name!r} has the base model's name now and is left out"
        try:
            folder = resolve_adapter_path(info.path, self.rules.roots)
        except NotFound:
            folder = None
        except CaraServeError:
            return (
                f"adapter {info.name!r} at {info.path!r} is left out: it is not in a folder that --adapters-dir or "
                "--allow-adapter-path names; name it in --lora-modules, or allow its folder"
            )
        if folder is None or stamp(folder) != info.stamp:
            return f"adapter {info.name!r}: {info.path} is gone or has changed; load it again to use it"
        if (refusal := self._refusal(info.rank, info.num_bytes)) is not None:
            return f"adapter {info.name!r}: {refusal.message}"
        self._add(info)
        return None

    def _add(self, info: AdapterInfo) -> None:
        old, self._infos[info.name] = self._infos.get(info.name), info
        self.manager.register(info.name, info.digest, Path(info.path), info.num_bytes)
        if old is not None:
            self._leave_folder(old.digest)
        if self.rules.keep_on_device:
            self.manager.preload(info.name)

    def _leave_folder(self, digest: str) -> None:
        """Has an adapter that a name stood for read from the folder of another name that stands for it, if there is
        one: the folder of the first may be removed next, or has other files already."""
        adapter = self.manager.find(digest)
        names = () if adapter is None else adapter.names
        folders = [info.path for name in names if (info := self._infos.get(name)) is not None and info.targets]
        if adapter is not None and folders and str(adapter.source) not in folders:
            self.manager.moved(digest, Path(min(folders)))

    def _inspect(self, name: str, path: str, roots: Sequence[Path]) -> AdapterInfo:
        """Reads and checks an adapter, and computes its digest. Raises CaraServeError."""
        folder = resolve_adapter_path(path, roots)
        spec = inspect_adapter(folder, self._spec)
        self.refuse_too_large(spec)
        return _info_of(name, spec, folder)

    def _refusal(self, rank: int, num_bytes: int) -> AdapterRejected | None:
        """Returns why an adapter of this rank and size can never be served, or None if it can."""
        if self.rules.max_rank is not None and rank > self.rules.max_rank:
            return AdapterRejected(f"rank {rank} is above --max-lora-rank {self.rules.max_rank}", param="lora_path")
        if num_bytes > self.rules.device_bytes:
            return too_large(num_bytes, self.rules.device_bytes, "--lora-pool-bytes")
        if num_bytes > self.rules.host_bytes:
            return too_large(num_bytes, self.rules.host_bytes, "--max-host-adapters-bytes")
        return None

    def _refuse_if_all_stay(self) -> None:
        if self.rules.keep_on_device:
            raise Forbidden(
                "--loading-mode cached and merged keep the adapters of the start; nothing is loaded or unloaded later"
            )

    def _check_name(self, name: str, param: str = "lora_name") -> None:
        try:
            check_adapter_name(name, self.rules.base_name)
        except ConfigError as error:
            raise AdapterRejected(error.message, param=param) from None

    def is_changing(self, name: str) -> bool:
        """Whether the name's adapter is being loaded, uploaded or unloaded."""
        return name in self._changing

    def _notify(self, observers: Sequence[AdapterObserver], name: str, info: AdapterInfo | None) -> None:
        for observe in observers:
            observe(name, info)

    def changing(self, name: str) -> "_Exclusive":
        """Returns the context of one change of a name's adapter; raises AdapterRejected if another is under way."""
        return _Exclusive(self._changing, name)

    async def _on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        call = functools.partial(function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._reader.executor, call)


class _Exclusive:
    """Context of one load or unload of a name; a second one at the same time is refused, not queued."""

    def __init__(self, names: set[str], name: str) -> None:
        self._names, self._name = names, name

    def __enter__(self) -> None:
        if self._name in self._names:
            raise AdapterRejected(
                f"the adapter {self._name!r} is being loaded or unloaded; try again", param="lora_name"
            )
        self._names.add(self._name)

    def __exit__(self, *_: object) -> None:
        self._names.discard(self._name)


def _info_of(name: str, spec: AdapterSpec, folder: Path) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        digest=spec.digest,
        path=str(folder),
        rank=spec.rank,
        targets=spec.targets,
        num_bytes=spec.num_bytes,
        created_s=time.time(),
        stamp=stamp(folder),
    )


def _changed_s(folder: Path) -> float:
    """Returns when an adapter's files were last written, in unix time."""
    return max((folder / name).stat().st_mtime for name in _FILES)


def stamp(folder: Path) -> str:
    """Returns the sizes and times of an adapter's files, which change with the files; empty if one is missing."""
    try:
        stats = [(folder / name).stat() for name in _FILES]
    except OSError:
        return ""
    return ",".join(f"{stat.st_size}:{stat.st_mtime_ns}" for stat in stats)
