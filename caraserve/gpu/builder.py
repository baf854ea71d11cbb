"""Builds the parts of the CUDA backend and divides the device's memory among them.

The weights are on the device already. Parts of fixed size are allocated first; then the pool of KV blocks and adapters
gets the rest of the usable share, less the memory reserved for graphs.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from caraserve.core.backend import Limits, SharedMemory
from caraserve.core.grammar import mask_words
from caraserve.core.lora_layout import MAX_RANK
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.cpu.shared_memory import PAGE_BYTES
from caraserve.errors import ConfigError
from caraserve.gpu.assist import chunk_graphs
from caraserve.gpu.assist.assisted_prefill import AssistedPrefills, AssistResources
from caraserve.gpu.assist.handshake import Watchdog, WatchdogThread
from caraserve.gpu.attention.triton import ATTENTION
from caraserve.gpu.driver.api import Driver, DriverError
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.streams import NOTHING, Lane, SideStream, Timelines
from caraserve.gpu.forward.batch import BatchWriter, DeviceBatch, make_batch
from caraserve.gpu.forward.decoder import Decoder, DecoderPass, issue_pass
from caraserve.gpu.forward.graphs import NODE_BYTES, Bucket, CapturedGraphs, GraphSet, Passes, expert_nodes
from caraserve.gpu.forward.iteration import IterationRunner, LaneResources
from caraserve.gpu.forward.warm_up import issue_products, product_rows, warm_up_shapes
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.adapters import DeviceImages
from caraserve.gpu.memory.copier import TIMED_BYTES, AdapterCopier, DeviceContext
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS, SYNC_SLOTS, HostRegion
from caraserve.gpu.memory.link_pacer import LinkPacer
from caraserve.gpu.memory.link_queue import LinkQueue
from caraserve.gpu.memory.masks import LaneMasks, mask_bytes
from caraserve.gpu.memory.pass_shape import Capacity, PassShape, all_groups
from caraserve.gpu.memory.pool import GRANULE_BYTES, DevicePool
from caraserve.gpu.memory.registered_memory import RegisteredMemory
from caraserve.gpu.memory.request_state import (
    BLOCK_TOKENS,
    RequestSlots,
    block_bytes,
    make_delta_nets,
    make_state,
    slot_state_bytes,
)
from caraserve.gpu.memory.results import ResultBlocks, Waiter, result_bytes
from caraserve.gpu.memory.staging_ring import StagingRing
from caraserve.gpu.memory.sync_slots import RegionWords
from caraserve.gpu.memory.workspace import Workspace, make_workspace
from caraserve.gpu.merged_weights import MergedDeviceWeights
from caraserve.gpu.weights import DTYPES_OF_TORCH, Weights
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.telemetry.trace import Trace
from caraserve.util.units import align_up, ceil_div, human_bytes

log = logging.getLogger(__name__)

GRAPH_BYTES = 1 << 30  # of device memory, kept for captured graphs
_RING_BYTES, _ASSIST_RING_BYTES = 64 << 20, 32 << 20
_ITERATIONS_AHEAD = 3
_UNKNOWN_LINK_BYTES_PER_S = 12e9  # assumed until it is measured
_NODES_PER_LAYER = 20
_CHUNKS_SHARE = 0.25  # most of the graphs' memory for assisted chunks
_FIRST_KV_SHARE = 0.25  # initial share of the pool; KV grows when requests need more


@dataclass(frozen=True, slots=True)
class GpuSizes:
    """The sizes that the settings give this backend."""

    num_slots: int
    adapter_slots: int
    max_step_tokens: int
    max_context: int
    memory_utilization: float  # share of the device's memory
    host_bytes: int  # of the host cache
    adapter_bytes: int | None = None  # most bytes of the pool for adapters
    graph_bytes: int = GRAPH_BYTES  # 0: no graphs are captured
    padded_rank: int | None = None  # rank of every module in the padded baseline
    merging: bool = False
    lora_cpus: tuple[int, ...] = ()  # cores that CPU LoRA workers are pinned to
    pool_bytes: int | None = None  # None: all memory that is left
    averages: bool = False  # whether embeddings are means of all tokens' hidden states


class BackendParts:
    """The parts of the backend, among which it divides the device's memory. `lanes`: of iterations, of assisted
    prefills."""

    def __init__(
        self,
        plan: DecoderPlan,
        weights: Weights,
        sizes: GpuSizes,
        device: GpuDevice,
        wake: Callable[[], None],
        trace: Trace | None = None,
    ) -> None:
        """Allocates the memory and builds the parts. `wake` makes the launching thread poll. Raises ConfigError if the
        device is too small or host memory cannot be pinned."""
        self.plan, self.device = plan, device
        self._reported = 0  # graphs that cannot be captured
        self._pacer: LinkPacer | None = None
        try:
            self._build(weights, sizes, wake, trace)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "the device's memory is full before all is there that serving needs; lower --gpu-memory-utilization, "
                "--max-num-seqs, --max-num-batched-tokens or --max-model-len"
            ) from error

    def _build(self, weights: Weights, sizes: GpuSizes, wake: Callable[[], None], trace: Trace | None) -> None:
        plan, device, driver = self.plan, self.device, self.device.driver
        capacities = _capacities(plan, weights, sizes)
        tables = AdapterTables(plan, sizes.adapter_slots, device.device)
        self.merged = MergedDeviceWeights(plan, weights, MAX_RANK) if sizes.merging else None
        memories = [_lane_memory(plan, weights, sizes, capacity, device) for capacity in capacities]
        dtype = DTYPES_OF_TORCH[weights.dtype]
        region, self._host = _host_memory(plan, dtype, sizes, capacities, driver)
        host = self._host
        self.context = context = _channels(device, region, host)
        _first_products(context, weights)
        delta_nets = make_delta_nets(plan, weights.dtype, device.device, sizes.num_slots)  # the pool takes what is left
        memory = torch.empty(_pool_bytes(driver, sizes), dtype=torch.uint8, device=device.device)
        state = make_state(plan, weights.dtype, memory, sizes.num_slots, sizes.max_context, delta_nets)
        self.limits = _limits(plan, weights.dtype, sizes, memory.numel())
        self.copies = copies = Waiter(driver, "caraserve-copies")
        self.images = DeviceImages(
            context,
            _pool(self.limits),
            memory,
            tables,
            plan,
            host,
            padded_rank=sizes.padded_rank,
            with_ready_words=bool(sizes.lora_cpus),
            when_copied=lambda: copies.when_done(context.timelines.streams[Lane.COPY], lambda failure: wake()),
        )
        blocks = [(block, host.on_device(int(block.ctypes.data))) for block in region.results]
        own = zip(("results", "assisted"), (blocks[:_ITERATIONS_AHEAD], blocks[_ITERATIONS_AHEAD:]), strict=True)
        self.lanes: list[LaneResources] = []
        for capacity, (batch, workspace), masks, (name, results) in zip(
            capacities, memories, region.masks, own, strict=True
        ):
            waiter = Waiter(driver, f"caraserve-{name}")
            at = host.on_device(int(masks.ctypes.data))
            self.lanes.append(
                LaneResources(
                    capacity,
                    batch,
                    BatchWriter(capacity),
                    Decoder(plan, weights, state, batch, tables, workspace, device, ATTENTION),
                    ResultBlocks(results, capacity.outputs),
                    waiter,
                    LaneMasks(driver, waiter, masks, at, batch.masked.masks),
                )
            )
        self.slots = RequestSlots(state, context.ring)
        chunk_bytes = _chunk_graph_bytes(plan, sizes)
        graphs = GraphSet(
            sizes.num_slots,
            sizes.max_step_tokens,
            sizes.graph_bytes - chunk_bytes,
            (len(plan.layers) * _NODES_PER_LAYER + expert_nodes(plan)) * NODE_BYTES,
            merging=sizes.merging,
        )
        iterations, assist = self.lanes
        self.captured_graphs = CapturedGraphs(driver, graphs, iterations.capacity, sizes.max_context, plan)
        self.iterations = IterationRunner(
            context, iterations, self.images, self.slots, self.captured_graphs, self.merged, plan, trace
        )
        self.workers = WorkerPool(region.region, region.blocks, sizes.lora_cpus, region.block_bytes)
        self.watchdog = WatchdogThread(Watchdog(RegionWords(region.region)), self.workers)
        self.region = region
        resources = AssistResources(region, host, self.workers, self.watchdog.watchdog, dtype)
        of_assist = assist, self.images, self.slots, resources, plan
        self.assisted = AssistedPrefills(context, *of_assist, wake, chunk_bytes)
        device.synchronize()  # memory was filled on torch's stream, for which not every lane waits

    @property
    def is_busy(self) -> bool:
        """True if `poll` must be called again soon."""
        return self.images.is_busy or self.assisted.is_busy

    def poll(self) -> None:
        """Processes what has arrived or finished, and issues what comes next."""
        try:
            self.images.poll()
        except DriverError as error:
            log.exception("the device has failed")
            self.images.fail(error)
            self.assisted.fail(error)
        self.assisted.schedule_pending()

    @property
    def warm_up_steps(self) -> int:
        """Number of times `warm_up` calls `advance`."""
        shapes = warm_up_shapes(self.lanes[0].capacity, self.limits.max_context, all_groups(self.plan))
        assisted = 1 + self.assisted.graphs.count if self.limits.assisted_batches else 0
        return len(shapes) + 1 + assisted + self.captured_graphs.count

    def warm_up(self, advance: Callable[[], None]) -> None:
        """Runs every kernel once in each of its forms, then captures the graphs that a first request may need; on the
        launching thread."""
        lane, timelines, merged = self.lanes[0], self.context.timelines, self.merged
        stream = timelines.streams[Lane.COMPUTE]
        self._empty_batch()
        for shape in warm_up_shapes(lane.capacity, self.limits.max_context, all_groups(self.plan)):
            issue_pass(lane.decoder.make_pass(shape), stream, len(self.plan.layers))
            timelines.settle(Lane.COMPUTE)
            advance()
        for rows in product_rows(lane.capacity.tokens):
            issue_products(lane.decoder, rows, stream)
        if merged is not None:
            merged.warm_up(self.images.memory, self.device.driver, stream)
        timelines.settle(Lane.COMPUTE)
        advance()
        if self.limits.assisted_batches:
            self.assisted.warm_up(advance)
        self.device.synchronize()
        self._passes = self._make_passes()
        self.captured_graphs.capture_first(self._passes, self.device.device, advance)
        self._host.await_all()  # so that no request waits for it, nor for the driver's locks meanwhile
        self._time_link()
        self._report_failures(self.assisted.graphs.count + self.captured_graphs.count)

    def _make_passes(self) -> Passes:
        """Returns how the passes of iterations are captured."""
        lane, timelines, merged = self.lanes[0], self.context.timelines, self.merged
        stream = timelines.streams[Lane.COMPUTE]
        side = SideStream(self.device.driver, timelines.streams[Lane.LORA])

        def make(bucket: Bucket, shape: PassShape) -> DecoderPass:
            weights = merged.weights if merged is not None and bucket.merged else None
            return lane.decoder.make_pass(shape, weights=weights, side=side)

        return Passes(make, stream, lambda: timelines.settle(Lane.COMPUTE))

    @property
    def has_late_graphs(self) -> bool:
        """True if graphs of large prompts have not been captured, which `capture_late` does."""
        return self.captured_graphs.has_late

    def capture_late(self) -> bool:
        """Captures a graph of a large prompt, if there is one and nothing runs on the device or is about to, for whose
        release a capture might have to wait; on the launching thread. Returns whether it has tried."""
        timelines, is_idle = self.context.timelines, not self.is_busy and not self.assisted.is_open
        if not self.has_late_graphs or not is_idle or timelines.passed() != timelines.issued():
            return False
        self._empty_batch()
        if not self.captured_graphs.capture_next(self._passes):
            self._report_failures(self.assisted.graphs.count + self.captured_graphs.total)
        return True

    def _empty_batch(self) -> None:
        """Makes the batch in device memory one without rows, as passes find it that run before they are captured."""
        lane = self.lanes[0]
        self.context.ring.send(lane.batch.words.data_ptr(), lane.host.empty())
        self.context.ring.flush()

    def _report_failures(self, count: int) -> None:
        """Warns of graphs, of `count`, that cannot be captured, once for those that are there now."""
        failures = [*self.assisted.graphs.failures, *self.captured_graphs.failures]
        if len(failures) > self._reported:
            log.warning(
                "%d of %d graphs cannot be captured, so what would take them is launched kernel by kernel, which takes "
                "longer: %s",
                *(len(failures), count, failures[self._reported]),
            )
        self._reported = len(failures)

    def _time_link(self) -> None:
        """Measures the link, before any adapter is in the pool, whose bytes it overwrites."""
        source, target = self.region.arena, self.images.memory
        num_bytes = min(TIMED_BYTES, source.nbytes, target.numel())
        self.context.copier.time_link(target.data_ptr(), self._host.on_device(int(source.ctypes.data)), num_bytes)

    def emulate_link(self, bytes_per_s: float) -> None:
        """Limits the bandwidth of loads; to be called once."""
        word = self.region.link_word
        self._pacer = LinkPacer(bytes_per_s, word, self._host.on_device(int(word.ctypes.data)))
        self.context.copier.emulate_link(self._pacer)

    def close(self) -> None:
        """Frees everything; the launching thread must have ended."""
        if self._pacer is not None:
            self._pacer.close()
        with contextlib.suppress(DriverError):  # the device may have failed
            for each in Lane:
                self.context.timelines.settle(each)
        for waiter in (*(lane.waiter for lane in self.lanes), self.copies):
            waiter.close()
        self.watchdog.close()
        self.workers.close()
        with contextlib.suppress(DriverError):  # the device may have failed
            self._host.close()
        self.region.region.close()


def _capacities(plan: DecoderPlan, weights: Weights, sizes: GpuSizes) -> tuple[Capacity, Capacity]:
    """Returns the capacities of iterations and of assisted prefills. Results begin at multiples of 64 bytes in both:
    Triton compiles other variants of the kernels for other alignments."""
    widths = {attention.head_dim for attention in plan.attentions}
    tile_tokens = min(ATTENTION.prefill.tile_tokens(weights.dtype, width) for width in widths)
    outputs = align_up(sizes.max_step_tokens + sizes.num_slots, 16)  # every token scored, every row sampled
    iterations = Capacity(
        *(sizes.max_step_tokens, sizes.num_slots, outputs, tile_tokens, sizes.adapter_slots - 1), sizes.averages
    )
    chunk = align_up(ASSISTED_CHUNK_TOKENS + 1, 16)
    return iterations, Capacity(ASSISTED_CHUNK_TOKENS, 1, chunk, tile_tokens, 1)


def _lane_memory(
    plan: DecoderPlan, weights: Weights, sizes: GpuSizes, capacity: Capacity, device: GpuDevice
) -> tuple[DeviceBatch, Workspace]:
    max_rank = sizes.padded_rank or MAX_RANK
    sizes_of_rows = plan, weights.dtype, capacity, max_rank, sizes.max_context, device.device
    workspace = make_workspace(*sizes_of_rows, ATTENTION.decode, weights.room(capacity.tokens))
    return make_batch(plan, capacity, max_rank, device.device), workspace


def _host_memory(
    plan: DecoderPlan, dtype: Dtype, sizes: GpuSizes, capacities: Sequence[Capacity], driver: Driver
) -> tuple[HostRegion, RegisteredMemory]:
    most_outputs = max(capacity.outputs for capacity in capacities)
    embeddings_bytes = max(capacity.embedded for capacity in capacities) * plan.hidden * dtype.itemsize
    # The last 4 bytes are an assisted chunk's error word.
    block_bytes = result_bytes(most_outputs) + align_up(embeddings_bytes, 4) + 64
    blocks = _ITERATIONS_AHEAD + SYNC_SLOTS
    masks = [mask_bytes(capacity.rows, mask_words(plan.vocab_size)) for capacity in capacities]
    rings = _RING_BYTES, _ASSIST_RING_BYTES if sizes.lora_cpus else PAGE_BYTES
    region = HostRegion(plan, dtype, len(sizes.lora_cpus), rings, block_bytes, blocks, masks, sizes.host_bytes)
    arena = region.region.offset(int(region.arena.ctypes.data)) if region.arena.size else region.region.num_bytes
    try:
        return region, RegisteredMemory(driver, region.region, arena)
    except ConfigError:
        region.region.close()
        raise


def _channels(device: GpuDevice, region: HostRegion, host: RegisteredMemory) -> DeviceContext:
    driver = device.driver
    timelines, queue = Timelines(driver), LinkQueue(_UNKNOWN_LINK_BYTES_PER_S)
    ring, assist_ring = (
        StagingRing(driver, device.kernels, timelines, lane, memory, host.on_device(int(memory.ctypes.data)))
        for lane, memory in zip((Lane.COMPUTE, Lane.ASSIST), region.rings, strict=True)
    )
    arrivals = torch.zeros(1, dtype=torch.int32, device=device.device)
    copier = AdapterCopier(driver, timelines, queue, arrivals.data_ptr())
    return DeviceContext(driver, timelines, ring, assist_ring, queue, copier, arrivals)


def _first_products(context: DeviceContext, weights: Weights) -> None:
    """Multiplies once on each stream: cuBLAS allocates a workspace per stream at its first use, which must not happen
    while serving."""
    one = torch.zeros((16, 16), dtype=weights.dtype, device=weights.device)
    out = torch.empty_like(one)

    def multiply() -> None:
        torch.mm(one, one, out=out)

    for lane in (Lane.COMPUTE, Lane.ASSIST):
        context.driver.run(context.timelines.streams[lane], multiply)
        context.timelines.settle(lane)


def _pool(limits: Limits) -> DevicePool:
    shared = limits.shared
    assert shared is not None
    pool = DevicePool(
        shared.num_bytes,
        shared.block_bytes,
        lora_bytes=shared.adapter_bytes,
        least_kv_blocks=shared.least_blocks,
        granule=shared.granule_bytes,
    )
    pool.resize_kv(limits.num_blocks, until=NOTHING, moved=NOTHING)
    return pool


def _chunk_graph_bytes(plan: DecoderPlan, sizes: GpuSizes) -> int:
    """Returns the part of the graphs' memory that those of assisted chunks get."""
    expected = chunk_graphs.expected_bytes(plan) if sizes.lora_cpus else 0
    return expected if expected <= _CHUNKS_SHARE * sizes.graph_bytes else 0


def _pool_bytes(driver: Driver, sizes: GpuSizes) -> int:
    if sizes.pool_bytes is not None:
        return sizes.pool_bytes
    spared = (1 - sizes.memory_utilization) * driver.total_bytes()
    return max(0, int(driver.free_bytes() - spared - sizes.graph_bytes)) // GRANULE_BYTES * GRANULE_BYTES


def _limits(plan: DecoderPlan, dtype: torch.dtype, sizes: GpuSizes, pool_bytes: int) -> Limits:
    block = block_bytes(plan, dtype)
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
        assisted_batches=SYNC_SLOTS if sizes.lora_cpus else 0,
        assisted_chunk_tokens=ASSISTED_CHUNK_TOKENS if sizes.lora_cpus else None,
        embedding_size=plan.hidden,
        state_bytes=slot_state_bytes(plan, dtype),
    )
