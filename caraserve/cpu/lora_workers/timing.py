"""Times a single hand-off, for machine profiles and `caraserve bench lora`."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.jit import entry
from caraserve.cpu.libc import now_ns
from caraserve.cpu.lora_workers import compute_side
from caraserve.cpu.lora_workers.pool import WorkerPool
from caraserve.cpu.simd import load_i64
from caraserve.cpu.structs import BATCH, address_of, block_at, filled, group_at, layer_at
from caraserve.cpu.tiles import call_by_address

_call6 = call_by_address(6)


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A timed hand-off of the modules that read a layer's first input: from publishing to the last delta, and the
    slowest worker's compute."""

    total_s: float
    compute_s: float


@entry
def _round_trip(models, buffer_sets, loras, batches):  # type: ignore[no-untyped-def]
    """Returns the nanoseconds from publishing to the last delta, or -1 if no worker was free or one failed."""
    model, buffers, lora, batch = models[0], buffer_sets[0], loras[0], batches[0]
    group = group_at(block_at(layer_at(model.layer).block).group_in)
    clock = compute_side.clock(lora, np.int64(0))
    started = now_ns(clock)
    records = address_of(model), address_of(lora), address_of(batch), address_of(group)
    _call6(buffers.hand_off, *records, buffers.normed, 4 * model.hidden_pad)
    slices = load_i64(lora.segment_slices + 8)
    done = slices > 0
    for index in range(slices):
        done = compute_side.await_slice(lora, np.int64(0), lora.slices + 8 * compute_side.PIECE_WORDS * index) and done
    return now_ns(clock) - started if done else np.int64(-1)


def one_segment(slot: int, tokens: int, layers: int) -> tuple[NDArray[np.void], list[NDArray[np.int64]]]:
    """Returns a BATCH record of one prompt whose adapter has not arrived, and the arrays behind it."""
    arrays = {
        "segment_first": np.array([0]),
        "segment_tokens": np.array([tokens]),
        "segment_adapter": np.array([slot]),
        "segment_assist": np.array([1]),
        "sources": np.full(layers, compute_side.WORKERS),
        "waited_ns": np.array([0]),
    }
    unused = {name: 0 for name in BATCH.names or () if name not in arrays}
    sizes = unused | {"tokens": tokens, "rows": 1, "segments": 1, "arriving": 1}
    record = filled(BATCH, **sizes, **{name: int(array.ctypes.data) for name, array in arrays.items()})
    return record, list(arrays.values())


def round_trip(
    model: NDArray[np.void],
    buffers: NDArray[np.void],
    lora: NDArray[np.void],
    batch: NDArray[np.void],
    workers: WorkerPool,
) -> RoundTrip | None:
    """Hands off the batch's one segment and waits. Returns None if no worker was free or one died. No other
    hand-off may run meanwhile."""
    started_ns = time.monotonic_ns()
    total_ns = int(_round_trip(model, buffers, lora, batch))
    spans = [end_ns - start_ns for start_ns, end_ns in workers.last_times_ns() if start_ns >= started_ns]
    return RoundTrip(total_ns / 1e9, max(spans) / 1e9) if total_ns >= 0 and spans else None
