"""A file of tensors that is open for reading: what readers of every format share."""

import os
import stat
import weakref
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self


class TensorFileError(Exception):
    """A tensor file that cannot be read; the message names the file and what is wrong with it."""


class FilePlace(NamedTuple):
    """Where the values of a tensor begin, which lie one row after another."""

    descriptor: int  # of the open file
    offset: int  # in bytes


class OpenedFile:
    """A regular file, read by offsets, so that several threads may read at once."""

    def __init__(self, path: Path, name: str = "") -> None:
        """Opens the file, which error messages call `name`, else by its own name. Raises TensorFileError."""
        self.name = name or path.name
        self._descriptor = open_regular(path)
        self._closer = weakref.finalize(self, os.close, self._descriptor)  # also without a call of `close`
        self._status = os.fstat(self._descriptor)

    def check_unchanged(self) -> None:
        """Raises TensorFileError when the file was written after it was opened: what was read may be a mixture."""
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns):
            raise TensorFileError(f"{self.name} was changed while it was being read; try again")

    def close(self) -> None:
        """Closes the file. Idempotent; arrays read from it stay valid."""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, offset: int, num_bytes: int) -> bytes:
        """Reads a part of the header, as far as the file goes. Raises TensorFileError."""
        data = bytearray(min(num_bytes, max(0, self._status.st_size - offset)))
        self._read_into(memoryview(data), offset, "its header")
        return bytes(data)

    def _read_into(self, target: memoryview, offset: int, what: str) -> None:
        """Reads as many bytes as `target` has. Raises TensorFileError, which says that `what` was read."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise TensorFileError(f"{self.name}: {what} cannot be read: {error.strerror}") from None
            if count == 0:
                raise TensorFileError(f"{self.name} was cut short while {what} was being read")
            done += count


def open_regular(path: Path) -> int:
    """Opens a regular file for reading, without ever waiting. Raises TensorFileError, also for pipes and folders."""
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer. It has no effect on regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise TensorFileError(f"{path.name} cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TensorFileError(f"{path.name} is not a regular file")
    return descriptor
