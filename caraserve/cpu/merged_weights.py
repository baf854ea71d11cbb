"""A copy of the base weights with one adapter merged into it, for loading mode `merged`, after dLoRA.

Only panels of adapted modules are written; all others are the base's. Unmerging means using the base's panels again,
which is exact and free, while dLoRA subtracts what it added: another pass over the weights, whose rounding errors
remain. An adapter that is merged again before any other is merged finds its panels unchanged. The price is the memory
of a second copy of the base's linear modules.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import BASE_ADAPTER_SLOT
from caraserve.core.lora_layout import MAX_RANK, PANEL, aligned_bytes
from caraserve.cpu.adapters import DeviceAdapters
from caraserve.cpu.barrier import meet
from caraserve.cpu.bfloat16_pairs import store_pairs
from caraserve.cpu.forward import device_entry
from caraserve.cpu.jit import entry, kernel
from caraserve.cpu.kernels import STORE, itemsize, load_weight
from caraserve.cpu.linear import kernels_of
from caraserve.cpu.linear.base import PIECE_INPUTS
from caraserve.cpu.linear.pairs import prepared_bytes
from caraserve.cpu.linear.plain import panel_inputs, preparation
from caraserve.cpu.simd import (
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_F32,
    LANES,
    load_f32,
    load_u16,
    store_f32,
    store_u16,
    vadd,
    vload,
    vsplat,
    vstore,
    weight_ops,
)
from caraserve.cpu.structs import ENTRY_SCALE, input_at, site_address, site_at, word
from caraserve.cpu.tiles import call_by_address, stack_bytes
from caraserve.cpu.weight_memory import huge_pages
from caraserve.cpu.weights import LoadedModel
from caraserve.model.formats.plain import PLAIN

_INPUTS = np.int64(PIECE_INPUTS)  # of one work item: its parts of A and of a panel stay in the L2 cache
_A_BYTES, _SUM_BYTES = 4 * PIECE_INPUTS * MAX_RANK, 4 * PIECE_INPUTS * PANEL
_SCRATCH_BYTES = _A_BYTES + 2 * _SUM_BYTES
_numbers = stack_bytes(2 * PANEL)
_call5, _call9 = call_by_address(5), call_by_address(9)
_, _store_bf16 = weight_ops(DTYPE_BF16)
_, _store_f16 = weight_ops(DTYPE_F16)


@kernel
def _transpose_a(entry, site, first, rows, x):  # type: ignore[no-untyped-def]
    """Writes `x[i, j] = scale · A[j, input]` for i < rows, where `input` is that of column first + i."""
    rank, dtype, scale = word(entry, 2), word(entry, 3), load_f32(entry + ENTRY_SCALE)
    size = itemsize(dtype)
    stride = (site.inputs + LANES - 1) // LANES * LANES * size
    for row in range(rank):
        at = word(entry, 0) + row * stride
        for i in range(rows):
            value = load_weight(at + input_at(site, first + i) * size, dtype)
            store_f32(x + 4 * (i * rank + row), scale * value)


@kernel
def _add(dtype, weights, sums, y):  # type: ignore[no-untyped-def]
    """Writes `y[64] = weights + sums` in a storage dtype, rounded once; both are fp32."""
    for i in range(0, PANEL, LANES):
        value = vadd(vload(weights + 4 * i), vload(sums + 4 * i))
        if dtype == DTYPE_F32:
            vstore(y + 4 * i, value)
        elif dtype == DTYPE_BF16:
            _store_bf16(y + 2 * i, value)
        else:
            _store_f16(y + 2 * i, value)


@kernel
def _add_pairs(weights, sums, rows, y):  # type: ignore[no-untyped-def]
    """Writes `y = weights + sums` of consecutive inputs as pairs of bfloat16; both are fp32 [rows, 64]."""
    for first in range(0, rows, 2):
        for lane in range(0, 4 * PANEL, 4 * LANES):
            at, second = 4 * PANEL * first + lane, vsplat(np.float32(0.0))
            if first + 1 < rows:
                second = vadd(vload(weights + at + 4 * PANEL), vload(sums + at + 4 * PANEL))
            store_pairs(y + 4 * PANEL * (first // 2) + lane, vadd(vload(weights + at), vload(sums + at)), second)


@kernel
def _add_to_pairs(weights, sums, index, y):  # type: ignore[no-untyped-def]
    """Writes `y = weights + sums` of one input, the first (0) or second (1) of pairs; both are fp32 [64]."""
    numbers = _numbers()
    _add(DTYPE_BF16, weights, sums, numbers)
    for lane in range(PANEL):
        store_u16(y + 4 * lane + 2 * (1 - index), load_u16(numbers + 2 * lane))


@kernel
def _merge_inputs(buffers, entry, base, merged, first, rows, scratch):  # type: ignore[no-untyped-def]
    """Writes the merged weights of the inputs of `rows` columns and all outputs of a site: base + scale · Aᵀ B.

    `base`, `merged`: addresses of SITE records; the merged weights are plain numbers."""
    site, target = site_at(base), site_at(merged)
    rank, sums, weights = word(entry, 2), scratch + _A_BYTES, scratch + _A_BYTES + _SUM_BYTES
    padded = site.inputs + (site.inputs % 2 if target.dtype == DTYPE_BF16 else 0)  # inputs of a panel
    _transpose_a(entry, site, first, rows, scratch)
    for panel in range(site.panels):
        at = sums - 4 * PANEL * panel  # where panel 0 would be
        _call9(buffers.lora_expand, entry, scratch, 4 * rank, rows, panel, panel + 1, at, 4 * PANEL, STORE)
        _call5(site.expand, base, panel, first, rows, weights)
        y = target.weight + panel * padded * PANEL * itemsize(target.dtype)
        if target.dtype == DTYPE_BF16 and site.order == 0:
            _add_pairs(weights, sums, rows, y + 2 * PANEL * first)
            continue
        for row in range(rows):
            place, number = 4 * PANEL * row, input_at(site, first + row)
            if target.dtype == DTYPE_BF16:
                _add_to_pairs(weights + place, sums + place, number % 2, y + 4 * PANEL * (number // 2))
            else:
                _add(target.dtype, weights + place, sums + place, y + number * PANEL * itemsize(target.dtype))


@entry
def merge(thread, team, models, merged_models, buffer_sets, loras, slot, scratch):  # type: ignore[no-untyped-def]
    """Writes the merged panels of every site of the adapter in `slot`, as member `thread` of `team`."""
    model, merged, buffers, lora = models[0], merged_models[0], buffer_sets[0], loras[0]
    item = np.int64(0)
    for layer in range(model.layers):
        for index in range(model.most_sites):
            entry = device_entry(lora, slot, layer, index)
            if word(entry, 2) == 0:
                continue
            base, target = site_address(model, layer, index), site_address(merged, layer, index)
            inputs = site_at(base).inputs
            for first in range(0, inputs, _INPUTS):
                item += 1
                if item % team == thread:
                    own = scratch + thread * _SCRATCH_BYTES
                    _merge_inputs(buffers, entry, base, target, first, min(_INPUTS, inputs - first), own)
    meet(buffers.barrier, team)


class CpuMergedWeights:
    """A second copy of all linear modules' panels, and the adapter merged into it. For the lane thread only.

    The copy has plain numbers in the model's dtype, whatever the format of the base's weights."""

    def __init__(self, loaded: LoadedModel, threads: int) -> None:
        base, plain, dtype = loaded.sites, kernels_of(PLAIN), loaded.dtype
        inputs = np.vectorize(lambda count: panel_inputs(dtype, count))(base["inputs"])
        sizes = inputs * base["panels"] * PANEL * dtype.itemsize
        ends = np.cumsum(sizes.reshape(-1))
        self._panels = huge_pages(int(ends[-1]))
        self._panels[:] = 0  # the first write to memory takes several times as long as a merge
        self._base, self._sites, self._own = loaded, base.copy(), base.copy()
        self._own["weight"] = self._panels.ctypes.data + ends.reshape(sizes.shape) - sizes
        self._own["product"], self._own["expand"], self._own["dtype"] = plain.product, plain.expand, dtype.value
        self._own["order"] = 0
        for own in self._own.reshape(-1):
            fields = preparation(dtype, int(own["inputs"]))
            if own["prepare"] != fields["prepare"]:  # beside what modules of the base's format read
                own["prepared_offset"] = loaded.prepared_bytes - prepared_bytes(loaded.widest_input)
            own["prepare"], own["prepared_bytes"] = fields["prepare"], fields["prepared_bytes"]
        self._model = loaded.model.copy()
        self._model["site"] = self._sites.ctypes.data
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
            np.copyto(self._sites, self._base.sites)
            np.copyto(self._sites, self._own, where=adapters.adapted(slot))
            records: tuple[Any, ...] = self._base.model, self._model, buffers, lora
            run(merge, *records, slot, int(self._scratch.ctypes.data))
            self._merged_slot = wanted
            self.merges += 1 if slot != BASE_ADAPTER_SLOT else 0
        return self._model
