"""Stage `limits`: measures the device's copies, its link, its matrix product and its launches, as bounds for others."""

import time
from functools import partial

import torch

from caraserve.bench.gpu.accelerator import Accelerator
from caraserve.bench.gpu.device_limits import DeviceLimits
from caraserve.bench.gpu.results import Lines, StageResult, WrongResult
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.cpu.shared_memory import SharedRegion
from caraserve.gpu.kernels.empty import launch_empty
from caraserve.model.dtype import Dtype

_SMALLEST_COPY_BYTES = 64 << 10
_STEP = 8  # ratio of successive copy sizes
_COPIES = 10
_GAP_TARGET_US = 1.5  # per empty kernel of a graph


def copy_bytes_per_s(setup: CheckSetup, acc: Accelerator) -> float:
    """Returns the bytes that a copy on the device reads and writes per second; measures them if not yet known."""
    return setup.limits.copy_bytes_per_s if setup.limits else _copy_on_device(setup, acc)


def limits(setup: CheckSetup) -> StageResult[DeviceLimits]:
    """Measures the limits. Raises WrongResult when bytes come back from the device changed."""
    acc = setup.accelerator(Dtype.BF16)
    effort, lines = setup.effort, Lines()
    region = SharedRegion(2 * effort.copy_bytes)
    base = acc.device.driver.register_host(region.base, region.num_bytes)
    try:
        _check_link(setup, acc, region, base)
        on_device = _copy_on_device(setup, acc)
        there, back, both = _link(setup, acc, base)
    finally:
        acc.settle()
        acc.device.driver.unregister_host(region.base)
        region.close()
    lines.add("copy on the device, read and written", f"{on_device / 1e12:.2f} TB/s")
    for what, speeds in (("host to device", there), ("device to host", back)):
        lines.add(what, f"{max(speeds.values()) / 1e9:.1f} GB/s")
    lines.add("both at once", f"{both / 1e9:.1f} GB/s")
    flops = _gemm(setup, acc)
    lines.add(f"product of {effort.gemm}² matrices, bf16", f"{flops / 1e12:.0f} TFLOP/s")
    in_graph_us, alone_us = _launches_us(setup, acc)
    lines.at_most(f"µs for each of {effort.empty_kernels} empty kernels in a graph", in_graph_us, _GAP_TARGET_US)
    lines.add("the same, launched one by one", f"{alone_us:.2f} µs")
    return StageResult(DeviceLimits(on_device, there, back, both, flops, in_graph_us, alone_us), lines.all)


def _copy_on_device(setup: CheckSetup, acc: Accelerator) -> float:
    size = 4 * setup.effort.copy_bytes
    source, target = (torch.zeros(size, dtype=torch.uint8, device=acc.place) for _ in range(2))
    driver = acc.device.driver

    def copy() -> None:
        driver.copy_on_device(target.data_ptr(), source.data_ptr(), size, acc.stream)

    return 2e6 * size / acc.median_us(copy, setup.effort.replays)


def _check_link(setup: CheckSetup, acc: Accelerator, region: SharedRegion, base: int) -> None:
    """Copies bytes to the device and back; raises WrongResult unless they are the same."""
    size, driver = setup.effort.copy_bytes, acc.device.driver
    there, back = region.bytes[:size], region.bytes[size : 2 * size]
    there[:: 1 << 10] = 0xA5
    there[-1], back[:] = 0x5A, 0
    device = torch.zeros(size, dtype=torch.uint8, device=acc.place)
    acc.settle()
    driver.copy_to_device(device.data_ptr(), base, size, acc.stream)
    driver.copy_to_host(base + size, device.data_ptr(), size, acc.stream)
    acc.settle()
    if not (there == back).all():
        raise WrongResult(f"{size} bytes went to the device and came back otherwise")


def _link(setup: CheckSetup, acc: Accelerator, base: int) -> tuple[dict[int, float], dict[int, float], float]:
    """Returns the bytes per second of copies to the device and to the host, by size, and of the largest both ways at
    once."""
    effort, driver = setup.effort, acc.device.driver
    room = torch.zeros(2 * effort.copy_bytes, dtype=torch.uint8, device=acc.place)
    device = room.data_ptr()
    there, back = {}, {}
    for size in _sizes(effort.copy_bytes):
        to_device = partial(driver.copy_to_device, device, base, size, acc.stream)
        to_host = partial(driver.copy_to_host, base, device, size, acc.stream)
        there[size] = 1e6 * size / acc.median_us(to_device, effort.replays)
        back[size] = 1e6 * size / acc.median_us(to_host, effort.replays)
    return there, back, _both_ways(setup, acc, base, device)


def _sizes(most: int) -> list[int]:
    sizes = [most]
    while sizes[-1] // _STEP >= _SMALLEST_COPY_BYTES:
        sizes.append(sizes[-1] // _STEP)
    return sizes


def _both_ways(setup: CheckSetup, acc: Accelerator, base: int, device: int) -> float:
    """Returns the bytes per second of both directions together, with concurrent copies on two streams."""
    size, driver = setup.effort.copy_bytes, acc.device.driver
    other, begun, ended = driver.create_stream(0), driver.create_event(), driver.create_event()
    start = acc.stopwatch.mark(acc.stream)
    driver.record(begun, acc.stream)
    driver.wait_event(other, begun)
    for _ in range(_COPIES):
        driver.copy_to_device(device, base, size, acc.stream)
        driver.copy_to_host(base + size, device + size, size, other)
    driver.record(ended, other)
    driver.wait_event(acc.stream, ended)
    end = acc.stopwatch.mark(acc.stream)
    acc.settle()
    return 2e6 * _COPIES * size / acc.stopwatch.between_us(start, end)


def _gemm(setup: CheckSetup, acc: Accelerator) -> float:
    size, generator = setup.effort.gemm, acc.generator(0)
    a, b = (acc.random(generator, size, size) for _ in range(2))  # a product of zeros would run faster
    c = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=c)

    return 2e6 * size**3 / acc.median_us(lambda: acc.run(multiply), _COPIES)


def _launches_us(setup: CheckSetup, acc: Accelerator) -> tuple[float, float]:
    """Returns the time per empty kernel, in a graph and launched from Python; no kernel of a model can take less."""
    count = setup.effort.empty_kernels

    def launch() -> None:
        acc.run(lambda: launch_empty(count))

    in_graph_us = acc.median_us(launch, setup.effort.replays) / count
    started_s = time.perf_counter()
    launch()
    acc.settle()
    return in_graph_us, 1e6 * (time.perf_counter() - started_s) / count
