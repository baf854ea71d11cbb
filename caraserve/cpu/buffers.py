"""The memory of iterations: activations, scratch, and the region shared with the CPU LoRA workers.

Inputs of adapted modules lie in the shared region, where workers read them in place, so a hand-off copies no input. All
memory is allocated at the start; pages take no room until they are written.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import MAX_RANK, PANEL, RANK_STEP
from caraserve.cpu.attention import attend, scratch_bytes
from caraserve.cpu.barrier import BARRIER_BYTES
from caraserve.cpu.forward import decoder_layer, project
from caraserve.cpu.handoff import COUNTER_SPENT_NS, COUNTER_WORDS, block_bytes
from caraserve.cpu.kernels import lora_expand, lora_shrink
from caraserve.cpu.kv_kernels import kv_kernels
from caraserve.cpu.layers import normalise
from caraserve.cpu.lora_workers.compute_side import PIECE_WORDS, REDO_BYTES, add_deltas, choose_sources, hand_off
from caraserve.cpu.shared_memory import PAGE_BYTES, SharedRegion
from caraserve.cpu.structs import BUFFERS, LORA, ROUTED, filled
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up


class Buffers:
    """Buffers for iterations of up to `tokens` tokens and `outputs` rows of logits or embeddings, by a team of
    `threads`."""

    def __init__(
        self,
        plan: DecoderPlan,
        tokens: int,
        outputs: int,
        threads: int,
        host_bytes: int,
        lora_cpus: Sequence[int],
        prepared_bytes: int = 0,
        kv_dtype: Dtype = Dtype.F32,
    ) -> None:
        """`host_bytes`: size of the host cache. `lora_cpus`: a core for each LoRA worker. `prepared_bytes`: of the
        widest prepared row."""
        self._arrays: list[NDArray[np.uint8]] = []
        self._plan, self._hidden_pad = plan, align_up(plan.hidden, PANEL)
        self._tokens, self._threads, self._workers = tokens, threads, len(lora_cpus)
        self._prepared_rows = max(outputs, tokens * max((one.top_k for one in plan.moes), default=1))
        self._prepared_bytes, self._kv_kernels = prepared_bytes, kv_kernels(kv_dtype)
        self.block_bytes = align_up(block_bytes(tokens), PAGE_BYTES)
        widest = max(group.width(PANEL) for layer in plan.layers for group in layer.groups)
        shared = {"normed": 4 * outputs * self._hidden_pad, "projected": 4 * tokens * widest}
        self._delta_bytes = align_up(4 * tokens * widest, PAGE_BYTES)
        counter_bytes = 8 * COUNTER_WORDS * tokens
        sizes = (
            *shared.values(),
            self._workers * self.block_bytes,
            self._workers * self._delta_bytes,
            counter_bytes,
            host_bytes,
        )
        self.region = SharedRegion(sum(align_up(size, PAGE_BYTES) for size in sizes))
        arrays = {name: self.region.carve(size) for name, size in shared.items()}
        self.normed = arrays["normed"].view(np.float32).reshape(outputs, self._hidden_pad)[:, : plan.hidden]
        inputs = {name: int(array.ctypes.data) for name, array in arrays.items()}
        self.blocks = self.region.carve(self._workers * self.block_bytes)
        self._deltas = self.region.carve(self._workers * self._delta_bytes)
        self._counters = self.region.carve(counter_bytes).view(np.int64).reshape(tokens, COUNTER_WORDS)
        self.host_memory = self.region.carve(host_bytes)
        self._tokens_per_worker = np.full(MAX_RANK // RANK_STEP + 1, tokens, np.int64)
        self._counts = np.zeros(2, np.int64)
        self.record = self._buffer_record(inputs)

    def lora_record(self, table: dict[str, int]) -> NDArray[np.void]:
        """Returns a LORA record. `table`: the fields that `DeviceAdapters.addresses` gives."""
        redo_bytes = align_up(REDO_BYTES, PAGE_BYTES)
        return filled(
            LORA,
            **table,
            base=self.region.base,
            workers=self._workers,
            blocks=int(self.blocks.ctypes.data),
            block_bytes=self.block_bytes,
            deltas=int(self._deltas.ctypes.data),
            delta_bytes=self._delta_bytes,
            published=self._zeros(8 * self._workers),
            asked=self._zeros(8 * self._workers),
            tokens_per_worker=int(self._tokens_per_worker.ctypes.data),
            slices=self._zeros(8 * PIECE_WORDS * self._tokens),
            segment_slices=self._zeros(16 * self._tokens),
            redo=self._zeros(redo_bytes * self._threads),
            redo_bytes=redo_bytes,
            counters=int(self._counters.ctypes.data),
            handed=int(self._counts[:1].ctypes.data),
            redone=int(self._counts[1:].ctypes.data),
        )

    def record_for_streaming(self) -> NDArray[np.void]:
        """Returns a BUFFERS record with a residual stream of its own, for a prefill that stops between layers."""
        record = self.record.copy()
        record["hidden"] = self._zeros(4 * self._tokens * self._hidden_pad)
        return record

    @property
    def worker_ns(self) -> NDArray[np.int64]:
        """The time that workers have spent on each segment, int64 [tokens]; to be set to 0 before an iteration."""
        return self._counters[:, COUNTER_SPENT_NS // 8]

    @property
    def slices_handed_off(self) -> int:
        """Returns how many slices of layers were handed off."""
        return int(self._counts[0])

    @property
    def modules_redone(self) -> int:
        """Returns how many modules of slices the device computed because the worker died or stopped."""
        return int(self._counts[1])

    def set_tokens_per_worker(self, tokens_per_worker: Callable[[int], int]) -> None:
        """Sets the maximum tokens of a slice by rank; values below 1 count as 1."""
        for index in range(1, len(self._tokens_per_worker)):
            self._tokens_per_worker[index] = max(1, tokens_per_worker(RANK_STEP * index))

    def _buffer_record(self, inputs: dict[str, int]) -> NDArray[np.void]:
        plan, tokens = self._plan, self._tokens
        # Whole pages: threads never share a cache line. A router takes a number for each expert and group.
        needed = scratch_bytes(max(one.head_dim for one in plan.attentions)), *(8 * one.experts for one in plan.moes)
        for_delta_nets, of_delta_nets = self._for_delta_nets()
        scratch = align_up(max(*needed, of_delta_nets), PAGE_BYTES)
        most_sites = max(len(group.sites) for layer in plan.layers for group in layer.groups)
        widths = {"hidden": self._hidden_pad, "added": self._hidden_pad, "shrunk": most_sites * MAX_RANK}
        return filled(
            BUFFERS,
            lora_shrink=lora_shrink.address,
            lora_expand=lora_expand.address,
            choose_sources=choose_sources.address,
            hand_off=hand_off.address,
            add_deltas=add_deltas.address,
            attend=attend.address,
            append=self._kv_kernels.append,
            attend_tile=self._kv_kernels.attend_tile,
            normalise=normalise.address,
            project=project.address,
            decoder_layer=decoder_layer.address,
            scratch=self._zeros(scratch * self._threads),
            scratch_bytes=scratch,
            prepared=self._zeros(self._prepared_rows * self._prepared_bytes),
            prepared_bytes=self._prepared_bytes,
            barrier=self._zeros(BARRIER_BYTES),
            counters=self._zeros(8 * len(plan.layers)),
            **self._for_experts(),
            **for_delta_nets,
            **inputs,
            **{name: self._zeros(4 * tokens * width) for name, width in widths.items()},
        )

    def _for_experts(self) -> dict[str, int]:
        """Returns the fields of a BUFFERS record about experts."""
        moes = self._plan.moes
        if not moes:
            return {"route": 0, "mix": 0, "routed": 0}
        from caraserve.cpu.experts import COUNTER_BYTES, mix, route  # an import compiles them

        experts, pairs = max(one.experts for one in moes), self._tokens * max(one.top_k for one in moes)
        inner = 2 * max(align_up(one.gate.outputs, PANEL) for one in moes)
        routed = filled(
            ROUTED,
            chosen=self._zeros(8 * pairs),
            weight=self._zeros(4 * pairs),
            row=self._zeros(8 * pairs),
            first=self._zeros(8 * (experts + 1)),
            next=self._zeros(8 * experts),
            active=self._zeros(8 * experts),
            counters=self._zeros(3 * COUNTER_BYTES),
            rows=self._zeros(4 * pairs * self._hidden_pad),
            inner=self._zeros(4 * pairs * inner),
        )
        self._arrays.append(routed.view(np.uint8))
        return {"route": route.address, "mix": mix.address, "routed": int(routed.ctypes.data)}

    def _for_delta_nets(self) -> tuple[dict[str, int], int]:
        """Returns the fields of a BUFFERS record about delta nets, and the bytes of scratch that they need."""
        nets = self._plan.delta_nets.values()
        if not nets:
            return {"convolve": 0, "recur": 0}, 0
        from caraserve.cpu.delta_net import convolve, recur, scratch_bytes  # an import compiles them

        needed = max(scratch_bytes(one.key_width, one.value_width, one.kernel) for one in nets)
        return {"convolve": convolve.address, "recur": recur.address}, needed

    def _zeros(self, num_bytes: int) -> int:
        """Returns the 64-byte aligned address of zeroed memory that this object keeps."""
        array = np.zeros(num_bytes + 64, np.uint8)
        self._arrays.append(array)
        return align_up(int(array.ctypes.data), 64)
