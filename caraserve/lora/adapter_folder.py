"""The folder of an adapter's files, which its readers find again when an upload gives its name to other files."""

import asyncio
import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

_RENAME_EXCHANGE = 2  # of renameat2
_AT_FDCWD = -100


class AdapterFolder:
    """One folder, whatever its path is by now. Paths are thread-safe; users are counted on the event loop."""

    __slots__ = ("__weakref__", "_lock", "_path", "_unused", "_users", "name")

    def __init__(self, path: Path) -> None:
        self.name = path.name  # for messages: it stays when the folder is hidden
        self._path, self._lock = path, Lock()
        self._users = 0
        self._unused: asyncio.Event | None = None

    @property
    def path(self) -> Path:
        """Where the folder is now."""
        return self._path

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yields a path that leads to the folder, and to no other one, until the context ends. Raises OSError."""
        with self._lock:
            descriptor = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def rename(self, path: Path) -> None:
        """Moves the folder. Raises OSError."""
        with self._lock:
            os.rename(self._path, path)
            self._path = path

    def exchange(self, other: Path) -> None:
        """Exchanges paths with another folder, of which nothing is read yet. Raises OSError."""
        with self._lock:
            _exchange(other, self._path)
            self._path = other

    # --- on the event loop ---

    @property
    def is_used(self) -> bool:
        """Whether adapters are read from the folder, or will be."""
        return self._users > 0

    def add_user(self) -> None:
        """Keeps the folder until `remove_user`: an adapter is read from it, or will be."""
        self._users += 1

    def remove_user(self) -> None:
        """Takes back one `add_user`."""
        self._users -= 1
        if self._users == 0 and self._unused is not None:
            self._unused.set()

    async def unused(self) -> None:
        """Returns when no adapter is read from the folder any more."""
        while self._users:
            self._unused = asyncio.Event()
            await self._unused.wait()


class AdapterFolders:
    """The folders that are known, by path: one object for each, while anything refers to it."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[Path, AdapterFolder] = WeakValueDictionary()

    def at(self, path: Path) -> AdapterFolder:
        """Returns the folder that is at a path now."""
        found = self._known.get(path)
        if found is None or found.path != path:
            found = self._known[path] = AdapterFolder(path)
        return found


def _exchange(one: Path, other: Path) -> None:
    """Exchanges the paths of two folders, in one step where the file system can."""
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
