"""The queues of unfinished requests: waiting → loading → running, and paused → waiting.

A waiting request pins its adapter, whose weights may be anywhere. A loading request was admitted: its adapter is on the
device or being loaded. A running request holds a slot and KV blocks.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from operator import itemgetter

from caraserve.core.backend import Limits
from caraserve.core.fair_queue import FairQueue
from caraserve.core.tenant import Tenant
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.scheduler import total_tokens
from caraserve.engine.side_batches import SideBatches
from caraserve.engine.slot_allocator import SlotAllocator
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.manager import AdapterManager
from caraserve.lora.start_policy import AwaitedPrefill, ModeChoice, PrefillStart

log = logging.getLogger(__name__)

_MOST_AHEAD = 16  # at most 1/16 of all KV blocks are asked for ahead of need
_PREFETCHED = 8  # waiting requests whose adapters are prefetched


class RequestQueues:
    """The queues of all unfinished requests, and the moves between them. Runs on the event loop."""

    def __init__(
        self,
        limits: Limits,
        manager: AdapterManager,
        slots: SlotAllocator,
        side_batches: SideBatches,
        *,
        prefetching: bool,
        observe_preemption: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self.waiting: FairQueue[ActiveRequest] = FairQueue(lambda active: active.request.inputs.priority)
        self.loading: deque[ActiveRequest] = deque()  # admitted; waits for its adapter, a slot or blocks
        self.running: list[ActiveRequest] = []  # in the order of admission
        self.paused: FairQueue[ActiveRequest] = FairQueue()  # their clients read too slowly
        self.next_start_s: float | None = None  # when a request that waits for its adapter may start; set by `start`
        self.is_short = False  # whether the next request to start found too few blocks; set by `start`
        self._limits, self._manager, self._slots, self._side_batches = limits, manager, slots, side_batches
        # Within iterations CPU workers may also help a prefill for which no layer was expected late: if one is late all
        # the same, all requests of the iteration would wait for it.
        self._helps_late_layers = manager.arrivals.uses_workers and not limits.assisted_batches
        self._prefetching, self._observe_preemption, self._now = prefetching, observe_preemption, now
        self._ahead = max(1, min(slots.iteration_blocks, manager.memory.most_blocks // _MOST_AHEAD))
        self._read_ahead_at: tuple[int, int] | None = None
        self._start_lacks = 0  # blocks that the next request to start lacks, if the pool can grow by so many

    def __len__(self) -> int:
        return len(self.waiting) + len(self.loading) + len(self.running) + len(self.paused)

    @property
    def num_waiting(self) -> int:
        """How many requests are not admitted."""
        return len(self.waiting) + len(self.paused)

    @property
    def is_full(self) -> bool:
        """Whether all requests that the device can run are running, so that no other one can be in an iteration."""
        return len(self.running) >= self._limits.num_slots

    def next_rows(self) -> tuple[int, bool]:
        """Returns how many requests the next iteration may have, at least one, and whether it may have prompts: those
        of new requests, or the rest of the newest one's."""
        coming = len(self.waiting) + len(self.loading)
        newest = self.running[-1].request if self.running else None
        has_prompts = coming > 0 or (newest is not None and newest.computed < newest.prompt_tokens)
        return max(1, min(len(self.running) + coming, self._limits.num_slots)), has_prompts

    def newest_of_largest(self, beside: Tenant) -> ActiveRequest | None:
        """Returns the request that is not admitted and may be dropped for one of `beside`, or None."""
        return self.waiting.newest_of_largest(beside, self.paused)

    def all(self) -> list[ActiveRequest]:
        """Returns all unfinished requests."""
        return [*self.waiting, *self.loading, *self.running, *self.paused]

    def waiting_tokens(self) -> int:
        """Returns the tokens of the waiting requests: of their prompts, and of their answers at full length."""
        waiting = (active.request for active in self.waiting)
        return sum(request.prompt_tokens + request.inputs.params.max_tokens for request in waiting)

    def check(self) -> None:
        """Raises AssertionError unless every slot and KV block is free or held once."""
        self._slots.check([*self.running, *self._side_batches.finished])
        self._side_batches.check()

    # --- waiting → loading ---

    def admit(self, begins_s: float, iteration_s: float, *, preempts: bool) -> None:
        """Admits as many requests as there are slots for, starts to load their adapters, and prefetches those of the
        next waiting requests. `begins_s`: when the next iteration begins; `iteration_s`: how long it takes. `preempts`:
        whether a client that has no slot gets one of a client with several; only between two iterations."""
        loader = self._manager.device_loader
        if loader.claims_memory:
            loader.schedule_pending()  # KV blocks that were released since may make room
        while loader.admits:
            is_full = self._slots_claimed() >= self._limits.num_slots
            tenant = self.waiting.first() if not is_full else self._preempt_for_others() if preempts else None
            if tenant is None:
                break
            active = self.waiting.pop(tenant)
            if active.stream.unread.is_paused:  # by other answers to the same body
                self.paused.push(tenant, active)
                continue
            self.waiting.charge(active.request.inputs.tenant, active.request.prompt_tokens, 0)
            if active.adapter is None:
                loader.count_bypass(None)
            else:
                active.holds_adapter = True
                self._manager.acquire(active.adapter, self._prefill_of(active, begins_s, iteration_s))
            self.loading.append(active)
        # While many wait, a new one is seldom among the next, and each look at 4,000 clients takes 1 ms.
        if self.waiting and self._prefetching and (preempts or len(self.waiting) <= _PREFETCHED):
            self._read_ahead()

    def _preempt_for_others(self) -> Tenant | None:
        """Preempts the newest request of the client with the most slots, if it has several, for a client without any:
        one request with 128 answers kept all other clients waiting until some of these had ended, for 35 s. Returns
        the tenant for which there is a slot now, or None."""
        if not self.waiting:
            return None
        admitted = [*self.loading, *self.running]
        counts = Counter(one.request.inputs.tenant.client for one in admitted)
        tenant = self.waiting.first(counts)
        if tenant is None:
            return None
        largest, count = max(counts.items(), key=itemgetter(1))
        newest = (one for one in reversed(admitted) if one.request.inputs.tenant.client == largest)
        victim = next((one for one in newest if not one.in_side_batch), None)
        if count == 1 or victim is None:
            return None
        self._withdraw(victim)
        self.waiting.put_back(victim.request.inputs.tenant, victim)
        self._observe_preemption()
        return tenant

    def _withdraw(self, active: ActiveRequest) -> None:
        """Takes slot, KV blocks and adapter from an admitted request."""
        if active in self.running:
            self._slots.pool.release(active.request.blocks)
            self.running.remove(active)
            self._slots.preempt(active, self._now())
        else:
            self.loading.remove(active)
        if active.adapter is not None:
            active.holds_adapter = False
            self._manager.release(active.adapter)

    def _slots_claimed(self) -> int:
        return len(self.loading) + len(self.running) + len(self._side_batches.finished)

    def _read_ahead(self) -> None:
        """Prefetches the adapters of the next waiting requests. Only after a change of the queue or of loads, because
        there may be thousands of tenants."""
        seen = len(self.waiting), self._manager.loading
        if seen == self._read_ahead_at:
            return
        for active in self.waiting.upcoming(_PREFETCHED):
            if active.adapter is not None:
                self._manager.prefetch(active.adapter)
        self._read_ahead_at = len(self.waiting), self._manager.loading

    # --- loading → running ---

    def start(self, begins_s: float, iteration_s: float) -> None:
        """Starts requests for which a slot and blocks are free and whose adapter is on the device, or will be when an
        iteration that begins at `begins_s` needs it. `iteration_s`: how long that takes without them."""
        self.next_start_s, self._start_lacks, self.is_short = None, 0, False
        for active in list(self.loading):
            if self._slots.are_free and self._may_start(active, begins_s, iteration_s):
                if self._start(active):
                    continue
                if active.is_streamed:
                    active.wait_for_whole_adapter()  # it waits for the download anyway
                    continue
                self.is_short = True
                break  # later requests must not overtake it, or it might never start
            active.wait_for_adapter(self._now())

    def _may_start(self, active: ActiveRequest, begins_s: float, iteration_s: float) -> bool:
        if active.adapter is None:
            return True
        if active.is_streamed and (
            active.waits_for_whole_adapter
            or active.is_activated  # a side batch computes one adapter's tokens
            or not self._side_batches.may_stream(self.running)
        ):
            return False
        if active.needs_device_copy and active.adapter.tier is not AdapterTier.DEVICE:
            return False
        prefill = self._prefill_of(active, begins_s, iteration_s)
        may_assist = not active.is_activated and self._side_batches.may_assist(self.running)
        start = self._manager.arrivals.start_of(active.adapter, prefill, may_assist=may_assist)
        if start is None:
            return False
        is_copied = active.adapter.tier is AdapterTier.COPYING
        # The mean of all tokens is computed in iterations: an assisted prefill returns its last chunk's results alone.
        may_help = not (active.request.inputs.averages and self._limits.assisted_batches)
        helps_late = is_copied and self._helps_late_layers and not active.is_activated
        active.assist = may_help and (start.assist or helps_late)
        self._note_choice(active, active.adapter, start)
        return self._is_time(start, begins_s)

    def _prefill_of(self, active: ActiveRequest, begins_s: float, iteration_s: float) -> AwaitedPrefill:
        """Returns the tokens of a request that the next iteration can compute, and when that begins."""
        left = total_tokens(active.request) - active.request.computed
        tokens = min(left, self._limits.max_step_tokens)
        others = len(self.running) - (active in self.running)
        return AwaitedPrefill(tokens, begins_s, iteration_s if others else 0.0, others)

    def _is_time(self, start: PrefillStart, begins_s: float) -> bool:
        if start.at_s <= begins_s:
            return True
        self.next_start_s = min(start.at_s, self.next_start_s or start.at_s)
        return False

    def _note_choice(self, active: ActiveRequest, adapter: Adapter, start: PrefillStart) -> None:
        if start.ends_s is None:
            return
        if active.choice is None:
            is_there = adapter.tier is AdapterTier.DEVICE
            active.choice = ModeChoice("cached" if is_there else "pipelined", self._now(), start.ends_s)
        if start.assist and not active.choice.is_observed:
            active.choice.name = "assisted"

    def _start(self, active: ActiveRequest) -> bool:
        """Gives a request a slot and moves it to `running`. Returns False if there are too few blocks for it."""
        pool = self._slots.pool
        needed = self._slots.blocks_for(active.request)
        if self.running and needed > pool.available:
            lacks = needed - pool.available
            self._start_lacks = lacks if lacks <= self._manager.device_cache.growable() else 0
            return False
        self.loading.remove(active)
        self._slots.start(active, self._now())
        self.running.append(active)
        return True

    def is_ready(self, active: ActiveRequest, begins_s: float) -> bool:
        """Returns whether a running request may be in an iteration that begins at `begins_s`. If it is too early, the
        iteration would wait for layers of its adapter, and with it all other requests."""
        if active.adapter is None or active.adapter.tier is not AdapterTier.COPYING:
            return True
        if not self._limits.assisted_batches:
            return True
        prefill = self._prefill_of(active, begins_s, 0.0)
        start = self._manager.arrivals.start_of(active.adapter, prefill, may_assist=False)
        return start is not None and self._is_time(start, begins_s)

    # --- running → loading, and the end ---

    def preempt(self, active: ActiveRequest) -> None:
        """Moves a running request, whose blocks have been released, to the head of `loading`."""
        log.debug("%s is preempted after %d tokens", active.request.inputs.request_id, len(active.request.output_ids))
        self.running.remove(active)
        self._slots.preempt(active, self._now())
        self.loading.appendleft(active)
        self._observe_preemption()

    def requeue(self, active: ActiveRequest) -> None:
        """Preempts a running request, which starts again when its whole adapter is in host memory."""
        active.wait_for_whole_adapter()
        self._slots.pool.release(active.request.blocks)
        self.preempt(active)

    def follow_readers(self) -> None:
        """Pauses admitted requests whose clients read too slowly. Those whose clients have caught up wait for their
        turn again. A paused request has no slot, no KV blocks, and needs no adapter on the device."""
        for active in [one for one in self.paused if not one.stream.unread.is_paused]:
            tenant = active.request.inputs.tenant
            self.paused.remove(tenant, active)
            self.waiting.put_back(tenant, active)
        for active in [one for one in [*self.loading, *self.running] if one.stream.unread.is_paused]:
            if not active.in_side_batch:
                self._withdraw(active)
                self.paused.push(active.request.inputs.tenant, active)

    def remove(self, active: ActiveRequest) -> None:
        """Removes a request from its queue; releases all it holds: after its side batch if one is under way."""
        if active in self.running:
            self.running.remove(active)
            if active.in_side_batch:
                self._side_batches.keep(active)
                return
        elif active in self.loading:
            self.loading.remove(active)
        else:
            queue = self.paused if active in self.paused else self.waiting
            queue.remove(active.request.inputs.tenant, active)
        self._slots.release(active)

    # --- memory ---

    def grow_kv(self, lacking: int) -> None:
        """Asks for KV blocks where memory is shared: `lacking` ones for running requests, those that the next request
        to start lacks, and some ahead of need, so that normally no request waits. For the latter two, adapters that
        admitted requests wait for have precedence."""
        pool = self._slots.pool
        self._manager.memory.set_lacking_blocks(lacking)
        short = self._ahead - pool.available
        if lacking or self._start_lacks or (self.running and short > 0):
            self._manager.device_loader.grow_kv(lacking, self._start_lacks + max(0, short) + self._ahead)
