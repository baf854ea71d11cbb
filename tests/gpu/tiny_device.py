"""A tiny model on a device that runs one pass after another: on torch's CPU with Triton's interpreter and the emulated
raw kernels if there is no GPU, else on the GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.batch import Batch, RowResult, ScheduledRow, SlotSampling
from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes
from caraserve.core.outputs import OutputValues, collect, outputs_of
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from caraserve.gpu.attention.triton import ATTENTION
from caraserve.gpu.checkpoint import load_checkpoint
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.forward.batch import BatchWriter, make_batch
from caraserve.gpu.forward.decoder import Decoder, issue_pass
from caraserve.gpu.kernels.bgmv_work import AdapterItems
from caraserve.gpu.kernels.cuda_kernels import open_device
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.adapters import items_by_shape
from caraserve.gpu.memory.pass_shape import Capacity, PassShape, all_groups
from caraserve.gpu.memory.request_state import BLOCK_TOKENS, block_bytes, make_state
from caraserve.gpu.memory.results import Results
from caraserve.gpu.memory.workspace import make_workspace
from caraserve.gpu.weights import TORCH_DTYPES, Weights, load
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.families import load_plan
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import ceil_div
from scripts.laboratory.gpu.null_device import NullDriver
from tests.gpu.emulator import run as emulate
from tests.gpu.filled_tables import write_column, write_items
from tests.gpu.host_device import host_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, ADAPTER_SLOTS, MAX_CONTEXT, MAX_RANK = 6, 6, 320, 64
STREAM = Stream(0)
GREEDY = SlotSampling.greedy(0)


class Kernels:
    """The raw kernels of whichever device there is."""

    multiprocessors = 1

    def __init__(self, activation: Dtype) -> None:
        self._activation, self._real = activation, None
        self.watch: Callable[[Launch], None] | None = None  # called with every launch
        if DEVICE.type == "cuda":
            from caraserve.gpu.driver.libcuda import Cuda
            from caraserve.gpu.kernels.cuda_kernels import CudaKernels

            self._real = CudaKernels(activation, Cuda())

    def launch(self, launch: Launch, stream: Stream) -> None:
        if self.watch is not None:
            self.watch(launch)
        if self._real is None:
            emulate(launch, self._activation)
        else:
            self._real.launch(launch, Stream(torch.cuda.current_stream().cuda_stream))


@dataclass(frozen=True)
class Bound:
    """An adapter in the pool."""

    folder: Path
    spec: AdapterSpec
    image: Tensor  # uint8
    host: HostAdapter
    items: tuple[AdapterItems, ...]  # by group shape


@dataclass
class TinyDevice:
    """One lane and everything it reads. Each request slot has its own KV blocks."""

    folder: Path
    dtype: Dtype = Dtype.F32
    max_tokens: int = 64
    bound: dict[int, Bound] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan: DecoderPlan = load_plan(self.folder)
        dtype = TORCH_DTYPES[self.dtype]
        device = open_device(self.dtype) if DEVICE.type == "cuda" else host_device(self.dtype)[0]
        self.weights: Weights = load_checkpoint(self.folder, device, partial(load, self.plan, dtype, MAX_CONTEXT))[0]
        per_slot = ceil_div(MAX_CONTEXT, BLOCK_TOKENS)
        num_bytes = block_bytes(self.plan, dtype) * per_slot * SLOTS
        self.pool = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
        self.forget()
        self.state = make_state(self.plan, dtype, self.pool, SLOTS, MAX_CONTEXT)
        blocks = torch.randperm(SLOTS * per_slot, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        self.state.block_table.copy_(blocks.view(SLOTS, per_slot))
        self.tables = AdapterTables(self.plan, ADAPTER_SLOTS, DEVICE)
        capacity = Capacity(
            self.max_tokens,
            SLOTS,
            self.max_tokens,
            ATTENTION.prefill.tile_tokens(dtype, next(self.plan.attentions).head_dim),
            ADAPTER_SLOTS,
        )
        self.host = BatchWriter(capacity)
        self.batch = make_batch(self.plan, capacity, MAX_RANK, DEVICE)
        self.workspace = make_workspace(self.plan, dtype, capacity, MAX_RANK, MAX_CONTEXT, DEVICE, ATTENTION.decode)
        self.kernels = Kernels(self.dtype)
        at_once = replace(device, driver=NullDriver(), kernels=self.kernels)
        parts = self.plan, self.weights, self.state, self.batch, self.tables, self.workspace
        self.decoder = Decoder(*parts, at_once, ATTENTION)
        self.sampling = np.zeros(SLOTS, SLOT_SAMPLING)

    def bind(self, slot: int, folder: Path) -> Bound:
        data = aligned_bytes(inspect_adapter(folder, self.plan).num_bytes)
        host = read_adapter(folder, self.plan, data)
        image = torch.from_numpy(host.data.copy()).to(DEVICE)
        write_column(self.tables, self.plan, slot, host.spec, image.data_ptr())
        items = items_by_shape(self.plan, slot, host.spec, MAX_RANK)
        self.bound[slot] = Bound(folder, host.spec, image, host, items)
        return self.bound[slot]

    def forget(self) -> None:
        """Overwrites keys and values with NaN."""
        self.pool.fill_(0xFF)

    def start(self, slot: int, token_ids: Sequence[int], sampling: SlotSampling = GREEDY) -> None:
        """Starts a request in a slot."""
        ids = torch.tensor(list(token_ids), dtype=torch.int32, device=DEVICE)
        self.state.history[slot, : len(ids)] = ids
        write_sampling(self.sampling, slot, replace(sampling, prompt_tokens=len(token_ids)))
        self.state.sampling.copy_(torch.from_numpy(self.sampling.view(np.uint8).reshape(SLOTS, -1)))

    def fill(self, rows: Sequence[ScheduledRow], *, with_lora: bool = True, all_prompt: bool = False) -> PassShape:
        """Writes the batch and returns its shape; rows must be in the order of their adapters."""
        words, outputs = self.host.empty(), outputs_of(tuple(rows), self._prompt_tokens)
        groups = all_groups(self.plan)
        filled = self.host.fill(words, tuple(rows), outputs, groups, with_lora=with_lora, all_prompt=all_prompt)
        self.batch.words.copy_(torch.from_numpy(words))
        if filled.shape.has_items:
            items = {slot: bound.items for slot, bound in self.bound.items()}
            write_items(self.batch.lists, filled.bgmv_slots, items)
        return filled.shape

    def run(
        self,
        rows: Sequence[ScheduledRow],
        *,
        shape: Callable[[PassShape], PassShape] = lambda shape: shape,
        weights: Weights | None = None,
    ) -> tuple[RowResult, ...]:
        """Runs one pass. `shape`: maps the exact shape to the one that is used. `weights`: merged weights."""
        used = shape(self.fill(rows, with_lora=weights is None))
        issue_pass(self.decoder.make_pass(used, weights=weights), STREAM, len(self.plan.layers))
        return self.results(rows)

    def results(self, rows: Sequence[ScheduledRow]) -> tuple[RowResult, ...]:
        """Returns the results of the last pass."""
        results = Results(self.batch.results.cpu().numpy().copy(), self.host.capacity.outputs)
        outputs = outputs_of(tuple(rows), self._prompt_tokens)
        embeddings = self.decoder.embed_prompts(len(outputs.embedded), STREAM).float().cpu().numpy()
        found = OutputValues(
            results.chosen, results.logprob, results.rank, results.top_ids, results.top_logprobs, embeddings
        )
        return collect(Batch((), (), tuple(rows)), outputs, found, self._prompt_tokens)

    @property
    def _prompt_tokens(self) -> NDArray[np.int64]:
        return np.asarray(self.sampling["prompt_tokens"], np.int64)


@dataclass
class Request:
    """A test's request, and its answer so far."""

    slot: int
    prompt: list[int]
    adapter: int = 0
    chunk: int = 1 << 20  # tokens of its prompt per pass
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    done: int = 0  # tokens whose keys and values are cached
    output: list[int] = field(default_factory=list)
    results: list[RowResult] = field(default_factory=list)

    def row(self) -> ScheduledRow:
        """Returns the row of the next pass."""
        known = len(self.prompt) + len(self.output)
        count = min(known - self.done, self.chunk)
        samples = self.done + count == known
        logprobs = self.logprobs if samples else None
        return ScheduledRow(self.slot, self.done, count, self.adapter, samples, logprobs, self.prompt_logprobs)


def serve(device: TinyDevice, requests: Sequence[Request], new: int, **how: Any) -> None:
    """Runs passes over all requests together until each has at least `new` tokens."""
    ordered = sorted(requests, key=lambda request: request.adapter)
    for request in ordered:
        device.start(request.slot, request.prompt)
    while any(len(request.output) < new for request in ordered):
        step(device, ordered, **how)


def step(device: TinyDevice, ordered: Sequence[Request], **how: Any) -> None:
    """Runs one pass over requests in the order of their adapters."""
    rows = [request.row() for request in ordered]
    for request, row, result in zip(ordered, rows, device.run(rows, **how), strict=True):
        request.done += row.count
        request.results.append(result)
        if result.token_id is not None:
            request.output.append(result.token_id)


def bind_all(device: TinyDevice, adapters: Mapping[str, Path]) -> dict[str, int]:
    """Binds adapters to slots from 1 on; returns the slots by name."""
    slots = {name: slot for slot, name in enumerate(adapters, start=1)}
    for name, slot in slots.items():
        device.bind(slot, adapters[name])
    return slots
