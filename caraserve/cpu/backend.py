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
from caraserve.cpu.attention import BLOCK_TOKENS, scratch_bytes
from caraserve.cpu.batch import HostBatch, build_batch, collect
from caraserve.cpu.kernels import lora_expand, lora_shrink, panel_gemm
from caraserve.cpu.records import BUFFERS, CACHE, filled
from caraserve.cpu.sampling import MAX_END_IDS, SLOT_SAMPLING
from caraserve.cpu.step import Sampler, step
from caraserve.cpu.team import Team, yield_to_event_loop
from caraserve.cpu.weights import LoadedModel
from caraserve.model.backend import Limits
from caraserve.model.layout import MAX_RANK, AdapterSpec, HostAdapter
from caraserve.model.spec import ModelSpec
from caraserve.plan import BASE_ADAPTER_SLOT, Plan, Row, SlotSampling, SlotStart, StepResult
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
        self._sampling = np.zeros(sizes.num_slots, SLOT_SAMPLING)
        self._blocks = np.zeros((sizes.num_slots, ceil_div(sizes.max_context, BLOCK_TOKENS)), np.int64)
        self._history = np.zeros((sizes.num_slots, sizes.max_context + 1), np.int64)
        self._cache = self._make_cache(block_bytes)
        self._max_outputs = self._rows_of_activations(sizes) + sizes.num_slots  # every token scored, every row sampled
        self._buffers = self._make_buffers(sizes)
        vocab = int(loaded.model["vocab"][0])
        self._logits = np.zeros((self._max_outputs, int(loaded.model["vocab_pad"][0])), np.float32)
        self._copies = np.zeros((sizes.threads, vocab), np.float32)
        self._seen = np.zeros((sizes.threads, vocab), np.uint8)
        self._team = Team(sizes.threads, step)
        self._jobs: SimpleQueue[_LaneJob | None] = SimpleQueue()
        self._copier = ThreadPoolExecutor(1, "caraserve-copy", initializer=yield_to_event_loop)
        self._lane = threading.Thread(target=self._run_lane, name="caraserve-lane", daemon=True)
        self._lane.start()

    def warm_up(self) -> None:
        """Compiles or loads the kernels by computing one token; to be called once, before any plan."""
        sampling = SlotSampling(1, 0, 0.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, 0, (), ())
        rows = (Row(0, 0, 1, BASE_ADAPTER_SLOT, samples=True),)
        outcome = self._run(Plan((SlotStart(0, (0,), sampling),), (), rows))
        if isinstance(outcome, Exception):
            raise outcome

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

    def adapter_bytes(self, adapter: AdapterSpec) -> int:
        """Device bytes that `load_adapter` would take."""
        return self._adapters.num_bytes(adapter)

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
            prompt_tokens = self._sampling["prompt_tokens"]
            batch = build_batch(plan, self._adapters.max_rank, prompt_tokens)
            records = (self._loaded.model, self._buffers, self._adapters.table, self._cache, batch.record)
            self._team.run(*records, self._sampler(batch))
            rows = collect(plan, batch, prompt_tokens)
        except Exception as error:  # the loop fails the plan's requests and goes on
            return error
        return StepResult(rows, started_s, time.monotonic())

    def _sampler(self, batch: HostBatch) -> Sampler:
        return Sampler(
            table=self._sampling,
            logits=self._logits,
            copies=self._copies,
            seen=self._seen,
            history=self._history,
            chosen=batch.chosen,
            logprob=batch.logprob,
            top_ids=batch.top_ids,
            top_logprobs=batch.top_logprobs,
        )

    def _apply(self, plan: Plan) -> None:
        for start in plan.starts:
            self._start_slot(start)
        for grant in plan.grants:
            self._blocks[grant.slot, grant.first : grant.first + len(grant.blocks)] = grant.blocks

    def _start_slot(self, start: SlotStart) -> None:
        self._history[start.slot, : len(start.token_ids)] = start.token_ids
        write_sampling(self._sampling, start.slot, start.sampling)

    def _make_cache(self, block_bytes: int) -> NDArray[np.void]:
        return filled(
            CACHE,
            base=self._zeros(self.limits.num_blocks * block_bytes),
            blocks=int(self._blocks.ctypes.data),
            max_blocks=self._blocks.shape[1],
            history=int(self._history.ctypes.data),
            max_history=self._history.shape[1],
        )

    def _zeros(self, num_bytes: int) -> int:
        """The aligned address of zeroed memory, which takes no room until it is written."""
        array = np.zeros(num_bytes + 64, np.uint8)
        self._arrays.append(array)
        return align_up(int(array.ctypes.data), 64)

    @staticmethod
    def _rows_of_activations(sizes: CpuSizes) -> int:
        return max(sizes.max_step_tokens, sizes.num_slots)

    def _make_buffers(self, sizes: CpuSizes) -> NDArray[np.void]:
        tokens = self._rows_of_activations(sizes)
        model = {name: int(self._loaded.model[name][0]) for name in self._loaded.model.dtype.names or ()}
        scratch = align_up(scratch_bytes(model["head_dim"]), 4096)  # apart: threads never share a cache line
        widths = {
            "hidden": model["hidden_pad"],
            "qkv": model["q_pad"] + 2 * model["kv_pad"],
            "attended": model["q_pad"],
            "gate": model["inter_pad"],
            "up": model["inter_pad"],
            "shrunk": 3 * MAX_RANK,
        }
        return filled(
            BUFFERS,
            panel_gemm=panel_gemm.address,
            lora_shrink=lora_shrink.address,
            lora_expand=lora_expand.address,
            normed=self._zeros(4 * self._max_outputs * model["hidden_pad"]),
            scratch=self._zeros(scratch * sizes.threads),
            scratch_bytes=scratch,
            barrier=self._zeros(128),
            counters=self._zeros(8 * model["layers"]),
            **{name: self._zeros(4 * tokens * width) for name, width in widths.items()},
        )


def write_sampling(table: NDArray[np.void], slot: int, sampling: SlotSampling) -> None:
    """Sets the sampler's parameters (SLOT_SAMPLING) of one slot."""
    params = table[slot]
    for name in ("temperature", "top_p", "min_p", "top_k", "prompt_tokens", "min_tokens"):
        params[name] = getattr(sampling, name)
    for name in ("presence", "frequency", "repetition"):
        params[name] = getattr(sampling, f"{name}_penalty")
    params["seed"] = sampling.seed & (2**64 - 1)
    ends, bias = sampling.end_ids[:MAX_END_IDS], sampling.logit_bias
    params["end_count"], params["bias_count"] = len(ends), len(bias)
    params["end_ids"][: len(ends)] = ends
    params["bias_ids"][: len(bias)] = [token for token, _ in bias]
    params["bias"][: len(bias)] = [value for _, value in bias]
    penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)
    params["adjusts"] = penalised or bool(bias) or (sampling.min_tokens > 0 and bool(ends))
