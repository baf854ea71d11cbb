"""Writes the letters of an assisted chunk: what each worker is to do at each hand-off.

letters.py says what a letter is; here is whom it goes to, and where x, deltas and weights lie.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import GROUPS, HostAdapter
from caraserve.gpu.assist.handshake import Entry, Life
from caraserve.gpu.assist.work_orders import (
    Errand,
    Module,
    Region,
    Terms,
    cut,
    delta_columns,
    letter_bytes,
    write_letter,
)
from caraserve.gpu.forward.lanes import AssistedChunk
from caraserve.gpu.memory.adapters import HostMemory
from caraserve.gpu.memory.host_memory import HostRegion, inputs_of, x_stride
from caraserve.model.spec import SITES, ModelSpec

_WAIT_NS = 10_000_000_000  # for weights that are on their way, once no worker is waited for: they do come


@dataclass(frozen=True, slots=True)
class Letter:
    """Of one hand-off. `errands`: workers who are asked; `answer_bytes`: what they will have the device read."""

    entry: int
    words: NDArray[np.int64]
    errands: int
    answer_bytes: int


class LetterWriter:
    """Counts each worker's hand-offs. The launching thread's alone."""

    def __init__(self, spec: ModelSpec, region: HostRegion, memory: HostMemory) -> None:
        self._spec, self._region, self._memory = spec, region, memory
        self._rooms = {room.book: room for room in region.rooms}
        self._numbers: dict[int, int] = {}  # by worker

    def letters(
        self,
        chunk: AssistedChunk,
        adapter: HostAdapter,
        tokens: int,
        lives: Sequence[Life],
        tokens_per_worker: Callable[[int], int],
    ) -> list[Letter]:
        """One for each hand-off of a chunk of so many tokens."""
        idle = [life.worker for life in lives if life.incarnation is not None and life.is_idle]
        slices = cut(tokens, tokens_per_worker(adapter.spec.rank), max(1, len(idle)))
        deltas = self._rooms[chunk.book.offset].deltas
        written = []
        for layer, group, index, entry in chunk.hand_offs():
            modules = self._modules(adapter, layer, group)
            _, stride = delta_columns(modules)
            errands = [
                self._errand(worker, first, rows, deltas + 4 * stride * first)
                for worker, (first, rows) in zip(idle, slices, strict=False)
            ]
            words = self._words(chunk, layer, group, entry, modules, errands)
            outputs = sum(module.outputs for module in modules if module.rank)
            answered = sum(errand.rows for errand in errands)
            written.append(Letter(index, words, len(errands), 4 * answered * outputs))
        return written

    def to_nobody(self, chunk: AssistedChunk) -> Iterator[Letter]:
        """The same, asking no worker for anything."""
        for layer, group, index, entry in chunk.hand_offs():
            modules = [Module(self._spec.site_shape(site)[1]) for site in GROUPS[group]]
            yield Letter(index, self._words(chunk, layer, group, entry, modules, []), 0, 0)

    def _words(
        self,
        chunk: AssistedChunk,
        layer: int,
        group: int,
        entry: Entry,
        modules: Sequence[Module],
        errands: Sequence[Errand],
    ) -> NDArray[np.int64]:
        base, x = self._memory.device_base, self._rooms[chunk.book.offset].x
        terms = Terms(
            deadline_ns=_WAIT_NS,
            arrived=chunk.ready[layer],
            wanted=chunk.ready_generation,
            status=base + chunk.book.status,
            generation=chunk.book.generation,
            x_flag=base + entry.x_flag,
            y_flag=base + entry.y_flag,
        )
        words = np.zeros(letter_bytes(len(errands)) // 8, np.int64)
        where = Region(base, x, x_stride(self._spec, group), inputs_of(self._spec, group))
        write_letter(words, errands, modules, where, terms)
        return words

    def _errand(self, worker: int, first: int, rows: int, deltas: int) -> Errand:
        number = self._numbers[worker] = self._numbers.get(worker, 0) + 1
        block = self._memory.on_device(int(self._region.blocks.ctypes.data)) + worker * self._region.block_bytes
        return Errand(worker, block, number, first, rows, deltas)

    def _modules(self, adapter: HostAdapter, layer: int, group: int) -> list[Module]:
        """As they lie in the host tier, where workers read them."""
        base = self._region.region.offset(int(adapter.data.ctypes.data))
        spans = {span.site: span for span in adapter.spec.spans if span.layer == layer}
        modules = []
        for site in GROUPS[group]:
            outputs = self._spec.site_shape(site)[1]
            if (span := spans.get(SITES.index(site))) is None:
                modules.append(Module(outputs))
            else:
                a, b = base + span.a_offset, base + span.b_offset
                modules.append(Module(outputs, span.padded_rank, adapter.spec.dtype, span.scale, a, b))
        return modules
