"""Stage `limits`: measures the device's memory, its link, its matrix product and its launches, as bounds for others.

The memory's speed is the highest of three: a read, a copy, and the matrix-vector product of cuBLAS, each over more
bytes than a cache holds. A copy alone is too easy a bound: one by the driver has reached 2.8 TB/s on an H200, where a
read reached 4.4.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from caraserve.cpu.shared_memory import SharedRegion
from caraserve.model.dtype import Dtype
from caraserve.util.units import ceil_div, human_bytes
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.empty_kernel import launch_empty
from scripts.laboratory.gpu.results import Lines, StageResult, WrongResult
from scripts.laboratory.gpu.setup import CheckSetup, DeviceLimits

_SMALLEST_COPY_BYTES = 64 << 10
_STEP = 8  # ratio of successive copy sizes
_COPIES = 10
_GAP_TARGET_US = 1.5  # per empty kernel of a graph
_MEMORY_SHARE = 4  # of free memory, one part for the read, and two for the copy
_WORD_BYTES = 8


def memory_bytes_per_s(setup: CheckSetup, acc: Accelerator) -> float:
    """Returns the highest speed at which the device uses its memory; measures it if it is not yet known."""
    return max(_memory(setup, acc)) if setup.limits is None else setup.limits.memory_bytes_per_s


def link_bytes_per_s(setup: CheckSetup, acc: Accelerator) -> float:
    """Returns the speed of copies from host to device; measures it if it is not yet known."""
    if setup.limits is not None:
        return setup.limits.link_bytes_per_s
    with _pinned(setup, acc) as (_, base):
        return max(_link(setup, acc, base)[0].values())


def limits(setup: CheckSetup) -> StageResult[DeviceLimits]:
    """Measures the limits. Raises WrongResult when bytes come back from the device changed."""
    acc = setup.accelerator(Dtype.BF16)
    effort, lines = setup.effort, Lines()
    read, copy, product = _memory(setup, acc)
    size = human_bytes(_memory_bytes(setup))
    lines.add(f"read of {size} of the device's memory", f"{read / 1e12:.2f} TB/s")
    lines.add(f"copy of {size} on the device, read and written", f"{copy / 1e12:.2f} TB/s")
    lines.add("cuBLAS's matrix-vector product, weights read", f"{product / 1e12:.2f} TB/s")
    with _pinned(setup, acc) as (region, base):
        _check_link(setup, acc, region, base)
        there, back = _link(setup, acc, base)
        both = _both_ways(setup, acc, base)
    for what, speeds in (("host to device", there), ("device to host", back)):
        lines.add(what, f"{max(speeds.values()) / 1e9:.1f} GB/s")
    lines.add("both at once", f"{both / 1e9:.1f} GB/s")
    flops = _gemm(setup, acc)
    lines.add(f"product of {effort.gemm}² matrices, bf16", f"{flops / 1e12:.0f} TFLOP/s")
    in_graph_us, alone_us = _launches_us(setup, acc)
    lines.at_most(f"µs for each of {effort.empty_kernels} empty kernels in a graph", in_graph_us, _GAP_TARGET_US)
    lines.add("the same, launched one by one", f"{alone_us:.2f} µs")
    figures = DeviceLimits(read, copy, product, there, back, both, flops, in_graph_us, alone_us)
    return StageResult(figures, lines.all)


def _memory_bytes(setup: CheckSetup) -> int:
    """Returns the size of the read and of the copy: at most a quarter of the free memory, in whole words."""
    return min(setup.effort.memory_bytes, setup.facts.free_bytes // _MEMORY_SHARE) // _WORD_BYTES * _WORD_BYTES


def _memory(setup: CheckSetup, acc: Accelerator) -> tuple[float, float, float]:
    """Returns the memory's bytes per second in a read, a copy and a product."""
    found = *_read_and_copy(setup, acc), _product(setup, acc)
    torch.cuda.empty_cache()  # backends take all memory that the driver has
    return found


def _read_and_copy(setup: CheckSetup, acc: Accelerator) -> tuple[float, float]:
    size = _memory_bytes(setup)
    source = torch.empty(size // _WORD_BYTES, dtype=torch.int64, device=acc.place)
    source.random_(generator=acc.generator(0))  # memory full of zeros may be faster
    target = torch.empty_like(source)
    acc.settle()

    def read() -> None:
        source.sum()

    def copy() -> None:
        target.copy_(source)

    repeats = min(setup.effort.replays, _COPIES)
    read_us, copy_us = (acc.median_ungraphed_us(partial(acc.run, each), repeats) for each in (read, copy))
    return 1e6 * size / read_us, 2e6 * size / copy_us


def _product(setup: CheckSetup, acc: Accelerator) -> float:
    """Returns the weights' bytes per second of products of a vector and the gate and up of a layer after another."""
    outputs, inputs = 2 * setup.effort.shape.intermediate, setup.effort.shape.hidden
    generator = acc.generator(0)
    num_bytes = outputs * inputs * acc.dtype.itemsize
    x = acc.random(generator, 1, inputs)
    weights = [
        acc.random(generator, outputs, inputs)
        for _ in range(ceil_div(_memory_bytes(setup) // _MEMORY_SHARE, num_bytes))
    ]
    y = torch.empty((1, outputs), dtype=acc.torch_dtype, device=acc.place)

    def multiply() -> None:
        for each in weights:
            torch.mm(x, each.t(), out=y)

    us = acc.median_ungraphed_us(partial(acc.run, multiply), min(setup.effort.replays, _COPIES))
    return 1e6 * len(weights) * num_bytes / us


@contextmanager
def _pinned(setup: CheckSetup, acc: Accelerator) -> Iterator[tuple[SharedRegion, int]]:
    """Yields host memory for two copies of the largest size, and its address on the device."""
    region = SharedRegion(2 * setup.effort.copy_bytes)
    base = acc.device.driver.register_host(region.base, region.num_bytes)
    try:
        yield region, base
    finally:
        acc.settle()
        acc.device.driver.unregister_host(region.base)
        region.close()


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


def _link(setup: CheckSetup, acc: Accelerator, base: int) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the bytes per second of copies to the device and to the host, by size."""
    effort, driver = setup.effort, acc.device.driver
    room = torch.zeros(effort.copy_bytes, dtype=torch.uint8, device=acc.place)
    device = room.data_ptr()
    acc.settle()
    there, back = {}, {}
    for size in _sizes(effort.copy_bytes):
        to_device = partial(driver.copy_to_device, device, base, size, acc.stream)
        to_host = partial(driver.copy_to_host, base, device, size, acc.stream)
        there[size] = 1e6 * size / acc.median_us(to_device, effort.replays)
        back[size] = 1e6 * size / acc.median_us(to_host, effort.replays)
    return there, back


def _sizes(most: int) -> list[int]:
    sizes = [most]
    while sizes[-1] // _STEP >= _SMALLEST_COPY_BYTES:
        sizes.append(sizes[-1] // _STEP)
    return sizes


def _both_ways(setup: CheckSetup, acc: Accelerator, base: int) -> float:
    """Returns the bytes per second of both directions together, with concurrent copies on two streams."""
    size, driver = setup.effort.copy_bytes, acc.device.driver
    room = torch.zeros(2 * size, dtype=torch.uint8, device=acc.place)
    device = room.data_ptr()
    acc.settle()
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
