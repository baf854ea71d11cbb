"""Hidden folders in the adapter root: of uploads that are not complete, and of adapters that were replaced or deleted
and still have requests.

All those of one server are in one folder that it locks, so that the next start removes what a killed server has left,
and nothing of another server that uses the same root. Where a full disk has no room for it, the folder of a deleted
adapter is beside it, with a lock of its own.
"""

import errno
import fcntl
import logging
import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from threading import Lock

from caraserve.errors import CaraServeError, StorageFull
from caraserve.lora.adapter_folder import AdapterFolder

log = logging.getLogger(__name__)

_PREFIX = ".caraserve-upload-"
_MARK = ".caraserve-uploaded"  # file in the folders that DELETE may remove and PUT may replace
_ABANDONED_S = 3600.0  # age from which a folder is abandoned that another machine may have locked
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UploadFolders:
    """The hidden folders of one server. Thread-safe; all methods block on the disk."""

    def __init__(self, root: Path) -> None:
        """Removes what killed servers have left in `root`."""
        self._root, self._lock = root, Lock()
        self._place = self._beside()  # the folder that has them all, made when it is needed
        self._locks: dict[Path, int] = {}  # descriptors, each with the lock of a folder in the root
        _remove_abandoned(root)

    def free_path(self) -> Path:
        """Returns a path for `make`, where nothing is yet."""
        return self._place / uuid.uuid4().hex

    def make(self, path: Path) -> None:
        """Makes the folder of an upload at a free path. Raises OSError."""
        self._make_place()
        path.mkdir(mode=0o755)
        (path / _MARK).touch()

    def hide(self, folder: AdapterFolder) -> None:
        """Moves the folder of an adapter here, also on a full disk. Raises OSError."""
        try:
            self._make_place()
            folder.rename(self.free_path())
        except OSError as error:
            if error.errno not in _FULL:
                raise
            path = self._beside()
            with self._lock:
                self._unlock_removed()
                self._locks[path] = _locked(folder.path)  # before other servers see it under its new name
            folder.rename(path)

    def _make_place(self) -> None:
        with self._lock:
            if self._place not in self._locks or not self._place.is_dir():
                self._unlock_removed()
                self._place.mkdir(mode=0o700, exist_ok=True)
                self._locks[self._place] = _locked(self._place)

    def _beside(self) -> Path:
        return self._root / f"{_PREFIX}{_boot()}-{uuid.uuid4().hex}"

    def _unlock_removed(self) -> None:
        for path in [path for path in self._locks if not path.exists()]:
            os.close(self._locks.pop(path))

    def close(self) -> None:
        """Removes all of them."""
        with self._lock:
            for path in self._locks:
                shutil.rmtree(path, ignore_errors=True)
            self._unlock_removed()


def _locked(folder: Path) -> int:
    """Locks a folder, under whatever path, until the descriptor that is returned is closed. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def is_uploaded(folder: Path) -> bool:
    """Returns whether a folder in the root was made by an upload."""
    return not folder.is_symlink() and (folder / _MARK).is_file()


def not_written(error: OSError) -> CaraServeError:
    """Returns the error for an upload that cannot be written."""
    kind = StorageFull if error.errno in _FULL else CaraServeError
    return kind(f"the adapter cannot be stored: {error.strerror}")


def write_through(folder: Path) -> None:
    """Returns when a folder and its files are on the disk. Raises OSError."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another server removes it at the same time
            if _is_abandoned(folder):
                log.warning("removing %r, which a server that was killed has left", str(folder))
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether no server uses a folder. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _boot() and folder.name.startswith(f"{_PREFIX}{_boot()}-"):
            return True
        # On another machine a server may have a lock that is not seen here.
        return time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_S
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _boot() -> str:
    """Returns what tells this machine, since it was started, from others; empty if that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    except OSError:
        return ""
