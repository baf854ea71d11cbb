"""Side batches: prompts that are computed beside the iterations, because iterations would wait for them.

assisted prefill    CPU workers compute the LoRA of layers that are not on the device yet (`Limits.assisted_batches`).
                    It takes as long as they do.
streamed prefill    The adapter is still being downloaded (`Limits.streamed_batches`). It takes as long as the network
                    does, so it is recalled when its request has finished, or when other requests need its KV blocks.

A request of a side batch is in no iteration. Its slot, its blocks and its adapter's image stay as they are until the
side batch ends, even when the request finishes before. Its blocks are published at the end only, because no other
batch is ordered behind a side batch. How a side batch ends:

    computed       blocks are published and results recorded, like those of an iteration; iterations compute the tokens
                   that an assisted prefill leaves, as its adapter has arrived
    needs retry    the row is rolled back; the request continues in iterations without CPU workers, or is requeued
                   until its whole adapter is in host memory
    failed         the request fails
    request done   its slot, blocks and adapter are released
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from caraserve.core.backend import Backend
from caraserve.core.batch import ScheduledRow, StepResult
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.batch_launcher import BatchLauncher, LaunchedBatch
from caraserve.engine.scheduler import Scheduled, plan_side_batch
from caraserve.engine.slot_allocator import SlotAllocator
from caraserve.lora.manager import AdapterManager

log = logging.getLogger(__name__)

Requeue = Callable[[ActiveRequest], None]  # preempts a running request until its whole adapter is in host memory


class SideBatches:
    """All side batches under way. Runs on the event loop."""

    def __init__(
        self,
        backend: Backend,
        manager: AdapterManager,
        slots: SlotAllocator,
        launcher: BatchLauncher,
        wake: Callable[[], None],
    ) -> None:
        """`wake`: called when a side batch has ended."""
        self._backend, self._limits, self._manager = backend, backend.limits, manager
        self._slots, self._launcher, self._wake = slots, launcher, wake
        self._under_way: list[LaunchedBatch] = []  # or ended, but not processed yet
        self._finished: list[ActiveRequest] = []  # finished requests whose side batch still uses what they hold

    @property
    def exist(self) -> bool:
        """Whether the device has side batches at all."""
        return self._limits.assisted_batches + self._limits.streamed_batches > 0

    @property
    def results(self) -> "list[asyncio.Future[StepResult | Exception]]":
        """The futures of all side batches under way."""
        return [launched.result for launched in self._under_way]

    @property
    def finished(self) -> Sequence[ActiveRequest]:
        """Finished requests that still hold a slot."""
        return self._finished

    # --- limits ---

    def may_assist(self, running: Sequence[ActiveRequest]) -> bool:
        """Returns whether CPU workers may help one more request. Always true where they help within iterations."""
        if not self._limits.assisted_batches:
            return True
        assisted = sum(active.needs_side_batch(self._limits) for active in running)
        return assisted + len(self._finished) < self._limits.assisted_batches

    def may_stream(self, running: Sequence[ActiveRequest]) -> bool:
        """Returns whether one more request may start whose adapter is still being downloaded."""
        streamed = sum(active.in_side_batch or active.is_streamed for active in running)
        return streamed + len(self._finished) < self._limits.streamed_batches

    # --- launching ---

    def launch_pending(self, running: Sequence[ActiveRequest], requeue: Requeue) -> int:
        """Launches a side batch for each running request that needs one and has the blocks. Returns how many blocks
        the others lack, as far as the pool can grow by them."""
        lacking = 0
        for active in list(running) if self.exist else ():
            if active.in_side_batch or not active.needs_side_batch(self._limits):
                continue
            entry: Scheduled | int = 0
            if active.can_run or active.is_streamed:
                entry = plan_side_batch(active.request, active.adapter_slot, self._slots.pool, self._limits)
            if isinstance(entry, Scheduled):
                self._launch(active, entry)
            elif not active.can_run:
                requeue(active)  # or it would keep its blocks for as long as the download takes
            elif lacking + entry <= self._slots.growable():
                lacking += entry
        return lacking

    def _launch(self, active: ActiveRequest, entry: Scheduled) -> None:
        assert active.adapter is not None
        active.in_side_batch = True
        self._manager.pin_image(active.adapter)
        launched = self._launcher.launch([(active, entry)], is_side_batch=True)
        launched.result.add_done_callback(lambda _: self._wake())
        self._under_way.append(launched)

    # --- recall ---

    def recallable_blocks(self, running: Sequence[ActiveRequest]) -> int:
        """Returns how many blocks are held by requests that wait for a download. A recall releases these blocks, so no
        other request is preempted for so many."""
        waiting = [active for active, _ in self._waiting_for_network()]
        waiting += [active for active in running if not (active.in_side_batch or active.can_run)]
        return sum(len(active.request.blocks) for active in waiting)

    def recall(self, *, all_requests: bool) -> None:
        """Recalls streamed prefills of finished requests, or of all requests."""
        for active, row in self._waiting_for_network():
            if all_requests or active.is_finished:
                self._backend.recall(row.slot)

    def _waiting_for_network(self) -> list[tuple[ActiveRequest, ScheduledRow]]:
        return [launched.rows[0] for launched in self._under_way if launched.rows[0][0].is_streamed]

    # --- the end ---

    def keep(self, active: ActiveRequest) -> None:
        """Defers the release of a finished request's slot, blocks and adapter until its side batch has ended."""
        self._finished.append(active)

    def take_ended(self, requeue: Requeue) -> list[tuple[LaunchedBatch, StepResult | Exception]]:
        """Processes the side batches that have ended. Returns those whose results or failures are to be recorded."""
        to_record: list[tuple[LaunchedBatch, StepResult | Exception]] = []
        for launched in [launched for launched in self._under_way if launched.result.done()]:
            self._under_way.remove(launched)
            ((active, row),), outcome = launched.rows, launched.result.result()
            self._unpin(active)
            if isinstance(outcome, Exception):
                log.error("a side batch failed", exc_info=outcome)
                to_record.append((launched, outcome))
            elif active.is_finished:
                continue
            elif outcome.rows[0].needs_retry:
                active.rollback(row, has_state=self._limits.state_bytes > 0)
                if not (self._limits.assisted_batches and active.can_run):
                    requeue(active)
            else:
                row = active.leave(row, outcome.rows[0])
                if outcome.rows[0].is_finite:
                    self._slots.publish(active)
                to_record.append((LaunchedBatch(((active, row),), launched.result, row.count), outcome))
        return to_record

    def _unpin(self, active: ActiveRequest) -> None:
        assert active.adapter is not None
        active.in_side_batch = False
        self._manager.unpin_image(active.adapter)
        if active in self._finished:
            self._finished.remove(active)
            self._slots.release(active)

    def check(self) -> None:
        """Raises AssertionError when a finished request is kept without a side batch."""
        assert all(active.in_side_batch for active in self._finished), "a finished request is kept for nothing"
