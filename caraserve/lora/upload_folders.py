"""Hidden folders in the adapter root: of uploads that are not complete, and of adapters that were replaced or deleted
and still have requests.

All those of one server are in one folder that it locks, so that the next start removes what a killed server has left,
and nothing of another server that uses the same root.
"""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
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
        self._place: Path | None = None  # the folder that has them all, made when it is needed
        self._descriptor = -1
        _remove_abandoned(root)

    def new(self) -> Path:
        """Makes a folder for an upload. Raises OSError."""
        folder = self._free_path()
        folder.mkdir(mode=0o755)
        (folder / _MARK).touch()
        return folder

    def hide(self, folder: AdapterFolder) -> None:
        """Moves the folder of an adapter here, also on a full disk. Raises OSError."""
        try:
            path = self._free_path()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            path = self._root / f"{_PREFIX}{_boot()}-{uuid.uuid4().hex}"
        folder.rename(path)

    def _free_path(self) -> Path:
        with self._lock:
            if self._place is None or not self._place.is_dir():
                self._close()
                self._place = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_boot()}-", dir=self._root))
                self._descriptor = os.open(self._place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._place / uuid.uuid4().hex

    def close(self) -> None:
        """Removes all of them."""
        with self._lock:
            if self._place is not None:
                shutil.rmtree(self._place, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._place, self._descriptor = None, -1


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
