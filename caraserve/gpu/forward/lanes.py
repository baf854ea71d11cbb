"""The order of stream operations: of moves in the pool, of an iteration, of an assisted prefill.

The backend's launching thread calls these with a pass (`DecoderPass`); they issue its kernels and return at once. Marks
(streams.py) order work of different lanes. A pass that may have to wait for CPU workers has a lane of its own, so that
decoding continues, and device memory of its own for its batch.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass

from caraserve.core.lora_layout import GROUPS
from caraserve.gpu.assist.handshake import HandOffFlags, SyncSlot
from caraserve.gpu.driver.api import WORD_VALUES, Driver, DriverError, Graph, Stream, WordWait, WordWrite
from caraserve.gpu.driver.streams import Lane, Marks, Timelines, at
from caraserve.gpu.forward.decoder import DecoderPass, decoder_layer, issue_pass
from caraserve.gpu.memory.copier import AdapterCopier
from caraserve.gpu.memory.link_queue import LoraSource
from caraserve.gpu.memory.pool import Grant, Move

ASSISTED_CHUNK_TOKENS = 128  # a larger GEMM's tiles hold multiprocessors for so long that decoding slows down


def chunk_ends(start: int, end: int) -> Iterator[int]:
    """Yields the ends of the chunks of an assisted prefill of positions [start, end)."""
    yield from range(start + ASSISTED_CHUNK_TOKENS, end, ASSISTED_CHUNK_TOKENS)
    if end > start:
        yield end


def issue_moves(
    driver: Driver, timelines: Timelines, base: int, grant: Grant, relocate: Callable[[Move, Stream], None]
) -> None:
    """Issues a grant's moves between two iterations. Must be called directly after the pool has granted with
    `timelines.next(Lane.COMPUTE)` as `moved`. `relocate` writes the new address to the tables, in stream order."""
    if not grant.moves:
        return
    stream = timelines.streams[Lane.COMPUTE]
    timelines.wait(Lane.COMPUTE, grant.moves_after)
    for move in grant.moves:
        for target, source, num_bytes in move.pieces():
            driver.copy_on_device(base + target, base + source, num_bytes, stream)
        relocate(move, stream)
    timelines.mark(Lane.COMPUTE)


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """A captured pass. `gate`: address of the word by which it waits for layers, or None if it never waits."""

    graph: Graph
    gate: int | None


def capture_pass(driver: Driver, steps: DecoderPass, stream: Stream, layers: int, gate: int | None) -> CapturedPass:
    """Captures a pass as a graph. A gated one starts layer l when the word at `gate` has reached l + 1. Raises
    DriverError, with no capture in progress, if it cannot be captured."""

    def wait(layer: int) -> None:
        if gate is not None:
            driver.wait_value(stream, gate, layer + 1)

    return CapturedPass(capture(driver, stream, lambda: issue_pass(steps, stream, layers, wait)), gate)


def capture(driver: Driver, stream: Stream, issue: Callable[[], None]) -> Graph:
    """Captures what `issue` issues on a stream. Raises DriverError, with no capture in progress, if the driver, torch,
    CuPy or Triton rejects an operation that is captured."""
    driver.begin_capture(stream)
    try:
        issue()
    except RuntimeError as error:  # of torch, CuPy or Triton
        driver.abandon_capture(stream)
        raise DriverError(" ".join(str(error).split())) from error
    except BaseException:
        driver.abandon_capture(stream)
        raise
    return driver.end_capture(stream)


class IterationLane:
    """Launches iterations, in order."""

    def __init__(self, driver: Driver, timelines: Timelines, copier: AdapterCopier, layers: int) -> None:
        self._driver, self._timelines, self._copier, self._layers = driver, timelines, copier, layers
        self._stream = timelines.streams[Lane.COMPUTE]

    def launch(
        self,
        metadata: Callable[[Stream], None],
        steps: DecoderPass | CapturedPass,
        slots: Collection[int],
        after: Marks,
    ) -> int:
        """Issues one iteration and returns its mark. `metadata` issues the copies of what kernels read of the batch; a
        captured pass finds it where it was captured. `slots`: adapters of its rows that may not have arrived. `after`:
        other lanes' work that wrote what this reads, or read what this writes."""
        self._copier.commit(slots, self._layers)
        self._timelines.wait(Lane.COMPUTE, after)
        metadata(self._stream)
        if isinstance(steps, CapturedPass):
            if steps.gate is not None:
                self._open_gate(steps.gate, slots)
            else:
                self._timelines.wait(Lane.COMPUTE, self._copier.arrival_of_adapters(slots))
            self._driver.launch_graph(steps.graph, self._stream)
        else:
            issue_pass(
                steps,
                self._stream,
                self._layers,
                lambda layer: self._timelines.wait(Lane.COMPUTE, self._copier.arrival_of_all(slots, layer)),
            )
        return self._timelines.mark(Lane.COMPUTE)

    def _open_gate(self, gate: int, slots: Collection[int]) -> None:
        """Makes the gate lane raise the gate word as layers arrive, one layer group after another.

        It begins after this iteration's reset of the word, and the next reset comes after the graph, which ends after
        the last raise. So no raise is lost, and none counts for another iteration."""
        self._driver.write_value(self._stream, gate, 0)
        reset = self._timelines.mark(Lane.COMPUTE)
        self._timelines.wait(Lane.GATE, at(Lane.COMPUTE, reset))
        operations: list[WordWrite | WordWait] = []
        seen = self._timelines.known[Lane.COPY]
        for layer in range(self._layers):
            mark = self._copier.arrival_of_all(slots, layer)[Lane.COPY]
            if mark > seen:
                raised = [WordWrite(gate, layer)] if layer else []
                operations += [*raised, WordWait(self._copier.arrivals_word, mark % WORD_VALUES)]
                seen = mark
        operations.append(WordWrite(gate, self._layers))
        self._driver.word_operations(self._timelines.streams[Lane.GATE], operations)
        self._timelines.mark(Lane.GATE)  # by which the driver sees that these have run


@dataclass(frozen=True, slots=True)
class AssistedChunk:
    """A slice of one request's prompt, of at most `ASSISTED_CHUNK_TOKENS`."""

    slot: int  # of the adapter
    sync_slot: SyncSlot
    sources: Sequence[LoraSource]  # by layer
    groups: Sequence[Collection[int]]  # by layer: the module groups that the adapter has
    ready: Sequence[int]  # by layer: device address of its ready word
    ready_generation: int
    wait_s: float = 10.0  # for workers or weights, in each layer; then the chunk is void, and its prompt starts again

    def hand_offs(self) -> Iterator[tuple[int, int, int, HandOffFlags]]:
        """Yields (layer, module group, index, flags) of each hand-off that workers may be asked for, in the device's
        order."""
        for layer, source in enumerate(self.sources):
            for group in sorted(self.groups[layer]) if source is LoraSource.WORKERS else ():
                index = layer * len(GROUPS) + group
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
