"""A device with the raw CUDA kernels for one dtype, a stream, and a stopwatch for that stream.

All work, also torch's, is issued on one stream. Call `settle` before reading results or overwriting inputs of issued
work; an emulated device runs the work only then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NewType

import torch
from torch import Tensor

from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.forward.lanes import capture
from caraserve.gpu.weights import TORCH_DTYPES
from caraserve.model.dtype import Dtype

Mark = NewType("Mark", object)


class Stopwatch:
    """Measures the time between points of a device's streams, with CUDA events."""

    def __init__(self) -> None:
        self._cuda: Any = torch.cuda  # has no type annotations
        self._streams: dict[int, Any] = {}

    def mark(self, stream: Stream) -> Mark:
        """Places a mark on the stream, after all work issued on it so far."""
        if stream not in self._streams:
            self._streams[stream] = self._cuda.ExternalStream(stream)
        event = self._cuda.Event(enable_timing=True)
        event.record(self._streams[stream])
        return Mark(event)

    def between_us(self, start: Mark, end: Mark) -> float:
        """Waits until the device has reached both marks; returns the time between them in µs."""
        first: Any = start
        last: Any = end
        last.synchronize()
        return 1000.0 * float(first.elapsed_time(last))


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device, its kernels and one stream, for use by a single thread."""

    device: GpuDevice
    dtype: Dtype  # of activations
    stopwatch: Stopwatch
    stream: Stream
    l2_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def place(self) -> torch.device:
        return self.device.device

    def enter(self) -> None:
        """Makes torch use this stream in the calling thread from now on."""
        self.device.enter_thread()
        self.device.driver.run(self.stream, lambda: None)
        self.settle()

    def launch(self, launch: Launch) -> None:
        """Issues a raw CUDA kernel on the stream."""
        self.device.kernels.launch(launch, self.stream)

    def run(self, issue: Callable[[], None]) -> None:
        """Calls `issue`, whose calls to torch and Triton issue work on the stream."""
        self.device.driver.run(self.stream, issue)

    def settle(self) -> None:
        """Waits until all issued work has ended."""
        event = self.device.driver.create_event()
        self.device.driver.record(event, self.stream)
        self.device.driver.synchronize(event)

    def random(self, generator: torch.Generator, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns standard normal numbers on the device; `generator` must be of the same device."""
        made = torch.empty(shape, dtype=torch.float32, device=self.place)
        return made.normal_(generator=generator).to(dtype or self.torch_dtype)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.place).manual_seed(seed)

    def median_us(self, issue: Callable[[], None], replays: int) -> float:
        """Runs the work once, captures it as a CUDA graph and replays that; returns the median time of a replay."""
        driver = self.device.driver
        issue()
        self.settle()  # the first run has loaded all kernels: loading one during a capture would be an error
        graph = capture(driver, self.stream, issue)
        driver.launch_graph(graph, self.stream)
        marks = [self.stopwatch.mark(self.stream)]
        for _ in range(replays):
            driver.launch_graph(graph, self.stream)
            marks.append(self.stopwatch.mark(self.stream))
        self.settle()
        driver.destroy_graph(graph)
        return self._median_us(marks)

    def median_ungraphed_us(self, issue: Callable[[], None], repeats: int) -> float:
        """Runs the work once, then times it launched from Python. For work that takes far longer than its launch, and
        work that allocates memory, which a graph must not."""
        issue()
        marks = [self.stopwatch.mark(self.stream)]
        for _ in range(repeats):
            issue()
            marks.append(self.stopwatch.mark(self.stream))
        self.settle()
        return self._median_us(marks)

    def _median_us(self, marks: Sequence[Mark]) -> float:
        return median(self.stopwatch.between_us(start, end) for start, end in pairwise(marks))
