"""The adapters of this instance by name: what `/v1/models` lists, and loading and unloading at run time.

Joins the registry (the adapters of earlier runs), the reader of PEFT folders, and `AdapterManager` (where weights are).
"""

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from caraserve.core.adapter_facts import NO_FACTS, AdapterFacts
from caraserve.core.adapter_rules import DIGEST, check_adapter_name
from caraserve.core.combined_names import is_combined
from caraserve.core.lora_layout import MAX_RANK
from caraserve.errors import AdapterBusy, AdapterRejected, CaraServeError, ConfigError, Forbidden, NotFound
from caraserve.lora.adapter import Adapter, RemoteSource, UploadSource, too_large
from caraserve.lora.adapter_folder import AdapterFolder, AdapterFolders
from caraserve.lora.adapter_reader import AdapterReader, log_notes
from caraserve.lora.combinations import Combinations
from caraserve.lora.folder_contents import RefusedFolders, changed_s
from caraserve.lora.inspections import Inspection
from caraserve.lora.manager import AdapterManager
from caraserve.lora.peft import resolve_adapter_path
from caraserve.lora.registry import UNLOADED, UPLOADING, AdapterInfo, Registry
from caraserve.lora.served_base import ANY_BASE, ServedBase, facts_so_far
from caraserve.lora.turns import LONGEST_WAIT_S, Turns
from caraserve.model.plan import DecoderPlan
from caraserve.util.computed_ahead import computed_ahead

T = TypeVar("T")
AdapterObserver = Callable[[str, AdapterInfo | None], None]
AdapterPreparation = Callable[[str, AdapterFolder], Awaitable[None]]
"""Prepares what requests of an adapter need, before its name stands for it. Raises CaraServeError."""

_ANYWHERE = (Path("/"),)  # adapters given at the start may be in any folder
_RETRY_S = 1.0
_MOST_CHANGES = 256  # of one name that wait
_STAYS_UNLOADED = "it was unloaded or deleted over HTTP; change its files, or load it over HTTP, to serve it again"


@dataclass(frozen=True, slots=True)
class CatalogRules:
    """The limits of adapters that may be loaded, and whether they stay on the device."""

    base_name: str
    roots: tuple[Path, ...]  # adapters of earlier runs and run-time loads must be inside one of these
    device_bytes: int
    host_bytes: int
    keep_on_device: bool  # modes `cached` and `merged`: every adapter is loaded at once and stays
    max_rank: int | None = None  # adapters above it are refused
    watched: Path | None = None  # --adapters-dir
    base: ServedBase = ANY_BASE


def above_max_rank(rank: int, most: int | None) -> AdapterRejected | None:
    """Returns why an adapter of this rank is refused with --max-lora-rank `most`; None if it is not."""
    if most is None or rank <= most:
        return None
    return AdapterRejected(f"rank {rank} is above --max-lora-rank {most}", param="lora_path")


class Catalog:
    """Adapters by name. Runs on the event loop; disk work is done on the reader's threads."""

    def __init__(
        self,
        plan: DecoderPlan,
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
        self.folders, self.refused = AdapterFolders(), RefusedFolders(rules.roots)
        self._spec, self._registry = plan, registry
        self._reader, self._observers, self._upload_observers = reader, observers, upload_observers
        self.preparations: list[AdapterPreparation] = []  # before a name stands for an adapter loaded at run time
        self._infos: dict[str, AdapterInfo] = {}
        self._uploading: dict[str, AdapterInfo] = {}  # with a random digest; not in `_infos`
        self._combinations = Combinations(plan, manager, reader, self._infos.get, self.refuse_combination)
        self._changes = Turns(_change_refused, of_key=1, waiting=_MOST_CHANGES)  # of names
        self._unloaded: dict[str, str] = {}  # stamps of folders in --adapters-dir whose adapters were unloaded, by name

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
        """Returns the adapter or the combination of that name, or None. One that is being uploaded counts, if there is
        no other."""
        if is_combined(name):
            return self._combinations.find(name)
        return self._infos.get(name) or self._uploading.get(name)

    def find_whole(self, name: str) -> AdapterInfo | None:
        """Returns the adapter of that name, or None; one that is being uploaded does not count."""
        return self._infos.get(name)

    def pin(self, name: str) -> Adapter:
        """Returns the adapter that `name` points at now, pinned for a request. Raises NotFound."""
        self.get(name)
        return self.manager.pin(name)

    async def load(
        self, name: str, path: str, *, inplace: bool, was_served: bool = False, check: Callable[[], None] = lambda: None
    ) -> AdapterInfo:
        """Registers the adapter at `path`. Succeeds without effect if the name has the same contents already.
        `was_served`: it may be anywhere, as it was loaded before. `check`: called when it is the name's turn; may
        refuse. Raises AdapterRejected, AdapterBusy, Forbidden or NotFound."""
        self._refuse_if_all_stay()
        self._check_name(name)
        async with self.changing(name):
            check()
            roots = _ANYWHERE if was_served else self.rules.roots
            folder = self.folders.at(await self._on_thread(self._resolve, path, roots))
            info, notes = await self._on_thread(self._inspect, name, folder)
            log_notes(name, notes)
            old = self._infos.get(name)
            is_same = old is not None and old.digest == info.digest
            if old is not None and is_same and old.targets and old.facts == info.facts:
                return old
            if old is not None and not (inplace or is_same):  # an adapter of other instances gets a local folder now
                raise AdapterRejected(
                    f"The lora adapter {name!r} has already been loaded; set load_inplace to replace it",
                    param="lora_name",
                )
            await self._register(info, folder)
            return info

    def adopt(self, name: str, digest: str, rank: int, num_bytes: int, facts: AdapterFacts = NO_FACTS) -> None:
        """Points a name at an adapter that was registered on another instance, from where its bytes are downloaded when
        a request needs them. Raises AdapterRejected or Forbidden for an adapter that this instance cannot serve; the
        name is then unregistered here, because its former adapter is out of date."""
        try:
            self._refuse_unservable(name, digest, rank, num_bytes, facts)
        except CaraServeError:
            if self._infos.pop(name, None) is not None:
                self.manager.unregister(name)
                self._combinations.member_changed(name)
            raise
        created_s = time.time()
        self._infos[name] = AdapterInfo(name, digest, digest, rank, (), num_bytes, created_s, facts=facts)
        self.rules.base.report(name, facts)
        self.manager.register(name, digest, RemoteSource(digest), num_bytes)
        self._combinations.member_changed(name)
        self._replace_upload(name)

    def _refuse_unservable(self, name: str, digest: str, rank: int, num_bytes: int, facts: AdapterFacts) -> None:
        self._refuse_if_all_stay()
        self._check_name(name)
        if not (DIGEST.fullmatch(digest) and 0 < rank <= MAX_RANK and num_bytes > 0):
            raise AdapterRejected(f"the adapter {name!r} was registered by another version of this program")
        if (refusal := self._refusal(rank, num_bytes, facts.trained_on)) is not None:
            raise refusal

    async def unload(self, name: str, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Unregisters the name, and returns when the last request of its adapter has ended. `is_wanted`: called when it
        is the name's turn; False: nothing is done. Raises NotFound or AdapterBusy."""
        async with self.changing(name):
            if not is_wanted():
                return
            adapter = await self.unregister(name)
        if adapter is not None:
            await self.manager.forgotten(adapter)

    async def unregister(self, name: str) -> Adapter | None:
        """Unregisters a name at once, for a caller that is `changing` it. Returns its adapter, which may have requests;
        None if the cluster has unregistered the name meanwhile. Raises NotFound or AdapterBusy."""
        if (info := self._infos.get(name)) is None:
            if name in self._uploading:
                raise AdapterBusy(f"the adapter {name!r} is being uploaded; try again", retry_after_s=_RETRY_S)
            raise NotFound(f"The lora adapter {name!r} cannot be found.", param="lora_name")
        self._refuse_if_all_stay()
        kept = await self._on_thread(self._remember_unload, info)
        if kept:
            self._unloaded[name] = kept
            self.refused.note(name, _STAYS_UNLOADED)
        if self._infos.pop(name, None) is None:
            return None
        self._combinations.member_changed(name)
        self._notify(self._observers, name, None)
        return self.manager.unregister(name)

    def _remember_unload(self, info: AdapterInfo) -> str:
        """Removes an adapter from the registry or, if --adapters-dir has a folder of its name, records that the folder
        stays unloaded as it is. Returns the stamp of such a folder, else an empty text."""
        watched = self.rules.watched
        kept = "" if watched is None else self._reader.stamp(watched / info.name)
        if watched is not None and kept and info.targets:
            self._registry.put(replace(info, path=str(watched / info.name), stamp=kept, state=UNLOADED))
        else:
            self._registry.remove(info.name)
        return kept

    def forget_folder(self, name: str) -> None:
        """Forgets what is known of a folder in --adapters-dir that is gone."""
        self._unloaded.pop(name, None)
        self.refused.forget(name)

    def stamp(self, folder: Path) -> str:
        """Returns the stamp of an adapter's files, as in the registry's entries."""
        return self._reader.stamp(folder)

    def stays_unloaded(self, name: str, now: str) -> bool:
        """Whether the folder of a name in --adapters-dir, with the stamp `now`, was unloaded as it is."""
        return self._unloaded.get(name) == now

    # --- uploads ---

    def refuse_unchangeable(self, name: str) -> None:
        """Raises Forbidden or AdapterRejected if no adapter of that name can be loaded at run time."""
        self._refuse_if_all_stay()
        self._check_name(name, "name")

    def refuse_unservable(self, found: Inspection) -> None:
        """Raises AdapterRejected for an adapter that can never be served."""
        if (refusal := self._refusal(found.rank, found.num_bytes, found.trained_on)) is not None:
            raise refusal

    def begin_upload(self, name: str, source: UploadSource, found: Inspection) -> AdapterInfo | None:
        """Lets requests name an adapter that is being uploaded, and returns it with a random digest. Returns None if
        the name stands for an adapter: that one serves until the new one is complete."""
        if name in self._infos or name in self._uploading:
            return None
        digest = secrets.token_hex(32)
        info = self._uploading[name] = AdapterInfo(
            *(name, digest, str(self.rules.roots[0] / name), found.rank, (), found.num_bytes, time.time()),
            state=UPLOADING,
            facts=facts_so_far(found),
        )
        self.manager.register(name, digest, source, found.num_bytes)
        self._notify(self._upload_observers, name, info)
        return info

    def identify_upload(self, info: AdapterInfo, digest: str) -> AdapterInfo:
        """Gives an upload that is complete its digest, and returns it."""
        self.manager.identify(info.digest, digest)
        known = replace(info, digest=digest)
        if self._uploading.get(info.name) is info:
            self._uploading[info.name] = known
        return known

    def end_upload(self, info: AdapterInfo) -> None:
        """Ends what `begin_upload` began, if the upload has failed."""
        if self._uploading.get(info.name) is info:
            self.manager.unregister(info.name)
            self._replace_upload(info.name)

    def _replace_upload(self, name: str) -> None:
        """Ends the upload that requests for a name have waited for: it stands for an adapter now, or for none."""
        if self._uploading.pop(name, None) is not None:
            self._notify(self._upload_observers, name, None)

    async def add_stored(self, name: str, found: Inspection, facts: AdapterFacts, folder: AdapterFolder) -> AdapterInfo:
        """Points a name at an adapter whose folder has just been stored and checked, for a caller that is `changing`
        the name. Raises CaraServeError if the registry cannot be written."""
        info = _info_of(name, found, facts, folder.path, await self._on_thread(self._reader.stamp, folder.path))
        await self._register(info, folder)
        return info

    async def _register(self, info: AdapterInfo, folder: AdapterFolder) -> None:
        for prepare in self.preparations:
            await prepare(info.name, folder)
        await self._on_thread(self._registry.put, info)
        self._add(info, folder)
        self._notify(self._observers, info.name, info)
        self._replace_upload(info.name)

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
        given, fresh, complaints = dict(modules), list[AdapterInfo](), list(self._registry.complaints)
        with computed_ahead(lambda name: self._look_at(name, given[name], name in found), given) as looks:
            for (name, path), look in zip(given.items(), looks, strict=True):
                try:
                    info, notes = look()
                    if notes is not None:
                        log_notes(name, notes)
                        now_s = time.time()
                        info = replace(info, created_s=min(now_s, changed_s(path)) if name in found else now_s)
                except (CaraServeError, OSError) as error:
                    why = f"it cannot be read: {error.strerror}" if isinstance(error, OSError) else error.message
                    if name not in found:
                        raise ConfigError(f"adapter {name!r} at {path}: {why}") from error
                    self.refused.note(name, why)
                    complaints.append(f"{str(path)!r} in --adapters-dir is left out: {why}")
                else:
                    if info is not self._registry.get(name):
                        fresh.append(info)
                    self._add(info)
                progress()
        remembered = [info for info in self._registry.all() if not self._is_unloaded(info, given)]
        lost = {info: complaint for info in remembered if (complaint := self._recall(info, given)) is not None}
        self._registry.put_many([*fresh, *(replace(info, state="missing") for info in lost)])
        return [*complaints, *lost.values()]

    def _look_at(self, name: str, path: Path, was_found: bool) -> tuple[AdapterInfo, Sequence[str] | None]:
        """Returns the registry's entry of an adapter given at the start, or what an inspection finds, and the notes on
        what is left out."""
        if (known := self._known(name, path, was_found=was_found)) is not None:
            return known, None
        return self._inspect(name, AdapterFolder(self._resolve(os.path.abspath(path), _ANYWHERE)))

    def _known(self, name: str, path: Path, *, was_found: bool) -> AdapterInfo | None:
        """Returns the registry's entry of an adapter given at the start, or None if there is none or its files have
        changed. Raises CaraServeError for an adapter that cannot be served, or that was unloaded and then found."""
        check_adapter_name(name, self.rules.base_name)
        known = self._registry.get(name)
        if known is None or (known.path, known.stamp) != (os.path.realpath(path), self._reader.stamp(path)):
            return None
        if known.state == UNLOADED and was_found:  # also if it has to be inspected again
            self._unloaded[name] = known.stamp
            raise AdapterRejected(_STAYS_UNLOADED)
        if not self._registry.knows_facts(name):
            return None
        if (refusal := self._refusal(known.rank, known.num_bytes, known.facts.trained_on)) is not None:
            raise refusal
        return known if known.state != UNLOADED else replace(known, state="active")

    def _is_unloaded(self, info: AdapterInfo, given: Collection[str]) -> bool:
        """Whether a row of the registry says only that a folder stays unloaded; removes it if the folder has gone or
        changed."""
        if info.state != UNLOADED:
            return False
        if info.name not in given and self._reader.stamp(Path(info.path)) != info.stamp:
            self._registry.remove(info.name)
        return True

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
        if folder is None or self._reader.stamp(folder) != info.stamp:
            self.refused.note(info.name, "its files are gone or have changed; load it again to use it")
            return f"adapter {info.name!r}: {info.path} is gone or has changed; load it again to use it"
        try:
            if not self._registry.knows_facts(info.name):
                inspected, notes = self._inspect(info.name, AdapterFolder(folder))
                log_notes(info.name, notes)
                info = replace(inspected, created_s=info.created_s)
                self._registry.put(info)
            if (refusal := self._refusal(info.rank, info.num_bytes, info.facts.trained_on)) is not None:
                raise refusal
        except CaraServeError as error:
            return f"adapter {info.name!r}: {error.message}"
        self._add(info)
        return None

    def _add(self, info: AdapterInfo, folder: AdapterFolder | None = None) -> None:
        self._infos[info.name] = info
        self._unloaded.pop(info.name, None)
        self.refused.forget(info.name)
        self.rules.base.report(info.name, info.facts)
        folder = folder or self.folders.at(Path(info.path))
        self.manager.register(info.name, info.digest, folder, info.num_bytes)
        self._combinations.member_changed(info.name)
        if self.rules.keep_on_device:
            self.manager.acquire(self.manager.pin(info.name))

    def _resolve(self, path: str, roots: Sequence[Path]) -> Path:
        return resolve_adapter_path(path, roots)

    def _inspect(self, name: str, folder: AdapterFolder) -> tuple[AdapterInfo, Sequence[str]]:
        """Reads and checks an adapter, and computes its digest. Returns also what is left out of it. Raises
        CaraServeError."""
        try:
            with folder.opened() as path:
                before = self._reader.stamp(path)
                inspection = self._reader.inspect(path)
                facts = self.rules.base.facts_of(path, inspection)
        except OSError as error:
            raise AdapterRejected(f"the adapter's folder cannot be read: {error.strerror}") from None
        self.refuse_unservable(inspection)
        return _info_of(name, inspection, facts, folder.path, before), inspection.notes

    def _refusal(self, rank: int, num_bytes: int, trained_on: str) -> AdapterRejected | None:
        """Returns why an adapter of this rank, size and base model can never be served, or None if it can."""
        if (refusal := self.rules.base.refusal(trained_on)) is not None:
            return refusal
        if (refusal := above_max_rank(rank, self.rules.max_rank)) is not None:
            return refusal
        if num_bytes > self.rules.device_bytes:
            return too_large(num_bytes, self.rules.device_bytes, "--lora-pool-bytes")
        if num_bytes > self.rules.host_bytes:
            return too_large(num_bytes, self.rules.host_bytes, "--max-host-adapters-bytes")
        return None

    def refuse_combination(self, info: AdapterInfo) -> None:
        """Raises CaraServeError for a combination of adapters that can never be served here."""
        self._refuse_if_all_stay()
        if (refusal := self._refusal(info.rank, info.num_bytes, info.facts.trained_on)) is not None:
            raise refusal

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
        """Whether the name's adapter is being loaded, stored or unloaded, or is being uploaded."""
        return self._changes.is_taken(name) or name in self._uploading

    def changing(self, name: str) -> AbstractAsyncContextManager[None]:
        """Returns the context of one change of what a name stands for; it waits for its turn. Raises AdapterBusy."""
        return self._changes.taken(name)

    def _notify(self, observers: Sequence[AdapterObserver], name: str, info: AdapterInfo | None) -> None:
        for observe in observers:
            observe(name, info)

    async def _on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        call = functools.partial(function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._reader.executor, call)


def _change_refused(name: str, has_many: bool) -> AdapterBusy:
    reason = f"{_MOST_CHANGES} changes of {name!r} are waiting"
    if not has_many:
        reason = f"{name!r} is being changed, for more than {LONGEST_WAIT_S:g} s"
    return AdapterBusy(f"{reason}; try again", retry_after_s=_RETRY_S)


def _info_of(name: str, found: Inspection, facts: AdapterFacts, folder: Path, stamped: str) -> AdapterInfo:
    sizes = found.rank, found.targets, found.num_bytes
    return AdapterInfo(name, found.digest, str(folder), *sizes, created_s=time.time(), stamp=stamped, facts=facts)
