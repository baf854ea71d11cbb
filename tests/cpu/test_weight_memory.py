"""The memory of base weights and of adapters: its pages."""

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.bench.synthetic import SHAPES, shape_plan
from caraserve.core.lora_layout import HostAdapter
from caraserve.cpu.adapters import CpuImage
from caraserve.cpu.weight_memory import huge_pages
from caraserve.model.dtype import Dtype
from caraserve.profiling.microbench import adapter_spec

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="this system gives no huge pages to a program"
)


def huge_bytes(memory: NDArray[np.uint8]) -> int:
    """Writes to memory. Returns how many bytes of its mapping are in huge pages."""
    memory[:] = 1
    address = memory.ctypes.data
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(word, 16) for word in mapping.split()[0].split("-"))
        if start <= address < end:
            found = re.search(r"AnonHugePages: +(\d+) kB", mapping)
            assert found is not None
            return int(found[1]) << 10
    pytest.fail("the memory is in no mapping")


def test_weights_lie_in_huge_pages() -> None:
    memory = huge_pages(16 << 20)
    assert huge_bytes(memory) >= memory.size // 2  # the ends may lie in smaller pages


def test_an_adapter_of_3_mib_lies_in_huge_pages() -> None:
    plan = shape_plan(SHAPES["10M"], 64)
    spec = adapter_spec(plan, Dtype.BF16, 52, len(plan.layers))
    assert 3 << 20 < spec.num_bytes < 4 << 20  # which NumPy would leave in small pages
    image = CpuImage.empty(HostAdapter(spec, np.zeros(spec.num_bytes, np.uint8)))
    assert huge_bytes(image.data) >= 2 << 20
