"""How much memory this process may use."""

import os
from pathlib import Path

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
