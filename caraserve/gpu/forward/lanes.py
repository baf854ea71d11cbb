"""The order of an iteration's stream operations, and captures of passes.

The backend's launching thread calls these with a pass (`DecoderPass`); they issue its kernels and return at once. Marks
(streams.py) order work of different lanes.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from caraserve.gpu.driver.api import WORD_VALUES, Driver, DriverError, Graph, Stream, WordWait, WordWrite
from caraserve.gpu.driver.streams import Lane, Marks, Timelines, at
from caraserve.gpu.forward.decoder import DecoderPass, issue_pass
from caraserve.gpu.memory.copier import AdapterCopier


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


class PassCapturer:
    """Captures passes before serving, within a limit of device memory."""

    def __init__(self, driver: Driver, layers: int) -> None:
        self._driver, self._layers = driver, layers
        self.failures: list[DriverError] = []  # why passes have no graphs that were to have one

    def capture(
        self,
        steps: DecoderPass,
        stream: Stream,
        gate: int | None,
        keep: Callable[[int], bool],
        wait_until_idle: Callable[[], None],
    ) -> CapturedPass | None:
        """Runs a pass once, so that its kernels are loaded, and captures it. Returns None if that is refused, or if
        `keep`, called with the bytes that the graph takes, returns False. Raises DriverError if the device has
        failed."""
        issue_pass(steps, stream, self._layers)
        wait_until_idle()
        before = self._driver.free_bytes()
        try:
            captured = capture_pass(self._driver, steps, stream, self._layers, gate)
        except DriverError as error:
            self.failures.append(error)
            wait_until_idle()  # raises if the device has failed
            return None
        if keep(max(0, before - self._driver.free_bytes())):
            return captured
        self._driver.destroy_graph(captured.graph)
        return None


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
    ) -> tuple[int, float]:
        """Issues one iteration. Returns its mark, and the time at which the issue of its kernels began. `metadata`
        issues the copies of what kernels read of the batch; a captured pass finds it where it was captured. `slots`:
        adapters of its rows that may not have arrived. `after`: other lanes' work that wrote what this reads, or read
        what this writes."""
        self._copier.commit(slots, self._layers)
        self._timelines.wait(Lane.COMPUTE, after)
        metadata(self._stream)
        began_s = time.monotonic()
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
        return self._timelines.mark(Lane.COMPUTE), began_s

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
