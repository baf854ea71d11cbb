"""Makes the parts of the CUDA backend and joins them: what memory there is, who gets how much, who knows whom. Level 1.

The order is one of memory: weights are there already; then what has a fixed size is taken, then the pool gets what is
left of the share that may be used, less what graphs will take.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from caraserve.cpu.workers import Workers
from caraserve.errors import ConfigError
from caraserve.gpu.aside import Asides
from caraserve.gpu.batch import Capacity, HostBatch, Shape, make_batch, result_bytes
from caraserve.gpu.captures import Captures
from caraserve.gpu.copier import Copier
from caraserve.gpu.decoder import Decoder
from caraserve.gpu.driver import Driver
from caraserve.gpu.graphs import Bucket, GraphSet
from caraserve.gpu.guard import Guard
from caraserve.gpu.host import BOOKS, HostRegion, RegionWords
from caraserve.gpu.images import DeviceImages, HostMemory
from caraserve.gpu.iteration import Iterations, ResultBlocks
from caraserve.gpu.lane import ASSISTED_CHUNK_TOKENS, AssistLane, IterationLane, Pass, issue_pass
from caraserve.gpu.launches import Kernels
from caraserve.gpu.pool import GRANULE_BYTES, DevicePool
from caraserve.gpu.results import Waiter
from caraserve.gpu.ring import Ring
from caraserve.gpu.slots import RequestSlots
from caraserve.gpu.state import BLOCK_TOKENS, block_bytes, make_state
from caraserve.gpu.tables import AdapterTables
from caraserve.gpu.timeline import NOTHING, Lane, Timelines
from caraserve.gpu.transfers import LinkQueue
from caraserve.gpu.triton_attention import prefill_tile_tokens
from caraserve.gpu.weights import Weights
from caraserve.gpu.workspace import make_workspace
from caraserve.model.backend import Limits, SharedMemory
from caraserve.model.layout import MAX_RANK
from caraserve.model.spec import ModelSpec
from caraserve.plan import Plan
from caraserve.trace import Trace
from caraserve.units import align_up, ceil_div, human_bytes

_RING_BYTES = 64 << 20
_ITERATIONS_AHEAD = 3
_UNKNOWN_LINK_BYTES_PER_S = 12e9  # until it is measured
_NODE_BYTES = 8 << 10  # of device memory, a captured kernel
_NODES_PER_LAYER = 20
_FIRST_KV_SHARE = 0.25  # of the pool; it grows when requests need more


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """What the backend is built over; tests have one on the host."""

    driver: Driver
    kernels: Kernels
    device: torch.device
    name: str
    enter_thread: Callable[[], None] = lambda: None  # makes the device current on a new thread


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """What `serve.py` decides for this backend."""

    num_slots: int
    adapter_slots: int
    max_step_tokens: int
    max_context: int
    memory_utilization: float  # of the device's memory
    host_bytes: int  # for the host tier
    adapter_bytes: int | None = None  # most of the pool that adapters may take
    graph_bytes: int = 1 << 30
    padded_rank: int | None = None  # rows that every module takes, in the padded baseline
    merging: bool = False
    lora_cpus: tuple[int, ...] = ()  # cores that CPU LoRA workers are pinned to
    pool_bytes: int | None = None  # None: what is left


@dataclass(slots=True)
class Parts:
    """All of them, joined."""

    limits: Limits
    region: HostRegion
    device: GpuDevice
    timelines: Timelines
    images: DeviceImages
    slots: RequestSlots
    queue: LinkQueue
    iterations: Iterations
    asides: Asides
    workers: Workers
    guard: Guard
    waiter: Waiter
    aside_waiter: Waiter
    captures: Captures
    decoder: Decoder
    capacity: Capacity
    layers: int
    max_context: int
    merges: int = 0

    def enter_thread(self) -> None:
        """To be called first on the launching thread."""
        self.device.enter_thread()

    @property
    def is_busy(self) -> bool:
        """Whether `pump` is to be called again soon."""
        return self.images.is_busy or self.asides.is_busy

    def pump(self) -> None:
        """What is to be done now and then while anything is on its way."""
        self.images.pump()
        self.asides.go_on()

    @property
    def warm_up_steps(self) -> int:
        return len(list(self._shapes())) + self.captures.count

    def warm_up(self, advance: Callable[[], None]) -> None:
        """Runs every kernel once in each of its forms, then captures the graphs; on the launching thread."""
        stream = self.timelines.streams[Lane.COMPUTE]
        for shape in self._shapes():
            issue_pass(self.decoder.work(shape), stream, self.layers)
            self._settle()
            advance()
        self.captures.capture_all(lambda bucket: self.decoder, stream, self.device.device, self._settle, advance)

    def _settle(self) -> None:
        self.timelines.mark(Lane.COMPUTE)
        self.timelines.synchronize(Lane.COMPUTE)

    def _shapes(self) -> Iterator[Shape]:
        """Kernels are compiled apart for sizes of one, for multiples of sixteen, and for all others."""
        capacity = self.capacity
        for tokens in (1, 2, 16):
            if tokens <= capacity.tokens:
                rows, segments = min(tokens, capacity.rows), min(1, capacity.segments)
                yield Shape(tokens, rows, 1, min(tokens, capacity.outputs), segments, True, self.max_context)

    def close(self) -> None:
        """After the launching thread has ended."""
        self.waiter.close()
        self.aside_waiter.close()
        self.guard.close()
        self.workers.close()
        self.device.driver.unregister_host(self.region.region.base)
        self.region.region.close()


def assemble(
    spec: ModelSpec,
    weights: Weights,
    sizes: GpuSizes,
    device: GpuDevice,
    wake: Callable[[], None],
    trace: Trace | None = None,
) -> Parts:
    """Takes the memory and joins the parts. `wake` has the launching thread look around. Raises ConfigError when the
    device is too small."""
    driver, torch_device, dtype = device.driver, device.device, weights.dtype
    max_rank = sizes.padded_rank or MAX_RANK
    tile_tokens = prefill_tile_tokens(dtype)
    outputs = sizes.max_step_tokens + sizes.num_slots
    capacity = Capacity(sizes.max_step_tokens, sizes.num_slots, outputs, tile_tokens, sizes.adapter_slots - 1)
    aside_capacity = Capacity(ASSISTED_CHUNK_TOKENS, 1, ASSISTED_CHUNK_TOKENS, tile_tokens, 1)
    tables = AdapterTables(spec, sizes.adapter_slots, torch_device)
    batches = [make_batch(spec, each, max_rank, torch_device) for each in (capacity, aside_capacity)]
    rooms = [
        make_workspace(spec, dtype, each, max_rank, sizes.max_context, torch_device)
        for each in (capacity, aside_capacity)
    ]
    memory = torch.empty(_pool_bytes(driver, sizes), dtype=torch.uint8, device=torch_device)
    state = make_state(spec, dtype, memory, sizes.num_slots, sizes.max_context)
    limits = _limits(spec, dtype, sizes, memory.numel())
    assert limits.shared is not None
    shared = limits.shared
    pool = DevicePool(
        shared.num_bytes, shared.block_bytes, lora_bytes=shared.adapter_bytes, least_kv_blocks=shared.least_blocks
    )
    pool.resize_kv(limits.num_blocks, until=NOTHING, moved=NOTHING)

    workers_count = len(sizes.lora_cpus)
    block_size = (
        result_bytes(max(capacity.outputs, aside_capacity.outputs)) + 64
    )  # an assisted chunk's error word is the last
    region = HostRegion(spec, workers_count, _RING_BYTES, block_size, _ITERATIONS_AHEAD + BOOKS, sizes.host_bytes)
    host = HostMemory(region.region.base, driver.register_host(region.region.base, region.region.num_bytes))
    workers = Workers(region.region, region.blocks, sizes.lora_cpus, region.block_bytes)

    timelines = Timelines(driver)
    ring = Ring(driver, timelines, region.ring, host.on_device(int(region.ring.ctypes.data)))
    queue = LinkQueue(_UNKNOWN_LINK_BYTES_PER_S)
    copier = Copier(driver, timelines, queue)
    images = DeviceImages(
        driver,
        timelines,
        copier,
        ring,
        pool,
        memory,
        tables,
        spec,
        host,
        padded_rank=sizes.padded_rank,
        with_ready_words=workers_count > 0,
        now=time.monotonic,
    )
    slots = RequestSlots(state, ring)
    decoders = [
        Decoder(spec, weights, state, batch, tables, room, device.kernels, driver)
        for batch, room in zip(batches, rooms, strict=True)
    ]
    blocks = [(block, host.on_device(int(block.ctypes.data))) for block in region.results]
    graphs = GraphSet(
        sizes.num_slots, sizes.max_step_tokens, sizes.graph_bytes, _expected_bytes(spec), merging=sizes.merging
    )
    captures = Captures(driver, graphs, capacity, sizes.max_context, spec.layers)
    waiter, aside_waiter = Waiter(driver, "caraserve-results"), Waiter(driver, "caraserve-asides")
    guard = Guard(RegionWords(region.region), workers)

    def work_of(plan: Plan, shape: Shape) -> Pass:
        return decoders[0].work(shape)

    iterations = Iterations(
        driver,
        timelines,
        ring,
        IterationLane(driver, timelines, copier, spec.layers),
        waiter,
        images,
        slots,
        batches[0],
        HostBatch(capacity),
        ResultBlocks(blocks[:_ITERATIONS_AHEAD], outputs),
        captures,
        work_of,
        spec.layers,
        trace,
    )
    asides = Asides(
        driver,
        timelines,
        ring,
        AssistLane(driver, timelines, copier, host.device_base),
        copier,
        queue,
        images,
        slots,
        batches[1],
        HostBatch(aside_capacity),
        region,
        host,
        ResultBlocks(blocks[_ITERATIONS_AHEAD:], aside_capacity.outputs),
        workers,
        guard,
        aside_waiter,
        lambda shape, terms: decoders[1].work(shape, assist=terms),
        spec,
        wake,
    )
    return Parts(
        limits,
        region,
        device,
        timelines,
        images,
        slots,
        queue,
        iterations,
        asides,
        workers,
        guard,
        waiter,
        aside_waiter,
        captures,
        decoders[0],
        capacity,
        spec.layers,
        sizes.max_context,
    )


def _expected_bytes(spec: ModelSpec) -> Callable[[Bucket], int]:
    def expected(bucket: Bucket) -> int:
        return spec.layers * _NODES_PER_LAYER * _NODE_BYTES

    return expected


def _pool_bytes(driver: Driver, sizes: GpuSizes) -> int:
    if sizes.pool_bytes is not None:
        return sizes.pool_bytes
    spared = (1 - sizes.memory_utilization) * driver.total_bytes()
    return max(0, int(driver.free_bytes() - spared - sizes.graph_bytes)) // GRANULE_BYTES * GRANULE_BYTES


def _limits(spec: ModelSpec, dtype: torch.dtype, sizes: GpuSizes, pool_bytes: int) -> Limits:
    block = block_bytes(spec, dtype)
    least = ceil_div(sizes.max_context + 1, BLOCK_TOKENS)
    if align_up(least * block, GRANULE_BYTES) > pool_bytes:
        raise ConfigError(
            f"one request of {sizes.max_context} tokens needs {human_bytes(least * block)} of device memory and "
            f"{human_bytes(pool_bytes)} are left; lower --max-model-len or raise --gpu-memory-utilization"
        )
    most = pool_bytes // block
    adapter_bytes = pool_bytes if sizes.adapter_bytes is None else sizes.adapter_bytes
    return Limits(
        num_blocks=min(most, max(least, math.floor(_FIRST_KV_SHARE * most))),
        block_tokens=BLOCK_TOKENS,
        num_slots=sizes.num_slots,
        adapter_slots=sizes.adapter_slots,
        max_step_tokens=sizes.max_step_tokens,
        max_context=sizes.max_context,
        shared=SharedMemory(pool_bytes, block, GRANULE_BYTES, adapter_bytes, least),
        aside_plans=BOOKS if sizes.lora_cpus else 0,
    )
