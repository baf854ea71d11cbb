"""The kernels of gated delta nets: a causal convolution over time, and a recurrence with a matrix for each value head.

Both continue a state that belongs to the request's slot (`CACHE.states`): the last inputs of the convolution, and the
matrices. A row at position 0 starts from zeros, whatever the slot held before, so no slot is ever cleared. A token's
arithmetic depends on the state before it alone, so its result is the same in any chunk, batch or team.

The matrices of a head lie as blocks of sixteen value columns, `[value width / 16, key width, 16]`: a block of 128 keys
takes 8 KiB, and stays in the L1 cache for all tokens of a piece.
"""

import numpy as np

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.jit import compiled_separately, kernel
from caraserve.cpu.layers import copy_vector, sigmoid
from caraserve.cpu.simd import (
    LANES,
    fetch_add,
    load_f32,
    store_f32,
    vadd,
    vfma,
    vload,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum,
)
from caraserve.cpu.structs import batch_at, buffers_at, cache_at, delta_net_at, norm_at, word
from caraserve.cpu.tiles import call_by_address
from caraserve.util.units import align_up

_PIECE_TOKENS = 16  # of q, k and v in a thread's scratch: 24 KiB at widths of 128
_VECTOR_BYTES = 4 * LANES
_LENGTH_EPS = np.float32(1e-6)  # added to the squared lengths of q and k
_LARGE_STEP = 30.0  # from here on ln(1 + e^x) is x
_call4 = call_by_address(4)


def scratch_bytes(key_width: int, value_width: int, kernel_size: int) -> int:
    """Returns the bytes of scratch of a thread: q, k, v of a piece and one row of z, or inputs of the convolution."""
    key, value = align_up(key_width, LANES), align_up(value_width, LANES)
    return max(4 * (_PIECE_TOKENS * (2 * key + value) + value), _VECTOR_BYTES * (kernel_size - 1))


# --- the convolution ---


@kernel
def _convolve_lanes(body, x, row_bytes, tokens, weights, kept, before):  # type: ignore[no-untyped-def]
    """Replaces sixteen channels of a request's rows, at x, by silu of their convolution, from the last token to the
    first, so that inputs are read before they are replaced. `kept`: where the inputs before x are, and where those
    before the next tokens are left. `before`: a copy of the former."""
    past, kept_bytes = body.kernel - 1, 4 * PANEL * body.channel_panels
    for tap in range(past):  # the state after these tokens, of inputs that are in x or were kept
        source = tokens - past + tap
        value = vload(x + source * row_bytes) if source >= 0 else vload(before + _VECTOR_BYTES * (past + source))
        vstore(kept + kept_bytes * tap, value)
    for token in range(tokens - 1, -1, -1):
        total = vsplat(np.float32(0.0))
        for tap in range(past + 1):
            source = token - past + tap
            value = vload(x + source * row_bytes) if source >= 0 else vload(before + _VECTOR_BYTES * (past + source))
            total = vfma(value, vload(weights + kept_bytes * tap), total)
        vstore(x + token * row_bytes, vmul(total, sigmoid(total)))


@compiled_separately(8)
def convolve(thread, team, buffers_address, cache_address, batch_address, body_address, panels, row_bytes):  # type: ignore[no-untyped-def]
    """Convolves q, k and v in the panels of the group, `panels` in all, that this thread has projected."""
    buffers, cache = buffers_at(buffers_address), cache_at(cache_address)
    batch, body = batch_at(batch_address), delta_net_at(body_address)
    before, past = buffers.scratch + thread * buffers.scratch_bytes, body.kernel - 1
    end = min((thread + 1) * panels // team, body.channel_panels)
    for panel in range(thread * panels // team, end):
        for row in range(batch.rows):
            first, tokens = word(batch.row_first, row), word(batch.row_first, row + 1) - word(batch.row_first, row)
            state = cache.states + cache.state_bytes * word(batch.slot, first) + body.inputs_offset
            for lane in range(4 * PANEL * panel, 4 * PANEL * (panel + 1), _VECTOR_BYTES):
                for tap in range(past):
                    value = vsplat(np.float32(0.0))
                    if word(batch.position, first) != 0:
                        value = vload(state + 4 * PANEL * body.channel_panels * tap + lane)
                    vstore(before + _VECTOR_BYTES * tap, value)
                x = buffers.projected + first * row_bytes + lane
                _convolve_lanes(body, x, row_bytes, tokens, body.convolution + lane, state + lane, before)


# --- the recurrence ---


@kernel
def _copy_unit(x, width, padded, factor, y):  # type: ignore[no-untyped-def]
    """Writes x[width], divided by its length and times `factor`, to y[padded], whose padding is zero."""
    copy_vector(x, width, y)
    total = vsplat(np.float32(0.0))
    for lane in range(0, 4 * padded, _VECTOR_BYTES):
        value = vload(y + lane)
        total = vfma(value, value, total)
    by = vsplat(factor / np.sqrt(vsum(total) + _LENGTH_EPS))
    for lane in range(0, 4 * padded, _VECTOR_BYTES):
        vstore(y + lane, vmul(vload(y + lane), by))


@kernel
def _decay(body, head, step):  # type: ignore[no-untyped-def]
    """Returns e^(-e^A · ln(1 + e^(step + bias))) of a value head, computed in fp64."""
    x = np.float64(step + load_f32(body.step_bias + 4 * head))
    if x < _LARGE_STEP:
        x = np.log(1.0 + np.exp(x))
    return np.float32(np.exp(x * np.float64(load_f32(body.negative_rate + 4 * head))))


@kernel
def _step(block, keys, q, k, v, decay, rate):  # type: ignore[no-untyped-def]
    """Advances sixteen value columns of a matrix S by one token: S = decay · S, then S += k eᵀ with
    e = rate · (v - Sᵀk). Writes Sᵀq in place of v. Four sums each, because one would wait for its own additions."""
    zero = vsplat(np.float32(0.0))
    a, b, c, d = zero, zero, zero, zero
    for key in range(0, keys, 4):
        at = block + _VECTOR_BYTES * key
        a = vfma(vload(at), vsplat(load_f32(k + 4 * key)), a)
        b = vfma(vload(at + _VECTOR_BYTES), vsplat(load_f32(k + 4 * key + 4)), b)
        c = vfma(vload(at + 2 * _VECTOR_BYTES), vsplat(load_f32(k + 4 * key + 8)), c)
        d = vfma(vload(at + 3 * _VECTOR_BYTES), vsplat(load_f32(k + 4 * key + 12)), d)
    by = vsplat(decay)
    error = vmul(vsplat(rate), vsub(vload(v), vmul(by, vadd(vadd(a, b), vadd(c, d)))))
    a, b, c, d = zero, zero, zero, zero
    for key in range(0, keys, 4):
        at = block + _VECTOR_BYTES * key
        value = vfma(vsplat(load_f32(k + 4 * key)), error, vmul(by, vload(at)))
        vstore(at, value)
        a = vfma(value, vsplat(load_f32(q + 4 * key)), a)
        value = vfma(vsplat(load_f32(k + 4 * key + 4)), error, vmul(by, vload(at + _VECTOR_BYTES)))
        vstore(at + _VECTOR_BYTES, value)
        b = vfma(value, vsplat(load_f32(q + 4 * key + 4)), b)
        value = vfma(vsplat(load_f32(k + 4 * key + 8)), error, vmul(by, vload(at + 2 * _VECTOR_BYTES)))
        vstore(at + 2 * _VECTOR_BYTES, value)
        c = vfma(value, vsplat(load_f32(q + 4 * key + 8)), c)
        value = vfma(vsplat(load_f32(k + 4 * key + 12)), error, vmul(by, vload(at + 3 * _VECTOR_BYTES)))
        vstore(at + 3 * _VECTOR_BYTES, value)
        d = vfma(value, vsplat(load_f32(q + 4 * key + 12)), d)
    vstore(v, vadd(vadd(a, b), vadd(c, d)))


@kernel
def _clear(at, num_bytes):  # type: ignore[no-untyped-def]
    for lane in range(0, num_bytes, _VECTOR_BYTES):
        vstore(at + lane, vsplat(np.float32(0.0)))


@kernel
def _gate(buffers, body, out, z, copy):  # type: ignore[no-untyped-def]
    """Normalises a head's outputs, and writes them times silu(z) in place of z. `copy`: room for z, padded."""
    width = body.value_width
    _call4(buffers.normalise, body.norm, out, out, 0)
    copy_vector(z, width, copy)
    for lane in range(0, 4 * norm_at(body.norm).padded, _VECTOR_BYTES):
        gate = vload(copy + lane)
        vstore(copy + lane, vmul(vload(out + lane), vmul(gate, sigmoid(gate))))
    copy_vector(copy, width, z)


@kernel
def _recur_item(thread, buffers, cache, batch, body, row_bytes, row, head):  # type: ignore[no-untyped-def]
    """Computes one value head of one row of the batch; its results replace z."""
    first, end = word(batch.row_first, row), word(batch.row_first, row + 1)
    keys, values = body.key_padded, norm_at(body.norm).padded
    q = buffers.scratch + thread * buffers.scratch_bytes
    k = q + 4 * _PIECE_TOKENS * keys
    v = k + 4 * _PIECE_TOKENS * keys
    z_copy = v + 4 * _PIECE_TOKENS * values
    _clear(q, z_copy + 4 * values - q)
    block_bytes = _VECTOR_BYTES * keys
    matrix_bytes = block_bytes * (values // LANES)
    matrix = cache.states + cache.state_bytes * word(batch.slot, first) + body.matrices_offset + head * matrix_bytes
    if word(batch.position, first) == 0:
        _clear(matrix, matrix_bytes)
    key_offset = 4 * body.key_width * (head // (body.value_heads // body.key_heads))
    value_offset = 4 * body.value_width * head
    for start in range(first, end, _PIECE_TOKENS):
        count = min(_PIECE_TOKENS, end - start)
        for token in range(count):
            at = buffers.projected + (start + token) * row_bytes
            _copy_unit(at + body.q + key_offset, body.key_width, keys, body.scale, q + 4 * keys * token)
            _copy_unit(at + body.k + key_offset, body.key_width, keys, np.float32(1.0), k + 4 * keys * token)
            copy_vector(at + body.v + value_offset, body.value_width, v + 4 * values * token)
        for token in range(count):
            at = buffers.projected + (start + token) * row_bytes + 4 * head
            decay = _decay(body, head, load_f32(at + body.a))
            rate = np.float32(1.0 / (1.0 + np.exp(-np.float64(load_f32(at + body.b)))))
            # in the rows, whose a and b no other item reads
            store_f32(at + body.a, decay)
            store_f32(at + body.b, rate)
        for column in range(values // LANES):
            for token in range(count):
                at = buffers.projected + (start + token) * row_bytes + 4 * head
                _step(
                    matrix + block_bytes * column, keys, q + 4 * keys * token, k + 4 * keys * token,
                    v + 4 * values * token + _VECTOR_BYTES * column, load_f32(at + body.a), load_f32(at + body.b),
                )  # fmt: skip
        for token in range(count):
            at = buffers.projected + (start + token) * row_bytes
            _gate(buffers, body, v + 4 * values * token, at + body.z + value_offset, z_copy)


@compiled_separately(8)
def recur(thread, team, buffers_address, cache_address, batch_address, body_address, row_bytes, layer):  # type: ignore[no-untyped-def]
    """Computes the recurrence. Threads claim items (row, value head), because rows differ in their tokens."""
    buffers, cache = buffers_at(buffers_address), cache_at(cache_address)
    batch, body = batch_at(batch_address), delta_net_at(body_address)
    counter = buffers.counters + 8 * layer
    taken = fetch_add(counter, 1)
    while taken < batch.rows * body.value_heads:
        row, head = taken // body.value_heads, taken % body.value_heads
        _recur_item(thread, buffers, cache, batch, body, row_bytes, row, head)
        taken = fetch_add(counter, 1)
