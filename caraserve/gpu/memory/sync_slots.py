"""The words by which device, CPU workers and a watchdog synchronise an assisted prefill; assist/handshake.py says how.

They are in host memory, each writer's on a cache line of its own.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.handoff import COUNTER_SPENT_NS
from caraserve.cpu.memory_order import keep_order
from caraserve.cpu.shared_memory import SharedRegion
from caraserve.gpu.driver.api import WORD_BYTES

_LINE_BYTES = 64


class RegionWords:
    """The words of a region, which the device can read and write, by their offset. Loads and stores of aligned words
    are atomic on every machine that CUDA runs on."""

    def __init__(self, region: SharedRegion) -> None:
        self._words: NDArray[np.uint32] = region.bytes.view(np.uint32)

    def load(self, offset: int) -> int:
        """Reads a word (acquire): later reads are at least as new."""
        value = int(self._words[offset // WORD_BYTES])
        keep_order()
        return value

    def store(self, offset: int, value: int) -> None:
        """Writes a word (release): earlier writes are visible first."""
        keep_order()
        self._words[offset // WORD_BYTES] = value


def sync_slot_bytes(hand_offs: int) -> int:
    """Returns the bytes of a sync slot with the words of `hand_offs` hand-offs."""
    return _LINE_BYTES * (1 + 2 * hand_offs)


@dataclass(frozen=True, slots=True)
class HandOffFlags:
    """Offsets of the words of one hand-off."""

    x_flag: int
    y_flag: int

    @property
    def left(self) -> int:
        """Offset of the word that is set when the device goes on without the workers; `handoff.cu` has it, too."""
        return self.x_flag + 8

    @property
    def spent_ns(self) -> int:
        """Offset of the time that workers have spent on it. Its low word is enough: no hand-off takes 4 s."""
        return self.y_flag + COUNTER_SPENT_NS


@dataclass(slots=True, eq=False)
class SyncSlot:
    """The words of one chunk, as offsets. `generation` differs from those of all chunks whose words may still be
    written."""

    offset: int
    flags: tuple[HandOffFlags, ...]
    generation: int = 0

    @property
    def status(self) -> int:
        return self.offset

    @classmethod
    def at(cls, offset: int, hand_offs: int, generation: int = 0) -> "SyncSlot":
        """Returns a sync slot whose words begin at `offset` and all have the value `generation`."""
        lines = [offset + _LINE_BYTES * (1 + 2 * index) for index in range(hand_offs)]
        return cls(offset, tuple(HandOffFlags(line, line + _LINE_BYTES) for line in lines), generation)
