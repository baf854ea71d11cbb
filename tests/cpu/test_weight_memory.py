"""The memory of base weights: its pages."""

import re
from pathlib import Path

import pytest

from caraserve.cpu.weight_memory import huge_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_BYTES = 16 << 20


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="this system gives no huge pages to a program"
)
def test_weights_lie_in_huge_pages() -> None:
    memory = huge_pages(_BYTES)
    memory[:] = 1
    address = memory.ctypes.data
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(word, 16) for word in mapping.split()[0].split("-"))
        if start <= address < end:
            found = re.search(r"AnonHugePages: +(\d+) kB", mapping)
            assert found is not None
            assert int(found[1]) << 10 >= _BYTES // 2  # the ends may lie in smaller pages
            return
    pytest.fail("the memory is in no mapping")
