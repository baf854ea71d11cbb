"""The loop of a CPU LoRA worker: wait for a hand-off, compute x A B, publish the results.

It runs in a process that `fork_server.py` has forked and pinned to a core; handoff.py defines the shared words.
"""

import numpy as np

from caraserve.core.lora_layout import MAX_RANK, PANEL, aligned_bytes
from caraserve.cpu import handoff
from caraserve.cpu.jit import entry, kernel
from caraserve.cpu.kernels import RANK_GROUP, STORE, lora_expand, lora_shrink
from caraserve.cpu.libc import now_ns, sched_yield, sleep_while, wake
from caraserve.cpu.simd import (
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_F32,
    LANES,
    fence,
    fetch_add,
    load_acquire,
    spin_pause,
    store_i64,
    store_release,
    vload,
    vstore,
    weight_ops,
)
from caraserve.cpu.structs import LORA_ENTRY, word
from caraserve.cpu.tiles import call_by_address
from caraserve.util.units import align_up

_PAUSES = 400  # about 10 µs: the next hand-off of the same layer comes within that on a free core
_YIELDS = 200  # then yields between two looks, because the caller may need the core
_ENTRY_BYTES = LORA_ENTRY.itemsize
_call8, _call9 = call_by_address(8), call_by_address(9)
_REQUEST, _KEEP_AWAKE, _DONE, _PROGRESS, _ASLEEP = (
    np.int64(at) for at in (handoff.REQUEST, handoff.KEEP_AWAKE, handoff.DONE, handoff.PROGRESS, handoff.ASLEEP)
)
_SLICE_BYTES, _SITE_BYTES = np.int64(handoff.SLICE_BYTES), np.int64(handoff.SITE_BYTES)
# Scratch memory: an entry and a clock, the shrunk rows, and one panel of deltas before they are narrowed.
_SHRUNK_AT = align_up(_ENTRY_BYTES + 16, 64)
_PANEL_AT = _SHRUNK_AT + 4 * handoff.BLOCK_TOKENS * MAX_RANK
SCRATCH_BYTES = _PANEL_AT + 4 * handoff.BLOCK_TOKENS * PANEL
_load_bf16, _store_bf16 = weight_ops(DTYPE_BF16)
_load_f16, _store_f16 = weight_ops(DTYPE_F16)


@kernel
def _await_request(block, seen):  # type: ignore[no-untyped-def]
    """Returns when the request word differs from `seen`: spins, then yields, then sleeps."""
    looks = 0
    while load_acquire(block + _REQUEST) == seen:
        looks += 1
        if looks < _PAUSES:
            spin_pause()
        elif looks < _PAUSES + _YIELDS or load_acquire(block + _KEEP_AWAKE) != 0:
            sched_yield()
        else:
            store_release(block + _ASLEEP, 1)
            fence()  # either the request or `keep_awake` is seen here, or the caller sees `asleep`
            if load_acquire(block + _REQUEST) == seen and load_acquire(block + _KEEP_AWAKE) == 0:
                sleep_while(block + _ASLEEP, 1)
            store_release(block + _ASLEEP, 0)


@kernel
def _widen(dtype, x, x_stride, rows, k, y, y_stride):  # type: ignore[no-untyped-def]
    """Converts rows of 2-byte numbers to fp32; rows are readable and writable to a whole vector."""
    for row in range(rows):
        source, target = x + row * x_stride, y + row * y_stride
        for at in range(0, k, LANES):
            value = _load_bf16(source + 2 * at) if dtype == DTYPE_BF16 else _load_f16(source + 2 * at)
            vstore(target + 4 * at, value)


@kernel
def _narrow(dtype, x, rows, y, y_stride):  # type: ignore[no-untyped-def]
    """Converts a panel, fp32 [rows, PANEL], to rows of 2-byte numbers."""
    for row in range(rows):
        for at in range(0, PANEL, LANES):
            value = vload(x + 4 * (PANEL * row + at))
            if dtype == DTYPE_BF16:
                _store_bf16(y + row * y_stride + 2 * at, value)
            else:
                _store_f16(y + row * y_stride + 2 * at, value)


@kernel
def _expand(dtype, expand, entry, shrunk, shrunk_stride, rows, panels, y, y_stride, panel_rows):  # type: ignore[no-untyped-def]
    """Computes the deltas of `panels` panels in a storage dtype."""
    if dtype == DTYPE_F32:
        _call9(expand, entry, shrunk, shrunk_stride, rows, 0, panels, y, y_stride, STORE)
        return
    for panel in range(panels):
        first = panel_rows - 4 * PANEL * panel  # where panel 0 would be
        _call9(expand, entry, shrunk, shrunk_stride, rows, panel, panel + 1, first, 4 * PANEL, STORE)
        _narrow(dtype, panel_rows, rows, y + 2 * PANEL * panel, y_stride)


@kernel
def _compute_site(block, base, site, dtype, x, x_stride, k, rows, y, y_stride, shrink, expand, scratch):  # type: ignore[no-untyped-def]
    """Computes one module for some rows: `y = scale · (x Aᵀ) B`. `dtype`: of y; x is fp32."""
    entry, shrunk = scratch, scratch + _SHRUNK_AT
    store_i64(entry, word(site, 0) + base)
    store_i64(entry + 8, word(site, 1) + base)
    for index in range(2, _ENTRY_BYTES // 8):
        store_i64(entry + 8 * index, word(site, index))
    rank = word(site, 2)
    for row in range(0, rank, RANK_GROUP):
        _call8(shrink, entry, row, x, x_stride, rows, k, shrunk + 4 * row, 4 * rank)
    panels, at = word(site, handoff.SITE_PANELS), y + word(site, handoff.SITE_COLUMN_BYTES)
    _expand(dtype, expand, entry, shrunk, 4 * rank, rows, panels, at, y_stride, scratch + _PANEL_AT)
    store_release(block + _PROGRESS, load_acquire(block + _PROGRESS) + 1)


@kernel
def _compute_slice(block, base, piece, shrink, expand, scratch):  # type: ignore[no-untyped-def]
    rows = word(piece, handoff.SLICE_ROWS)
    x_stride, y_stride = word(piece, handoff.SLICE_X_STRIDE), word(piece, handoff.SLICE_Y_STRIDE)
    dtype, k = word(piece, handoff.SLICE_DTYPE), word(piece, handoff.SLICE_K)
    wide_stride = x_stride if dtype == DTYPE_F32 else 2 * x_stride
    for first in range(0, rows, handoff.BLOCK_TOKENS):
        count = min(rows - first, handoff.BLOCK_TOKENS)
        x = base + word(piece, handoff.SLICE_X) + first * x_stride
        y = base + word(piece, handoff.SLICE_Y) + first * y_stride
        if dtype != DTYPE_F32:
            wide_x = base + word(piece, handoff.SLICE_WIDE_X) + first * wide_stride
            _widen(dtype, x, x_stride, count, k, wide_x, wide_stride)
            x = wide_x
        for index in range(word(piece, handoff.SLICE_SITES)):
            site = piece + handoff.SLICE_HEAD_BYTES + index * _SITE_BYTES
            _compute_site(block, base, site, dtype, x, wide_stride, k, count, y, y_stride, shrink, expand, scratch)


@kernel
def _add_time(base, piece, spent_ns):  # type: ignore[no-untyped-def]
    counter = word(piece, handoff.SLICE_COUNTER)
    if counter != 0:
        fetch_add(base + counter + handoff.COUNTER_SPENT_NS, spent_ns)


@kernel
def _count_down(base, piece):  # type: ignore[no-untyped-def]
    """Counts a finished slice; the last one sets the completion counter's flag to its value."""
    counter = word(piece, handoff.SLICE_COUNTER)
    if counter != 0 and fetch_add(base + counter + handoff.COUNTER_LEFT, -1) == 1:
        store_release(base + counter, load_acquire(base + counter + handoff.COUNTER_VALUE))


@entry
def _work(block, base, seen, shrink, expand, scratch, serves):  # type: ignore[no-untyped-def]
    """Serves the hand-offs after number `seen`. Never returns unless `serves` is 0: then it is only compiled."""
    clock = scratch + _ENTRY_BYTES
    while serves != 0:
        _await_request(block, seen)
        seen = load_acquire(block + _REQUEST)
        started_ns = now_ns(clock)
        store_i64(block + handoff.STARTED_NS, started_ns)
        for index in range(word(block, handoff.COUNT // 8)):
            piece = block + handoff.SLICES + index * _SLICE_BYTES
            _compute_slice(block, base, piece, shrink, expand, scratch)
            ended_ns = now_ns(clock)
            _add_time(base, piece, ended_ns - started_ns)
            started_ns = ended_ns
        for index in range(word(block, handoff.COUNT // 8)):
            # Before `done`: from then on the caller may change the slices.
            _count_down(base, block + handoff.SLICES + index * _SLICE_BYTES)
        store_i64(block + handoff.ENDED_NS, now_ns(clock))
        store_release(block + _DONE, seen)


@entry
def _keep_awake(block, awake):  # type: ignore[no-untyped-def]
    store_release(block + _KEEP_AWAKE, awake)
    fence()  # either `asleep` is seen here, or the worker sees `keep_awake`
    if awake != 0 and load_acquire(block + _ASLEEP) != 0:
        store_release(block + _ASLEEP, 0)
        wake(block + _ASLEEP)


def keep_awake(block: int, awake: bool) -> None:
    """Has the worker of the block at an address stay awake, or lets it sleep again; from any process."""
    _keep_awake(block, int(awake))


def work(block: int, base: int, seen: int) -> None:
    """Serves the block at an address after the hand-off number `seen`. Never returns."""
    _run(block, base, seen, serves=1)


def compile_worker() -> None:
    """Compiles all that a worker runs, or loads it from the cache, so that forks of this process start at once."""
    _run(0, 0, 0, serves=0)


def _run(block: int, base: int, seen: int, serves: int) -> None:
    scratch = aligned_bytes(SCRATCH_BYTES)
    _work(block, base, seen, lora_shrink.address, lora_expand.address, int(scratch.ctypes.data), serves)
