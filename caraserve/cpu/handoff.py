"""What whoever runs a decoder layer and the CPU LoRA workers agree on: the words they share, and who writes them.

Toppings §4.2. A hand-over asks workers for `x A B` of slices of one layer's tokens, for all modules that read
the same x. There is a block of words for each worker, and each word has one writer:

    request      caller      number of the last hand-over published; release, after the slices
    vigil        caller      not 0: the worker must not sleep, for a device that publishes cannot wake it
    done         worker      number of the last hand-over computed; release, after the deltas
    progress     worker      counts pieces of work, so that slow and stuck can be told apart
    asleep       both        1: the worker sleeps on this word; who publishes sets 0 and wakes it
    incarnation  supervisor  0: nobody is there; otherwise the number of this worker's present life
    started_ns, ended_ns     worker, monotonic clock, of the last hand-over

followed by the number of slices and the slices. A slice may name a bell, three words outside the blocks that are the
caller's until it publishes: each worker that is done takes one off `left`, and who takes the last sets the bell to
`value`. That is a word that a device's stream can wait for. Positions are offsets into the shared region.

The caller hands over to a worker only if it is alive and has done what it was asked before, and a worker writes deltas
only into an area of its own; so one that was given up (killed, stopped, or merely late) can never write where another
result is expected.

A caller waits while the worker's progress moves; when it stops, or the incarnation is no longer the one that was asked,
the caller computes the slice itself, in the same order of sums: the bits are the same whoever did the work.

An adapter's bytes are never freed while a hand-over for it is awaited. A worker that was given up may still read them
later; what it makes of them is awaited by nobody.
"""

from caraserve.cpu.structs import LORA_ENTRY

_LINE = 128  # two cache lines: the neighbour is prefetched
REQUEST, DONE, PROGRESS, ASLEEP, INCARNATION = (_LINE * line for line in range(5))
STARTED_NS, ENDED_NS = DONE + 8, DONE + 16  # on the line of their writer
VIGIL = REQUEST + 8
COUNT = _LINE * 5  # slices in the hand-over
SLICES = _LINE * 6

# A slice: int64 words, then up to three modules.
SLICE_X, SLICE_X_STRIDE, SLICE_K, SLICE_ROWS, SLICE_Y, SLICE_Y_STRIDE, SLICE_SITES, SLICE_BELL = range(8)
SLICE_HEAD_BYTES = 64
BELL_LEFT, BELL_VALUE = 8, 16  # from the bell's first word; SLICE_BELL 0: none
# A module: a LORA_ENTRY whose A and B are offsets, then its panels and where its first column lies in a row of y.
SITE_PANELS, SITE_COLUMN_BYTES = LORA_ENTRY.itemsize // 8, LORA_ENTRY.itemsize // 8 + 1
SITE_BYTES = LORA_ENTRY.itemsize + 16
MOST_SITES = 3
SLICE_BYTES = SLICE_HEAD_BYTES + MOST_SITES * SITE_BYTES

BLOCK_TOKENS = 36  # rows that a worker computes between two counts of progress: x stays in its L2 cache


def block_bytes(max_slices: int) -> int:
    """Bytes of one worker's block."""
    return SLICES + max_slices * SLICE_BYTES


assert LORA_ENTRY.itemsize == 40, "the layout of a module is written down in words of eight bytes"
