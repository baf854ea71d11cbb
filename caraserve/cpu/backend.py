"""The CPU backend: a lane thread that runs plans in order, a copy thread beside it for adapters. Level 1.

`serve.py` builds it, `loop.py` launches plans on it, `adapters/residency.py` loads adapters into it.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.adapters import DeviceAdapters
from caraserve.cpu.attention import BLOCK_TOKENS, TILE
from caraserve.cpu.batch import build_batch, collect
from caraserve.cpu.sampling import MAX_END_IDS, SamplingTable, sampling_table
from caraserve.cpu.step import Buffers, Cache, Model, step
from caraserve.cpu.team import Team, yield_to_event_loop
from caraserve.cpu.weights import LoadedModel
from caraserve.model.backend import Limits
from caraserve.model.layout import MAX_RANK, HostAdapter, aligned_bytes
from caraserve.model.spec import ModelSpec
from caraserve.plan import Plan, SlotSampling, SlotStart, StepResult
from caraserve.units import align_up, ceil_div

_LaneJob = Callable[[], None]
PlanDone = Callable[[StepResult | Exception], None]


@dataclass(frozen=True, slots=True)
class CpuSizes:
    """What `serve.py` decides for this backend."""

    threads: int
    num_slots: int
    adapter_slots: int
    max_step_tokens: int
    max_context: int
    kv_cache_bytes: int


class CpuBackend:
    """Runs plans in launch order on one lane thread and its team; see model/backend.py for the contract."""

    def __init__(self, spec: ModelSpec, loaded: LoadedModel, sizes: CpuSizes) -> None:
        block_bytes = spec.kv_bytes_per_token(4) * BLOCK_TOKENS
        self.limits = Limits(
            num_blocks=sizes.kv_cache_bytes // block_bytes,
            block_tokens=BLOCK_TOKENS,
            num_slots=sizes.num_slots,
            adapter_slots=sizes.adapter_slots,
            max_step_tokens=sizes.max_step_tokens,
            max_context=sizes.max_context,
        )
        self._loaded = loaded
        self._arrays: list[NDArray[np.uint8]] = []
        self._adapters = DeviceAdapters(spec, sizes.adapter_slots)
        self._table = sampling_table(sizes.num_slots)
        self._cache = self._make_cache(block_bytes)
        self._buffers = self._make_buffers(loaded.model, sizes)
        self._team = Team(sizes.threads, step)
        self._jobs: SimpleQueue[_LaneJob | None] = SimpleQueue()
        self._copier = ThreadPoolExecutor(1, "caraserve-copy", initializer=yield_to_event_loop)
        self._lane = threading.Thread(target=self._run_lane, name="caraserve-lane", daemon=True)
        self._lane.start()

    def launch(self, plan: Plan, done: PlanDone) -> None:
        """Queues one iteration; `done` is called on the lane's thread."""
        self._jobs.put(lambda: done(self._run(plan)))

    def load_adapter(self, adapter: HostAdapter, slot: int, done: Callable[[Exception | None], None]) -> None:
        """Packs on the copy thread, then binds on the lane, after all that was launched before."""

        def copy() -> None:
            try:
                image = self._adapters.pack(adapter)
            except Exception as error:
                done(error)
                return
            self._jobs.put(lambda: bind(image))

        def bind(image: NDArray[np.uint8]) -> None:
            self._adapters.bind(slot, adapter.spec, image)
            done(None)

        self._copier.submit(copy)

    def unload_adapter(self, slot: int) -> None:
        """Unbinds on the lane, after every plan launched so far."""
        self._jobs.put(lambda: self._adapters.unbind(slot))

    def adapter_bytes(self, adapter: HostAdapter) -> int:
        """Device bytes that `load_adapter` would take."""
        return self._adapters.num_bytes(adapter.spec)

    def close(self) -> None:
        """Runs what was launched, then ends the threads."""
        self._copier.shutdown(wait=True)
        self._jobs.put(None)
        self._lane.join()
        self._team.close()

    def _run_lane(self) -> None:
        yield_to_event_loop()
        while (job := self._jobs.get()) is not None:
            job()

    def _run(self, plan: Plan) -> StepResult | Exception:
        started_s = time.monotonic()
        try:
            self._apply(plan)
            batch = build_batch(plan, self._adapters.max_rank, self._table.prompt_tokens)
            self._team.run(self._loaded.model, self._buffers, self._adapters.table, self._cache, self._table, batch)
            rows = collect(plan, batch, self._table.prompt_tokens)
        except Exception as error:  # the loop fails the plan's requests and goes on
            return error
        return StepResult(rows, started_s, time.monotonic())

    def _apply(self, plan: Plan) -> None:
        for start in plan.starts:
            self._start_slot(start)
        for grant in plan.grants:
            self._cache.blocks[grant.slot, grant.first : grant.first + len(grant.blocks)] = grant.blocks

    def _start_slot(self, start: SlotStart) -> None:
        self._cache.history[start.slot, : len(start.token_ids)] = start.token_ids
        write_sampling(self._table, start.slot, start.sampling)

    def _make_cache(self, block_bytes: int) -> Cache:
        blocks = np.zeros(self.limits.num_blocks * block_bytes + 64, np.uint8)  # zero pages, not resident until used
        self._arrays.append(blocks)
        context, slots = self.limits.max_context, self.limits.num_slots
        return Cache(
            base=align_up(int(blocks.ctypes.data), 64),
            blocks=np.zeros((slots, ceil_div(context, BLOCK_TOKENS)), np.int64),
            history=np.zeros((slots, context + 1), np.int64),
        )

    def _make_buffers(self, model: Model, sizes: CpuSizes) -> Buffers:
        tokens = max(sizes.max_step_tokens, sizes.num_slots)
        outputs = tokens + sizes.num_slots  # each token may be scored, each row may sample

        def rows(width: int, count: int = tokens) -> int:
            array = np.zeros(4 * width * count + 64, np.uint8)
            self._arrays.append(array)
            return align_up(int(array.ctypes.data), 64)

        scratch_stride = align_up(4 * TILE * (2 * model.head_dim + 64), 4096)  # apart: threads never share a line
        barrier = aligned_bytes(128)
        barrier[:] = 0
        self._arrays.append(barrier)
        return Buffers(
            hidden=rows(model.hidden_pad),
            normed=rows(model.hidden_pad, outputs),
            qkv=rows(model.q_pad + 2 * model.kv_pad),
            attended=rows(model.q_pad),
            gate=rows(model.inter_pad),
            up=rows(model.inter_pad),
            shrunk=rows(3 * MAX_RANK),
            logits=np.zeros((outputs, model.vocab_pad), np.float32),
            scratch=rows(scratch_stride // 4, sizes.threads),
            scratch_stride=scratch_stride,
            weights=np.zeros((sizes.threads, model.vocab), np.float32),
            seen=np.zeros((sizes.threads, model.vocab), np.uint8),
            barrier=int(barrier.ctypes.data),
            counters=np.zeros(model.layers, np.int64),
        )


def write_sampling(table: SamplingTable, slot: int, sampling: SlotSampling) -> None:
    """Sets the sampler's parameters of one slot."""
    for name in ("temperature", "top_p", "min_p", "top_k", "prompt_tokens", "min_tokens"):
        getattr(table, name)[slot] = getattr(sampling, name)
    table.seed[slot] = sampling.seed & (2**64 - 1)
    table.presence[slot] = sampling.presence_penalty
    table.frequency[slot] = sampling.frequency_penalty
    table.repetition[slot] = sampling.repetition_penalty
    ends = sampling.end_ids[:MAX_END_IDS]
    table.end_count[slot] = len(ends)
    table.end_ids[slot, : len(ends)] = ends
    bias = sampling.logit_bias
    table.bias_count[slot] = len(bias)
    table.bias_ids[slot, : len(bias)] = [token for token, _ in bias]
    table.bias[slot, : len(bias)] = [value for _, value in bias]
    penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)
    table.adjusts[slot] = penalised or bool(bias) or (sampling.min_tokens > 0 and bool(ends))
