"""The contract of a hand-off between a decoder layer and the CPU LoRA workers (Toppings §4.2): words in shared memory.

A hand-off asks workers for `x A B` of slices of one layer's tokens, for all modules that read the same x. Each worker
has a block of int64 words, and each word has one writer:

    request      caller      number of the last hand-off published; release, after the slices
    keep_awake   caller      not 0: the worker must not sleep, because a device that publishes cannot wake it
    done         worker      number of the last hand-off computed; release, after the deltas
    progress     worker      counts pieces of work: tells a slow worker from a stuck one
    asleep       both        1: the worker sleeps on this word; a caller that publishes sets 0 and wakes it
    incarnation  supervisor  0: no process; otherwise a number that no earlier process of this worker had
    started_ns, ended_ns     worker, monotonic clock, of the last hand-off

followed by the number of slices and the slices. A slice may name a completion counter, four words outside the blocks
that belong to the caller until it publishes: `flag`, `left`, `value`, `spent_ns`. Each worker that finishes a slice
adds its time to `spent_ns` and takes one off `left`, and the one that takes the last sets `flag` to `value`, which a
device's stream can wait for. Positions are offsets into the shared region.

x and deltas have the slice's storage dtype. If that is not fp32, the worker first writes its rows of x in fp32 to
`wide_x`, with as many numbers from row to row, and computes from there.

The caller hands off to a worker only if it is alive and has finished its previous hand-off, and a worker writes deltas
only into an area of its own. So a worker that was given up (killed, stopped or late) never writes where another result
is expected. It may only add its time to `spent_ns` late.

A caller waits while the worker's progress moves. When progress stops, or the incarnation has changed, the caller
computes the slice itself in the same order of sums, so the bits are the same.

An adapter's bytes are never freed while a hand-off for it is awaited. A worker that was given up may still read them
later, but its result is not used.
"""

from caraserve.cpu.structs import LORA_ENTRY

_LINE = 128  # two cache lines: the CPU prefetches the neighbour
REQUEST, DONE, PROGRESS, ASLEEP, INCARNATION = (_LINE * line for line in range(5))
STARTED_NS, ENDED_NS = DONE + 8, DONE + 16  # on the line of their writer
KEEP_AWAKE = REQUEST + 8
COUNT = _LINE * 5  # slices in the hand-off
SLICES = _LINE * 6

# A slice: int64 words, then up to MOST_SITES modules.
SLICE_X, SLICE_X_STRIDE, SLICE_K, SLICE_ROWS, SLICE_Y, SLICE_Y_STRIDE, SLICE_SITES, SLICE_COUNTER = range(8)
SLICE_DTYPE, SLICE_WIDE_X = 8, 9
SLICE_HEAD_BYTES = 80
COUNTER_LEFT, COUNTER_VALUE, COUNTER_SPENT_NS = 8, 16, 24  # offsets from the first word; SLICE_COUNTER 0: none
COUNTER_WORDS = 4
# A module: a LORA_ENTRY whose A and B are offsets, then its panels and where its first column lies in a row of y.
SITE_PANELS, SITE_COLUMN_BYTES = LORA_ENTRY.itemsize // 8, LORA_ENTRY.itemsize // 8 + 1
SITE_BYTES = LORA_ENTRY.itemsize + 16
MOST_SITES = 6  # that read the same rows: q, k, v, z, a, b of a delta net
SLICE_BYTES = SLICE_HEAD_BYTES + MOST_SITES * SITE_BYTES

BLOCK_TOKENS = 36  # rows that a worker computes between two counts of progress: x stays in its L2 cache


def block_bytes(max_slices: int) -> int:
    """Bytes of one worker's block."""
    return SLICES + max_slices * SLICE_BYTES


assert LORA_ENTRY.itemsize == 48, "the layout of a module is written down in words of eight bytes"
