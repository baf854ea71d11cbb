"""Reads adapters from where they are: a folder, an upload under way, other instances."""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import HostAdapter
from caraserve.core.matrix_copy import CopyMatrices
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.adapter import CombinedSource, Done, LayersArrived, RemoteSource, Source, UploadSource
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.base_copies import check_copies
from caraserve.lora.folder_contents import stamp
from caraserve.lora.image_filler import ImageFiller
from caraserve.lora.image_writer import TensorLayout
from caraserve.lora.inspections import Inspection, Inspections, full_stamp
from caraserve.lora.manifest import chunk_ends, identified
from caraserve.lora.peft import inspect_adapter, read_adapter, specify, with_digest
from caraserve.lora.writers import peft_adapter
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.dtype import Dtype
from caraserve.model.opened_file import TensorFileError
from caraserve.model.plan import DecoderPlan
from caraserve.model.safetensors_reader import TensorFile
from caraserve.util.thread_priority import yield_to_event_loop

log = logging.getLogger(__name__)

# Threads that read and check adapters: two keep a disk busy, and leave the compute threads alone. Others help them, as
# far as that makes it faster: eight read at the speed of the memory.
_LEAST_READERS, _CORES_OF_READER = 2, 4
_MOST_HELPERS, _CORES_OF_HELPER = 8, 2


class AdapterReader:
    """Reads adapter folders on threads of its own, and calls back on the event loop."""

    def __init__(
        self,
        plan: DecoderPlan,
        on_loop: Callable[[Callable[[], None]], None],
        base: BaseTensors | None = None,
        dtype: Dtype | None = None,
        copy: CopyMatrices | None = None,
        inspections: Inspections | None = None,
    ) -> None:
        """`base`: the tensors of the base model, with which those in adapters' files are compared. `dtype`: of images;
        None: of each adapter's own file. `copy`: compiled code that reads files; None: there is none. `inspections`: of
        earlier runs, which the reader closes; None: there are none."""
        self._download: Callable[[str, NDArray[np.uint8], Done, LayersArrived], None] | None = None
        self._on_read: Callable[[str, AdapterFolder, str], None] = lambda digest, folder, stamp: None
        self._plan, self.on_loop, self._base, self._dtype = plan, on_loop, base, dtype
        cores = len(os.sched_getaffinity(0))
        self._readers = max(_LEAST_READERS, cores // _CORES_OF_READER)
        self.executor = ThreadPoolExecutor(self._readers, "caraserve-read")
        self._checkers = ThreadPoolExecutor(self._readers, "caraserve-check", initializer=yield_to_event_loop)
        self._inspections = inspections or Inspections()
        self._filler = ImageFiller(copy, min(_MOST_HELPERS, cores // _CORES_OF_HELPER))
        # The last error of each unusable folder: each is logged once.
        self._refusals: WeakKeyDictionary[AdapterFolder, str] = WeakKeyDictionary()

    def connect(
        self,
        download: Callable[[str, NDArray[np.uint8], Done, LayersArrived], None],
        on_read: Callable[[str, AdapterFolder, str], None],
    ) -> None:
        """Connects the reader to a cluster. `download` downloads the adapter of a digest that no local folder has.
        `on_read` is called for each folder read, with its digest, the folder, and the folder's stamp before the
        read."""
        self._download, self._on_read = download, on_read

    def inspect(self, folder: Path) -> Inspection:
        """Checks an adapter's configuration and tensors, and computes its digest, unless the same files were inspected
        before. Raises AdapterRejected or ServerBusy."""
        before, notes = full_stamp(folder), list[str]()
        if (known := self._inspections.find(before)) is not None:
            return known
        spec = inspect_adapter(folder, self._plan, self._base, notes.append, dtype=self._dtype, filler=self._filler)
        found = Inspection.of(spec, notes)
        if before == full_stamp(folder):
            self._inspections.note(before, found)
        return found

    def stamp(self, folder: Path) -> str:
        """Returns the stamp of an adapter's files. The dtype of images belongs to it: with another, the same files have
        another digest."""
        of_files = stamp(folder)
        return f"{of_files} {self._dtype.name}" if of_files and self._dtype is not None else of_files

    def specify(self, name: str, folder: Path, file: TensorFile) -> TensorLayout:
        """Returns the layout of an adapter whose file may still be arriving; logs what is left out. Raises as
        `inspect`, TensorFileError, or WholeFileNeeded."""
        adapter = peft_adapter(folder, file, self._plan)
        layout = specify(adapter, self._plan, self._base, dtype=self._dtype, is_arriving=True)
        log_notes(name, layout.notes)
        return layout

    def check_copies(self, layout: TensorLayout) -> None:
        """Compares an adapter's copies of the base model's tensors with these. Raises AdapterRejected."""
        try:
            check_copies(layout.copies, layout.file, self._base)
        except TensorFileError as error:
            raise AdapterRejected(str(error)) from None

    def read(
        self,
        source: Source,
        into: NDArray[np.uint8],
        done: Done,
        layers_arrived: LayersArrived = lambda image, layers: None,
        *,
        may_defer: bool = False,
    ) -> None:
        """Reads and checks a whole adapter into `into`. Calls `done` on the event loop with the image or the error and,
        during a download or a slow read, `layers_arrived` with the layers so far. `may_defer`: the image may not be
        `is_checked`, if it is of files that have not changed since their digest was computed: `check` does that."""
        if isinstance(source, UploadSource | CombinedSource):
            source.read(into, done, layers_arrived)
            return
        if isinstance(source, RemoteSource):
            assert self._download is not None, "only a cluster has adapters without a folder"
            self._download(source.digest, into, done, layers_arrived)
            return
        folder = source
        folder.add_user()

        def arrived(image: HostAdapter, layers: int) -> None:
            self.on_loop(lambda: layers_arrived(image, layers))

        def work() -> None:
            result: HostAdapter | CaraServeError
            before = ""
            try:
                with folder.opened() as path:
                    before = self.stamp(path)
                    result = self._read_folder(path, into, arrived, may_defer=may_defer)
            except CaraServeError as error:
                result = error
            except OSError as error:
                result = AdapterRejected(f"the adapter's folder cannot be read: {error.strerror}")
            self.on_loop(lambda: deliver(result, before))

        def deliver(result: HostAdapter | CaraServeError, before: str) -> None:
            folder.remove_user()
            if isinstance(result, CaraServeError) and self._refusals.get(folder) != result.message:
                self._refusals[folder] = result.message
                log.warning("adapter folder %r cannot be used: %s", str(folder.path), result.message)
            done(result)
            if isinstance(result, HostAdapter):
                self._refusals.pop(folder, None)
                self._on_read(result.spec.digest, folder, before)

        self.executor.submit(work)

    def _read_folder(
        self, folder: Path, into: NDArray[np.uint8], arrived: LayersArrived, *, may_defer: bool
    ) -> HostAdapter:
        before = full_stamp(folder)
        known = self._inspections.digest_of(before)
        digest = known if may_defer else None
        parts = folder, self._plan, into, self._base
        image = read_adapter(*parts, dtype=self._dtype, filler=self._filler, arrived=arrived, digest=digest)
        is_unchanged = before == full_stamp(folder)
        if not (image.is_checked or is_unchanged):
            image = with_digest(image)
        if is_unchanged and known is None:
            self._inspections.note_digest(before, image.spec.digest)
        return image

    def check(self, image: HostAdapter, done: Callable[[HostAdapter], None]) -> None:
        """Computes the digest of an image's bytes on other threads, and calls `done` on the event loop with the image
        as it is."""

        def hashed(hashes: Sequence[bytes]) -> None:
            found = HostAdapter(identified(image.spec, hashes), image.data)
            if found.spec.digest != image.spec.digest:
                self._inspections.forget(image.spec.digest)
            self.on_loop(lambda: done(found))

        def failed() -> None:  # no digest is that of any adapter
            self.on_loop(lambda: done(HostAdapter(replace(image.spec, digest=""), image.data)))

        check = _Check(image, hashed, failed)

        def spread() -> None:  # not on the event loop: each start of a thread waits for the interpreter lock
            for _ in range(self._readers - 1):
                self._checkers.submit(check.run)
            check.run()

        with suppress(RuntimeError):  # the reader is closed: no answer is waited for
            self._checkers.submit(spread)

    def refuse(self, error: CaraServeError, done: Done) -> None:
        """Calls `done` with an error, as `read` does: not before it has returned."""
        self.on_loop(lambda: done(error))

    def close(self) -> None:
        """Ends the threads."""
        self.executor.shutdown(wait=True, cancel_futures=True)
        self._filler.close()
        self._checkers.shutdown(wait=True, cancel_futures=True)
        self._inspections.close()


class _Check:
    """Computes the hashes of an image's chunks with all threads that call `run`."""

    def __init__(self, image: HostAdapter, done: Callable[[Sequence[bytes]], None], failed: Callable[[], None]) -> None:
        """`done`: called on the thread that computes the last hash; `failed`: in its place after an error."""
        self._data, self._done, self._failed, self._lock = image.data.data, done, failed, Lock()
        self._has_failed = False
        self._chunks = [*pairwise((0, *chunk_ends(image.spec.layer_ends)))]
        self._hashes, self._left, self._numbers = [b""] * len(self._chunks), len(self._chunks), count()

    def run(self) -> None:
        """Returns when no chunk is left to begin with."""
        try:
            self._hash()
        except Exception:
            log.exception("the digest of an adapter's bytes could not be computed")
            with self._lock:
                is_first, self._has_failed = not self._has_failed, True
            if is_first:
                self._failed()

    def _hash(self) -> None:
        while (number := next(self._numbers)) < len(self._chunks):
            start, end = self._chunks[number]
            self._hashes[number] = hashlib.sha256(self._data[start:end]).digest()
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                self._done(self._hashes)


def log_notes(name: str, notes: Sequence[str]) -> None:
    """Logs what is left out of an adapter."""
    for text in notes:
        log.warning("adapter %s: %s", name, text)
