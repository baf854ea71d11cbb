"""Grouped codes: kernels made for each kind of codes, which most quantised formats share.

One row is multiplied by weights that are decoded in registers; for more, `expanding.py` multiplies by pieces of a panel
that are decoded into the L1 cache. Weights and the order of sums are the same, those of plain fp32 weights.
"""

import hashlib
from functools import cache
from typing import Any

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately, kernel, made_for, unset
from caraserve.cpu.linear.base import K_BLOCK, WeightKernels
from caraserve.cpu.linear.expanding import gather, product, row_by_pieces
from caraserve.cpu.linear.grouped_decoding import Decoder
from caraserve.cpu.linear.grouped_layout import pack
from caraserve.cpu.linear.grouped_tiles import constants_bytes, constants_tile, row_tile, weights_tile
from caraserve.cpu.simd import LANES, load_f32, vadd, vfma, vload, vsplat, vstore
from caraserve.cpu.structs import site_at
from caraserve.cpu.tiles import call_by_address, stack_bytes
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Matrix
from caraserve.model.formats.grouped import SUPER_GROUP, GroupedCodes
from caraserve.util.units import ceil_div

_SUPER = np.int64(SUPER_GROUP)
_K_BLOCK = np.int64(K_BLOCK)
_COMPILED: list[Any] = []  # keeps functions alive of which others have the address
_call5 = call_by_address(5)
_sums, _rest = stack_bytes(4 * PANEL), stack_bytes(4 * PANEL * 32)  # 32: most inputs of a chunk


# Names that `made_for` replaces for each kind of codes: tiles, and sizes in bytes as in `Layout`.
_constants = _row = _weights = _held = _group_bytes = unset
_DIVISORS = _ABOVE = _SCALES = _CHUNK = _INPUTS = np.int64(0)


def _bytes_of_group(group):  # type: ignore[no-untyped-def]
    """Returns the bytes of a group that is not the last."""
    return _SCALES + group // _INPUTS * _CHUNK


def _expand(site_address, panel, first, count, y):  # type: ignore[no-untyped-def]
    """Writes the weights of some columns of a panel, fp32 [count, 64]. `first`: the start of a chunk."""
    site, held, rest = site_at(site_address), _held(), _rest()
    group, start, position, end = site.group, site.weight + panel * site.panel_bytes, first, first + count
    while position < end:
        index = position // group
        if _ABOVE != 0:
            above = start + _DIVISORS + position // _SUPER * (_ABOVE + _SUPER // group * _group_bytes(group))
            at = above + _ABOVE + position % _SUPER // group * _group_bytes(group)
        else:
            above, at = start, start + _DIVISORS + index * _group_bytes(group)
        stop = min((index + 1) * group, end)
        _constants(start, above, at, held)
        codes = at + _SCALES + (position - index * group) // _INPUTS * _CHUNK
        chunks = (stop - position) // _INPUTS
        _weights(codes, held, chunks, y)
        y += 4 * PANEL * chunks * _INPUTS
        position += chunks * _INPUTS
        if position < stop:
            _weights(codes + chunks * _CHUNK, held, 1, rest)
            for lane in range(0, 4 * PANEL * (stop - position), 4 * LANES):
                vstore(y + lane, vload(rest + lane))
            position = stop


@kernel
def _add_rest(x, count, weights, sums):  # type: ignore[no-untyped-def]
    """Computes `sums[64] += x[count] @ weights[count, 64]`."""
    for index in range(count):
        value = vsplat(load_f32(x + 4 * index))
        for lane in range(0, 4 * PANEL, 4 * LANES):
            vstore(sums + lane, vfma(value, vload(weights + 4 * PANEL * index + lane), vload(sums + lane)))


def _one_row(site_address, x, first_panel, end_panel, y, accumulate):  # type: ignore[no-untyped-def]
    """Computes `y[64 · panel :] (+)= x[inputs] @ w[inputs, 64]` for some panels."""
    site, rest, sums = site_at(site_address), _rest(), _sums()
    inputs, group, zero = site.inputs, site.group, vsplat(np.float32(0.0))
    for panel in range(first_panel, end_panel):
        start = site.weight + panel * site.panel_bytes
        above, scales, codes = start, start, start + _DIVISORS
        position = group_end = np.int64(0)
        for block in range(0, inputs, _K_BLOCK):
            block_end = min(block + _K_BLOCK, inputs)
            for lane in range(0, 4 * PANEL, 4 * LANES):
                vstore(sums + lane, zero)
            while position < block_end:
                if position == group_end:
                    if _ABOVE != 0 and position % _SUPER == 0:
                        above = codes
                        codes += _ABOVE
                    scales = codes
                    codes += _SCALES
                    group_end = min(position + group, inputs)
                stop = min(group_end, block_end)
                chunks = (stop - position) // _INPUTS
                _row(start, above, scales, codes, x + 4 * position, chunks, sums)
                codes += chunks * _CHUNK
                position += chunks * _INPUTS
                if position < stop:
                    _call5(site.expand, site_address, panel, position, stop - position, rest)
                    _add_rest(x + 4 * position, stop - position, rest, sums)
                    codes += _CHUNK
                    position = stop
            for lane in range(0, 4 * PANEL, 4 * LANES):
                at = y + 4 * PANEL * panel + lane
                total = vload(sums + lane)
                vstore(at, vadd(vload(at), total) if accumulate != 0 or block > 0 else total)


def name_of(kind: GroupedCodes) -> str:
    """Returns a name for a kind of codes, the same in each process."""
    return hashlib.sha256(repr(kind).encode()).hexdigest()[:12]


def globals_of(kind: GroupedCodes) -> tuple[Decoder, dict[str, Any]]:
    """Returns what the functions of a kind of codes find in the place of the names above."""
    decoder = Decoder(kind)
    layout = decoder.layout
    return decoder, {
        "_constants": constants_tile(decoder),
        "_row": row_tile(decoder),
        "_weights": weights_tile(decoder),
        "_held": stack_bytes(constants_bytes(decoder)),
        "_DIVISORS": np.int64(layout.divisors),
        "_ABOVE": np.int64(layout.above),
        "_SCALES": np.int64(layout.scales + layout.offsets),
        "_CHUNK": np.int64(layout.chunk),
        "_INPUTS": np.int64(layout.inputs),
    }


def _pack(kind: GroupedCodes, decoder: Decoder, one_row: int, matrix: Matrix, memory: WeightMemory) -> dict[str, int]:
    """Packs a matrix. Returns the fields of its SITE record."""
    (outputs, inputs), layout = matrix.arrays["codes"].shape, decoder.layout
    if matrix.group < inputs and matrix.group % layout.inputs:
        raise ModelLoadError(
            f"weights have groups of {matrix.group} inputs; the CPU computes multiples of {layout.inputs} for codes of "
            f"{layout.bits} bits"
        )
    panel_bytes = layout.panel_bytes(inputs, matrix.group)
    panels = memory.zeros(ceil_div(outputs, PANEL) * panel_bytes).reshape(-1, panel_bytes)
    pack(kind, matrix, decoder.renumbered, panels)
    fields = {
        "weight": int(panels.ctypes.data),
        "group": matrix.group,
        "panel_bytes": panel_bytes,
        "one_row": one_row,
    }
    if matrix.order is None:
        return fields
    order = memory.order(matrix.order)
    return fields | {"order": order, "prepare": gather.address, "prepared_bytes": 4 * inputs}


@cache
def kernels_of_codes(kind: GroupedCodes) -> WeightKernels:
    """Returns the kernels of a kind of codes; compiles them, or loads them from the cache, at their first use."""
    decoder, values = globals_of(kind)
    name = name_of(kind)
    values["_group_bytes"] = kernel(made_for(name, **values)(_bytes_of_group))
    expand = compiled_separately(5)(made_for(name, **values)(_expand))
    one_row = compiled_separately(6)(made_for(name, **values)(_one_row))
    _COMPILED.extend((expand, one_row))

    def pack_matrix(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
        return _pack(kind, decoder, one_row.address, matrix, memory)

    return WeightKernels(pack_matrix, product.address, expand.address, row_by_pieces.address)
