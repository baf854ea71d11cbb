"""Times the LoRA of whole layers on one core, with the kernels and the order of a CPU LoRA worker."""

import time
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import PANEL, HostAdapter, aligned_bytes
from caraserve.cpu.handoff import BLOCK_TOKENS
from caraserve.cpu.jit import entry
from caraserve.cpu.kernels import RANK_GROUP, STORE, lora_expand, lora_shrink
from caraserve.cpu.structs import LORA_ENTRY, word
from caraserve.cpu.tiles import call_by_address
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up, ceil_div

_call8, _call9 = call_by_address(8), call_by_address(9)

_MODULE = np.dtype([("entry", LORA_ENTRY), ("inputs", np.int64), ("panels", np.int64)])
_MODULE_BYTES, _INPUTS, _PANELS = _MODULE.itemsize, LORA_ENTRY.itemsize // 8, LORA_ENTRY.itemsize // 8 + 1


@entry
def _compute(shrink, expand, modules, count, tokens, x, x_stride, shrunk, y, y_stride):  # type: ignore[no-untyped-def]
    """Computes `y = (x Aᵀ) B` for every module in turn, in a worker's blocks of tokens."""
    for index in range(count):
        module = modules + index * _MODULE_BYTES
        rank = word(module, 2)
        for first in range(0, tokens, BLOCK_TOKENS):
            rows, at = min(tokens - first, BLOCK_TOKENS), x + first * x_stride
            for row in range(0, rank, RANK_GROUP):
                _call8(shrink, module, row, at, x_stride, rows, word(module, _INPUTS), shrunk + 4 * row, 4 * rank)
            out = y + first * y_stride
            _call9(expand, module, shrunk, 4 * rank, rows, 0, word(module, _PANELS), out, y_stride, STORE)


class LayerLora:
    """Computes x A B of some modules of an adapter's layers, on the calling thread.

    `x` is [tokens, widest padded input]; `y` is [tokens, widest padded output], overwritten by each module.
    """

    def __init__(self, plan: DecoderPlan, adapter: HostAdapter, targets: Collection[str], tokens: int) -> None:
        spec, layers = adapter.spec, plan.layers
        spans = [span for span in spec.spans if layers[span.layer].linears[span.linear].target in targets]
        sites = [layers[span.layer].sites[span.site] for span in spans]
        shapes = [(site.inputs, site.outputs) for site in sites]
        self._layers, self._tokens = len({span.layer for span in spans}), tokens
        at = int(adapter.data.ctypes.data)
        self._modules = np.zeros(len(spans), _MODULE)
        for module, span, (inputs, outputs) in zip(self._modules, spans, shapes, strict=True):
            module["entry"] = (
                at + span.a_offset,
                at + span.b_offset,
                span.padded_rank,
                spec.dtype.value,
                0,
                span.scale,
            )
            module["inputs"], module["panels"] = inputs, ceil_div(outputs, PANEL)
        self._kept = adapter.data
        widest_x, widest_y = (align_up(max(widths), PANEL) for widths in zip(*shapes, strict=True))
        self.x, self.y = _floats(tokens, widest_x), _floats(tokens, widest_y)
        self._shrunk = _floats(BLOCK_TOKENS, align_up(spec.rank, RANK_GROUP))
        self._strides = 4 * widest_x, 4 * widest_y

    def layer_ms(self, repeats: int) -> float:
        """Computes all layers `repeats` times. Returns the ms of one layer."""
        x, y, shrunk, modules = (int(a.ctypes.data) for a in (self.x, self.y, self._shrunk, self._modules))
        kernels, count = (lora_shrink.address, lora_expand.address), len(self._modules)
        started_s = time.perf_counter()
        for _ in range(repeats):
            _compute(*kernels, modules, count, self._tokens, x, self._strides[0], shrunk, y, self._strides[1])
        return 1000 * (time.perf_counter() - started_s) / repeats / self._layers


def _floats(rows: int, width: int) -> NDArray[np.float32]:
    array = aligned_bytes(4 * rows * width).view(np.float32).reshape(rows, width)
    array[:] = 0.5
    return array
