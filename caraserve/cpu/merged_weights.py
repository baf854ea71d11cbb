"""A copy of the base weights with one adapter merged into it, for loading mode `merged`, after dLoRA.

Only panels of adapted modules are written; all others are the base's. Unmerging means using the base's panels again,
which is exact and free, while dLoRA subtracts what it added: another pass over the weights, whose rounding errors
remain. An adapter that is merged again before any other is merged finds its panels unchanged. The price is the memory
of a second copy of the base's linear modules.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import BASE_ADAPTER_SLOT
from caraserve.core.lora_layout import MAX_RANK, PANEL, aligned_bytes
from caraserve.cpu.adapters import DeviceAdapters
from caraserve.cpu.forward import device_entry, meet
from caraserve.cpu.jit import entry, kernel
from caraserve.cpu.kernels import STORE, itemsize, load_weight
from caraserve.cpu.simd import DTYPE_BF16, DTYPE_F16, DTYPE_F32, LANES, load_f32, store_f32, vadd, vload, weight_ops
from caraserve.cpu.structs import NUM_WEIGHTS, SITE_DOWN, SITE_O, SITE_Q, WQ, word
from caraserve.cpu.tiles import call_by_address
from caraserve.cpu.weights import LoadedModel, huge_pages
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec
from caraserve.util.units import align_up

_INPUTS = 96  # of one work item: its parts of A and of a panel stay in the L2 cache
_A_BYTES, _SUM_BYTES = 4 * _INPUTS * MAX_RANK, 4 * _INPUTS * PANEL
_SCRATCH_BYTES = _A_BYTES + _SUM_BYTES
_call9 = call_by_address(9)
_load_f32, _store_f32 = weight_ops(DTYPE_F32)
_load_bf16, _store_bf16 = weight_ops(DTYPE_BF16)
_load_f16, _store_f16 = weight_ops(DTYPE_F16)


@kernel
def _shape(model, site):  # type: ignore[no-untyped-def]
    """Returns the inputs of a module and the panels of its outputs."""
    if site < SITE_O:
        return model.hidden, (model.q_pad if site == SITE_Q else model.kv_pad) // PANEL
    if site == SITE_O:
        return model.heads * model.head_dim, model.hidden_pad // PANEL
    if site < SITE_DOWN:
        return model.hidden, model.inter_pad // PANEL
    return model.inter, model.hidden_pad // PANEL


@kernel
def _transpose_a(entry, k, first, rows, x):  # type: ignore[no-untyped-def]
    """Writes `x[i, j] = scale · A[j, first + i]` for i < rows."""
    rank, dtype, scale = word(entry, 2), word(entry, 3), load_f32(entry + 32)
    size = itemsize(dtype)
    stride = (k + LANES - 1) // LANES * LANES * size
    for row in range(rank):
        at = word(entry, 0) + row * stride + first * size
        for i in range(rows):
            store_f32(x + 4 * (i * rank + row), scale * load_weight(at + i * size, dtype))


@kernel
def _add(dtype, w, sums, count, y):  # type: ignore[no-untyped-def]
    """Writes `y[count] = w + sums`, rounded once."""
    for i in range(0, count, LANES):
        if dtype == DTYPE_F32:
            _store_f32(y + 4 * i, vadd(_load_f32(w + 4 * i), vload(sums + 4 * i)))
        elif dtype == DTYPE_BF16:
            _store_bf16(y + 2 * i, vadd(_load_bf16(w + 2 * i), vload(sums + 4 * i)))
        else:
            _store_f16(y + 2 * i, vadd(_load_f16(w + 2 * i), vload(sums + 4 * i)))


@kernel
def _merge_inputs(model, buffers, entry, k, panels, first, rows, w, y, scratch):  # type: ignore[no-untyped-def]
    """Writes `y = w + scale · Aᵀ B` for `rows` of a module's inputs and all of its outputs."""
    rank, dtype, sums = word(entry, 2), word(entry, 3), scratch + _A_BYTES
    _transpose_a(entry, k, first, rows, scratch)
    for panel in range(panels):
        b = word(entry, 1) + panel * rank * PANEL * itemsize(dtype)
        _call9(buffers.panel_gemm, dtype, scratch, 4 * rank, rows, b, rank, sums, 4 * PANEL, STORE)
        at = (panel * k + first) * PANEL * itemsize(model.dtype)
        _add(model.dtype, w + at, sums, rows * PANEL, y + at)


@entry
def merge(thread, team, models, merged_models, buffer_sets, loras, slot, scratch):  # type: ignore[no-untyped-def]
    """Writes the merged panels of every module of the adapter in `slot`, as member `thread` of `team`."""
    model, merged, buffers, lora = models[0], merged_models[0], buffer_sets[0], loras[0]
    item = np.int64(0)
    for layer in range(model.layers):
        for site in range(7):
            entry = device_entry(lora, slot, layer, site)
            if word(entry, 2) == 0:
                continue
            k, panels = _shape(model, site)
            place = NUM_WEIGHTS * layer + WQ + site
            w, y = word(model.weights, place), word(merged.weights, place)
            for first in range(0, k, _INPUTS):
                item += 1
                if item % team == thread:
                    own = scratch + thread * _SCRATCH_BYTES
                    _merge_inputs(model, buffers, entry, k, panels, first, min(_INPUTS, k - first), w, y, own)
    meet(buffers.barrier, team)


class CpuMergedWeights:
    """A second copy of all linear modules' panels, and the adapter merged into it. For the lane thread only."""

    def __init__(self, spec: ModelSpec, loaded: LoadedModel, threads: int) -> None:
        size = Dtype(int(loaded.model["dtype"][0])).itemsize
        shapes = [spec.site_shape(site) for site in SITES] * spec.layers
        ends = list(accumulate(inputs * align_up(outputs, PANEL) * size for inputs, outputs in shapes))
        self._panels = huge_pages(ends[-1])
        self._panels[:] = 0  # the first write to memory takes several times as long as a merge
        starts = np.array([0, *ends[:-1]], np.int64).reshape(spec.layers, len(SITES))
        self._places = starts + self._panels.ctypes.data
        self._base = loaded
        self._table = loaded.weights.copy()
        self._model = loaded.model.copy()
        self._model["weights"] = self._table.ctypes.data
        self._scratch = aligned_bytes(threads * _SCRATCH_BYTES)
        self._merged_slot: tuple[int, int] | None = None  # slot, and its count of bindings at the merge
        self.merges = 0

    def with_adapter(
        self,
        slot: int,
        adapters: DeviceAdapters,
        buffers: NDArray[np.void],
        lora: NDArray[np.void],
        run: Callable[..., None],
    ) -> NDArray[np.void]:
        """Returns a MODEL record with the adapter in `slot` merged; merges it unless it was the last one merged.

        `run`: that of the thread team; `buffers`, `lora`: records. Slot 0, the base model, changes nothing: a warm-up.
        """
        wanted = slot, int(adapters.bindings[slot])
        if self._merged_slot != wanted:
            self._merged_slot = None
            sites = slice(WQ, WQ + len(SITES))
            self._table[:, sites] = np.where(adapters.adapted(slot), self._places, self._base.weights[:, sites])
            records: tuple[Any, ...] = self._base.model, self._model, buffers, lora
            run(merge, *records, slot, int(self._scratch.ctypes.data))
            self._merged_slot = wanted
            self.merges += 1 if slot != BASE_ADAPTER_SLOT else 0
        return self._model
