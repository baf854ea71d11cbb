"""The stages of `scripts/gpu_check` on a device of the host, at sizes that take seconds.

Triton's interpreter must have been chosen before this is imported.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caraserve.bench.gpu.accelerator import Mark
from caraserve.bench.gpu.effort import Effort
from caraserve.bench.gpu.rig import Opened, Rig
from caraserve.bench.synthetic import Shape
from caraserve.gpu.driver import Stream
from caraserve.gpu.facts import DeviceFacts
from caraserve.model.layout import Dtype
from tests.gpu.host_device import HostDriver, host_device

FACTS = DeviceFacts(
    name="a device on the host",
    capability=90,
    multiprocessors=2,
    l2_bytes=1 << 12,
    memory_bytes=1 << 30,
    free_bytes=1 << 30,
    driver_version=13000,
    has_stream_memory_operations=True,
    uses_host_pointers=True,
    pci_bus_id="0000:00:00.0",
    numa_node=None,
    lockable_bytes=None,
)
SMALL = Effort(
    shape=Shape(hidden=64, layers=1, intermediate=96, vocab=160, heads=4, kv_heads=2),
    cases=1,
    vocab=160,
    context=40,
    tiny_lengths=(3, 9),
    tiny_new=3,
    dtypes=(Dtype.F32,),
    rounds=8,
    rounds_at_once=4,
    kills=1,
    copy_bytes=1 << 17,
    gemm=16,
    replays=1,
    lora_pool_bytes=1 << 20,
    lora_rows=(1, 2),
    lora_ranks=(8, 16),
    batches=(1, 2),
    contexts=(16,),
    prompts=(8,),
    decodes=1,
    cold_ranks=(8,),
    cold_prompts=(8,),
    cold_repeats=1,
    graph_bytes=0,
    model_pool_bytes=48 << 20,
    bystanders=2,
    arrivals=1,
    host_bytes=8 << 20,
)


class HostStopwatch:
    """The host's clock, when the device gets there."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver

    def mark(self, stream: Stream) -> Mark:
        passed: list[float] = []
        self._driver.run(stream, lambda: passed.append(time.perf_counter()))
        return Mark(passed)

    def between_us(self, start: Mark, end: Mark) -> float:
        first: Any = start
        last: Any = end
        return max(1e6 * (last[0] - first[0]), 1e-3)


def rehearsal_rig(folder: Path, known: Mapping[str, Any] | None = None) -> Rig:
    """One device for each dtype."""
    opened: dict[Dtype, Opened] = {}

    def open_(dtype: Dtype) -> Opened:
        if dtype not in opened:
            device, driver = host_device(dtype, seed=dtype.value)
            opened[dtype] = device, HostStopwatch(driver)
        return opened[dtype]

    return Rig(open_, FACTS, SMALL, folder, 120.0, known or {})
