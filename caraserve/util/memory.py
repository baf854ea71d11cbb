"""How much memory this process may use, and files in memory, which processes share and libraries read."""

import ctypes
import errno
import os
from pathlib import Path

from caraserve.util.units import human_bytes

_MADV_POPULATE_WRITE = 23  # of Linux 5.14 and later
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of versions 2 and 1


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def machine_free_bytes() -> int:
    """The memory of this machine that is free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int:
    """The free memory of this machine, at most the container's limit."""
    free = machine_free_bytes()
    return min(free, limit_bytes() or free)


def limit_bytes() -> int | None:
    """The memory limit of the container, None without one."""
    for path in map(Path, _CGROUP_LIMITS):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None


def take_pages(address: int, num_bytes: int) -> None:
    """Has the system give out a mapping's pages now, with Python's lock released, instead of at their first touch. Does
    nothing where the system cannot."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE)


def memory_file(name: str, num_bytes: int) -> int:
    """Makes a file of zeros in memory, and returns its descriptor. Raises OSError, whose text names the limit that
    forbids a file of that size."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EFBIG:
            text = f"this process may not make files of {human_bytes(num_bytes)}, in memory neither; raise ulimit -f"
            raise OSError(errno.EFBIG, text) from None
        raise
    return descriptor
