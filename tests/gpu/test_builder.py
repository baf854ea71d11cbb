"""Building the CUDA backend: errors at start, and that all memory is filled before it is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from caraserve.errors import ConfigError
from caraserve.gpu import builder
from caraserve.gpu.builder import BackendParts, GpuSizes
from caraserve.gpu.driver.api import DriverError
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.weights import dummy, load
from tests.gpu.host_device import host_device
from tests.gpu.host_driver import HostDriver
from tests.gpu.small_model import SPEC

CPU = torch.device("cpu")
SIZES = GpuSizes(
    num_slots=4, adapter_slots=4, max_step_tokens=32, max_context=64, memory_utilization=0.5, host_bytes=1 << 20,
    pool_bytes=8 << 20, lora_cpus=(0,),
)  # fmt: skip


@contextmanager
def built(device: GpuDevice) -> Iterator[BackendParts]:
    weights = load(SPEC, torch.float32, 64, CPU, dummy(0, CPU))
    parts = BackendParts(SPEC, weights, SIZES, device, lambda: None)
    try:
        yield parts
    finally:
        parts.close()


def test_all_memory_is_filled_before_another_stream_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch fills memory on a stream that the lanes do not wait for."""
    order: list[str] = []
    zeros = torch.zeros

    def filling(*shape: Any, **options: Any) -> torch.Tensor:
        order.append("fill")
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", filling)
    device, _ = host_device()
    with built(replace(device, synchronize=lambda: order.append("wait for all streams"))):
        assert order.count("fill") > 5
        assert order[-1] == "wait for all streams"


def test_host_memory_that_cannot_be_pinned_is_an_error_that_names_the_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(driver: HostDriver, host_address: int, num_bytes: int) -> int:
        raise DriverError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (out of memory)")

    monkeypatch.setattr(HostDriver, "register_host", refuse)
    said = r"MiB of host memory cannot be pinned \(cuMemHostRegister.*\); lower --max-host-adapters-bytes$"
    with pytest.raises(ConfigError, match=said), built(host_device()[0]):
        pass


def test_a_device_without_free_memory_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*sizes: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmany more lines")

    monkeypatch.setattr(builder, "make_workspace", is_full)
    with (
        pytest.raises(ConfigError, match=r"memory is full .* lower --gpu-memory-utilization"),
        built(host_device()[0]),
    ):
        pass
