"""The chunks of an assisted prefill, and the order of a chunk's stream operations.

A pass that may have to wait for CPU workers has a lane of its own, so that decoding continues, and device memory of its
own for its batch.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.driver.streams import Lane, Marks, Timelines
from caraserve.gpu.forward.decoder import DecoderPass, decoder_layer
from caraserve.gpu.forward.lanes import CapturedPass
from caraserve.gpu.memory.copier import AdapterCopier
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS
from caraserve.gpu.memory.link_queue import LoraSource
from caraserve.gpu.memory.sync_slots import HandOffFlags, SyncSlot


def chunk_ends(start: int, end: int) -> Iterator[int]:
    """Yields the ends of the chunks of an assisted prefill of positions [start, end)."""
    yield from range(start + ASSISTED_CHUNK_TOKENS, end, ASSISTED_CHUNK_TOKENS)
    if end > start:
        yield end


@dataclass(frozen=True, slots=True)
class AssistedChunk:
    """A slice of one request's prompt, of at most `ASSISTED_CHUNK_TOKENS`."""

    slot: int  # of the adapter
    sync_slot: SyncSlot
    sources: Sequence[LoraSource]  # by layer
    groups: Sequence[Collection[int]]  # by layer: its groups in which the adapter has a module
    ready: Sequence[int]  # by layer: device address of its ready word
    ready_generation: int
    wait_s: float = 10.0  # for workers or weights, in each layer; then the chunk is void, and its prompt starts again

    @property
    def most_groups(self) -> int:
        """The groups of the layer that has most, by which hand-offs are numbered."""
        return len(self.sync_slot.flags) // len(self.sources)

    def index(self, layer: int, group: int) -> int:
        """Returns the number of a hand-off."""
        return layer * self.most_groups + group

    def hand_offs(self) -> Iterator[tuple[int, int, int, HandOffFlags]]:
        """Yields (layer, group, index, flags) of each hand-off that workers may be asked for, in the device's
        order."""
        for layer, source in enumerate(self.sources):
            for group in sorted(self.groups[layer]) if source is LoraSource.WORKERS else ():
                index = self.index(layer, group)
                yield layer, group, index, self.sync_slot.flags[index]


class AssistLane:
    """Launches chunks of assisted prefills, once the watchdog watches them."""

    def __init__(self, driver: Driver, timelines: Timelines, copier: AdapterCopier, layers: int) -> None:
        self._driver, self._timelines, self._copier, self._layers = driver, timelines, copier, layers
        self._stream = timelines.streams[Lane.ASSIST]

    def issue(
        self,
        metadata: Callable[[Stream], None],
        steps: DecoderPass,
        captured: CapturedPass | None,
        slot: int,
        after: Marks,
    ) -> Generator[None, None, int]:
        """Issues a chunk and returns its mark. `metadata` also sends the chunk's work orders; `captured` is the chunk's
        pass without sampling, or None: it is launched kernel by kernel, and yields after each layer, so that more
        urgent work can be issued on other lanes. `slot`: the adapter's; the pool must pin it until the last step.

        The adapter's missing layers go to the copy lane first: the chunk's kernels may wait for them, and the launching
        thread may have to wait for this lane."""
        self._copier.commit([slot], self._layers)
        stream = self._stream
        self._timelines.wait(Lane.ASSIST, after)
        metadata(stream)
        if captured is not None:
            self._driver.launch_graph(captured.graph, stream)
        else:
            steps.embed(stream)
            for layer in range(self._layers):
                decoder_layer(steps, layer, stream)
                yield
        steps.sample(stream)
        return self._timelines.mark(Lane.ASSIST)
