"""Where open requests stand: waiting → loading → running, and what each place holds.

`loop.py` asks for admissions at every turn and tells of requests that end. A running request holds a slot and KV
blocks; a loading one holds its adapter on the device, or the wish for it; a waiting one holds its adapter's
version alone.
"""

import logging
from collections import deque
from collections.abc import Callable

from caraserve.core.backend import Limits
from caraserve.core.batch import BlockGrant, SlotSampling, SlotStart
from caraserve.core.request import Phase, Request
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.fair_queue import FairQueue
from caraserve.engine.scheduler import total_tokens
from caraserve.kv.prefix_keys import next_key, root_key
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.manager import AdapterManager
from caraserve.lora.start_policy import ModeChoice, PrefillStart
from caraserve.util.units import ceil_div

log = logging.getLogger(__name__)

_MOST_AHEAD = 16  # one part in so many of all KV blocks may be asked for ahead of need
_PREFETCHED = 8  # requests in the queue whose adapters are read ahead


class RequestQueues:
    """The queues, the slots and the KV pool."""

    def __init__(
        self,
        limits: Limits,
        manager: AdapterManager,
        eos_ids: frozenset[int],
        *,
        prefix_caching: bool,
        prefetching: bool,
        observe_preemption: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self.pool = manager.memory.pool
        self.waiting: FairQueue[ActiveRequest] = FairQueue(lambda active: active.request.asked.priority)
        self.loading: deque[ActiveRequest] = deque()  # admitted; waits for its adapter, a slot or blocks
        self.running: list[ActiveRequest] = []  # in the order of admission
        self._leaving: list[ActiveRequest] = []  # ended, but a plan aside still uses what they hold
        self._limits, self._manager, self._eos_ids = limits, manager, eos_ids
        iteration_blocks = ceil_div(limits.max_step_tokens, limits.block_tokens) + limits.num_slots
        self._most_taken = iteration_blocks  # by one iteration
        self._ahead = max(1, min(iteration_blocks, manager.memory.most_blocks // _MOST_AHEAD))
        self._read_ahead_at: tuple[int, int] | None = None
        self._start_lacks = 0  # blocks that the next request to start waits for
        self.is_short = False  # whether it found too few, even if there will never be as many; set by `start`
        self._prefix_caching, self._prefetching, self._observe_preemption = (
            prefix_caching,
            prefetching,
            observe_preemption,
        )
        self._now = now
        self._free_slots = list(range(limits.num_slots - 1, -1, -1))
        self.next_start_s: float | None = None  # when a request that waits for its adapter may start; set by `admit`
        self._starts: list[SlotStart] = []  # of requests that took a slot since the last launch
        self._grants: list[BlockGrant] = []  # their reused prefixes

    def __len__(self) -> int:
        return len(self.waiting) + len(self.loading) + len(self.running)

    def new_in_slots(self) -> tuple[tuple[SlotStart, ...], tuple[BlockGrant, ...]]:
        """What the next plan must tell the device of requests that took a slot; each is told once."""
        news = tuple(self._starts), tuple(self._grants)
        self._starts, self._grants = [], []
        return news

    def waiting_tokens(self) -> int:
        """Prompts of the waiting requests, and their answers at full length."""
        waiting = (active.request for active in self.waiting)
        return sum(request.prompt_tokens + request.asked.params.max_tokens for request in waiting)

    def check(self) -> None:
        """Raises AssertionError when a slot or a block has no owner, or two."""
        holders = [*self.running, *self._leaving]
        self.pool.check([active.request.blocks for active in holders])
        assert len(self._free_slots) + len(holders) == self._limits.num_slots, "a slot is lost"
        assert all(active.is_aside for active in self._leaving), "one that has ended is kept for nothing"

    @property
    def is_settled(self) -> bool:
        """Whether all that ended requests held has been given back."""
        return not self._leaving

    def admit(self) -> None:
        """Queue → loading, as far as slots may come free. Adapters that are not on the device begin to load; those of
        the next in the queue are read ahead."""
        if self._manager.device_loader.claims_memory:
            self._manager.device_loader.go_on()  # blocks may have been given back since
        while self._places_taken() < self._limits.num_slots and self._manager.device_loader.admits:
            tenant = self.waiting.first()
            if tenant is None:
                break
            active = self.waiting.pop(tenant)
            self.waiting.charge(active.request.asked.tenant, active.request.prompt_tokens, 0)
            self._hold_adapter(active)
            self.loading.append(active)
        if self.waiting and self._prefetching:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Only after a change of the queue or of the reads under way: there may be thousands of tenants."""
        seen = len(self.waiting), self._manager.loading
        if seen == self._read_ahead_at:
            return
        for active in self.waiting.upcoming(_PREFETCHED):
            if active.adapter is not None:
                self._manager.prefetch(active.adapter)
        self._read_ahead_at = len(self.waiting), self._manager.loading

    def _places_taken(self) -> int:
        return len(self.loading) + len(self.running) + len(self._leaving)

    def start(self, begins_s: float) -> None:
        """Loading → running, as far as slots and blocks are free and adapters are there, or will be when an iteration
        that begins at `begins_s` needs them."""
        self.next_start_s, self._start_lacks, self.is_short = None, 0, False
        for active in list(self.loading):
            if self._free_slots and self._may_start(active, begins_s):
                if self._start(active):
                    continue
                if active.is_streamed:
                    active.wait_for_whole()  # as it waits anyway
                    continue
                self.is_short = True
                break  # no blocks: later ones must not overtake for ever
            if active.request.phase is Phase.WAITING and active.adapter is not None:
                active.request.to(Phase.LOADING, self._now())

    def _may_start(self, active: ActiveRequest, begins_s: float) -> bool:
        """Whether a request's adapter is on the device, or will be by the time that it is needed."""
        if active.adapter is None:
            return True
        if active.is_streamed and (active.waits_whole or not self._may_stream()):
            return False
        start = self._start_of(active, begins_s, may_assist=self._has_helpers())
        if start is None:
            return False
        active.assist = start.assist
        self._note_choice(active, active.adapter, start)
        return self._is_time(start, begins_s)

    def _start_of(self, active: ActiveRequest, begins_s: float, *, may_assist: bool) -> PrefillStart | None:
        assert active.adapter is not None
        left = total_tokens(active.request) - active.request.computed
        tokens = min(left, self._limits.max_step_tokens)
        return self._manager.arrivals.start_of(active.adapter, tokens, begins_s, may_assist=may_assist)

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

    # --- plans aside ---

    def _has_helpers(self) -> bool:
        """Whether one more prompt may go aside; always, where they go with the others."""
        if not self._limits.assisted_batches:
            return True
        helped = sum(self.goes_aside(active) for active in self.running)
        return helped + len(self._leaving) < self._limits.assisted_batches

    def _may_stream(self) -> bool:
        """Whether one more prompt may go aside whose adapter is."""
        streamed = sum(active.is_aside or active.is_streamed for active in self.running)
        return streamed + len(self._leaving) < self._limits.streamed_batches

    def goes_aside(self, active: ActiveRequest) -> bool:
        """Whether a plan aside is under way for a running request, or is to be launched next; in iterations it has no
        place."""
        if active.is_aside or not active.can_go_on:
            return True
        if not (self._limits.assisted_batches and active.assist and active.request.phase is Phase.PREFILL):
            return False
        return active.adapter is not None and active.adapter.tier is AdapterTier.COPYING

    def is_ready(self, active: ActiveRequest, begins_s: float) -> bool:
        """Whether a running request may be in an iteration that begins then: it would stop at layers of its adapter
        that have not arrived, and all others with it."""
        if (
            active.adapter is None
            or active.adapter.tier is not AdapterTier.COPYING
            or not self._limits.assisted_batches
        ):
            return True
        start = self._start_of(active, begins_s, may_assist=False)
        return start is not None and self._is_time(start, begins_s)

    def set_back(self, active: ActiveRequest) -> None:
        """A running request whose adapter is not here yet gives up what it holds, and begins again when all of it is:
        its plan aside was recalled, or there are no blocks for one."""
        active.wait_for_whole()
        self.pool.release(active.request.blocks)
        self.preempt(active)

    def begin_aside(self, active: ActiveRequest) -> None:
        """A plan aside is launched. Until it has ended, whatever becomes of the request, its slot, its blocks and its
        adapter stay as they are."""
        assert active.adapter is not None
        active.is_aside = True
        self._manager.pin_image(active.adapter)

    def end_aside(self, active: ActiveRequest) -> None:
        """It has ended."""
        assert active.adapter is not None
        active.is_aside = False
        self._manager.unpin_image(active.adapter)
        if active in self._leaving:
            self._leaving.remove(active)
            self._give_back(active)

    # --- memory ---

    def growable(self) -> int:
        """KV blocks that there could be more; 0 while there are enough for any iteration."""
        return 0 if self.pool.available >= self._most_taken else self._manager.device_cache.growable()

    def grow(self, lacking: int) -> None:
        """Asks for KV blocks where memory is shared: those that running requests lack, those that the next one to start
        lacks, and some ahead of need, so that normally nobody waits. The latter two come after adapters that admitted
        requests wait for."""
        self._manager.memory.wanted_blocks = self.pool.num_blocks + lacking if lacking else 0
        short = self._ahead - self.pool.available
        if lacking or self._start_lacks or (self.running and short > 0):
            self._manager.device_loader.grow_kv(lacking, self._start_lacks + max(0, short) + self._ahead)

    # --- slots ---

    def _hold_adapter(self, active: ActiveRequest) -> None:
        if active.adapter is None:
            self._manager.device_loader.passed(None)
        elif not active.holds_adapter:
            active.holds_adapter = True
            self._manager.acquire(active.adapter)

    def _start(self, active: ActiveRequest) -> bool:
        """Gives a request a slot and the blocks of its longest known prefix. False when there is no room for it."""
        request = active.request
        needed = ceil_div(total_tokens(request) + 1, self._limits.block_tokens)
        if self.running and needed > self.pool.available:
            lacks = needed - self.pool.available
            self._start_lacks = lacks if lacks <= self._manager.device_cache.growable() else 0
            return False
        self.loading.remove(active)
        request.slot = self._free_slots.pop()
        tokens = (*request.asked.prompt_ids, *request.output_ids)
        self._reuse_prefix(active, tokens)
        self._starts.append(SlotStart(request.slot, tokens, self._sampling(request)))
        request.to(Phase.PREFILL, self._now())
        self.running.append(active)
        return True

    def _reuse_prefix(self, active: ActiveRequest, tokens: tuple[int, ...]) -> None:
        """Takes published blocks from the front; at least one token is always computed."""
        request, size = active.request, self._limits.block_tokens
        digest = active.adapter.digest if active.adapter else None
        active.key, active.published, active.reused = root_key(digest, request.asked.cache_salt), 0, 0
        if not self._prefix_caching or request.asked.params.prompt_logprobs is not None:
            return
        while (active.published + 1) * size < len(tokens):
            key = next_key(active.key, tokens[active.published * size : (active.published + 1) * size])
            block = self.pool.find(key)
            if block is None:
                break
            request.blocks.append(block)
            active.key, active.published = key, active.published + 1
        active.reused = active.published
        request.computed = active.published * size
        request.cached_tokens = max(request.cached_tokens, min(request.computed, request.prompt_tokens))
        if request.blocks:
            assert request.slot is not None
            self._grants.append(BlockGrant(request.slot, 0, tuple(request.blocks)))

    def _sampling(self, request: Request) -> SlotSampling:
        params = request.asked.params
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._eos_ids)
        return SlotSampling(
            prompt_tokens=request.prompt_tokens,
            seed=request.seed,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            min_tokens=params.min_tokens,
            end_ids=ends,
            logit_bias=params.logit_bias,
        )

    def preempt(self, active: ActiveRequest) -> None:
        """Back to the head of the line; everything is computed again (the scheduler has released the blocks)."""
        request = active.request
        log.debug("%s is preempted after %d tokens", request.asked.request_id, len(request.output_ids))
        self.running.remove(active)
        self._free_slot(request)
        request.computed = 0
        request.to(Phase.PREEMPTED, self._now())
        self.loading.appendleft(active)
        self._observe_preemption()

    def publish(self, active: ActiveRequest) -> None:
        """Makes the full blocks of known tokens findable: stream order puts their writing before any reading."""
        if not self._prefix_caching:
            return
        request, size = active.request, self._limits.block_tokens
        known = min(request.computed, request.prompt_tokens + len(request.output_ids))
        while (active.published + 1) * size <= known:
            start = active.published * size
            active.key = next_key(active.key, _tokens(request, start, start + size))
            self.pool.publish(request.blocks[active.published], active.key)
            active.published += 1

    def take_out(self, active: ActiveRequest) -> None:
        """Removes a request from where it is, with all that it holds; while a plan aside is under way, that stays."""
        request = active.request
        if active in self.running:
            self.running.remove(active)
            if active.is_aside:
                self._leaving.append(active)
                return
        elif active in self.loading:
            self.loading.remove(active)
        else:
            self.waiting.remove(request.asked.tenant, active)
        self._give_back(active)

    def _give_back(self, active: ActiveRequest) -> None:
        request = active.request
        if request.slot is not None:
            self.pool.release(request.blocks)
            self._free_slot(request)
        if active.adapter is not None:
            if active.holds_adapter:
                self._manager.release(active.adapter)
            self._manager.unpin(active.adapter)

    def _free_slot(self, request: Request) -> None:
        """The slot of a request whose blocks have been released. What the device was still to be told of them is void:
        the blocks may be gone by then."""
        assert request.slot is not None
        self._starts = [start for start in self._starts if start.slot != request.slot]
        self._grants = [grant for grant in self._grants if grant.slot != request.slot]
        self._free_slots.append(request.slot)
        request.slot, request.blocks = None, []


def _tokens(request: Request, start: int, end: int) -> tuple[int, ...]:
    """Tokens of positions [start, end) of prompt ‖ output."""
    prompt = request.prompt_tokens
    if end <= prompt:
        return request.asked.prompt_ids[start:end]
    return (*request.asked.prompt_ids[start:], *request.output_ids[max(0, start - prompt) : end - prompt])
