"""Where open requests stand: waiting → loading → running, and what each place holds. Level 3.

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
from caraserve.engine.active_request import Open
from caraserve.engine.fair_queue import FairQueue
from caraserve.engine.scheduler import total_tokens
from caraserve.kv.prefix_keys import next_key, root_key
from caraserve.lora.adapter import Tier, Version
from caraserve.lora.manager import Residency
from caraserve.lora.start_policy import Choice, Start
from caraserve.util.units import ceil_div

log = logging.getLogger(__name__)

_MOST_AHEAD = 16  # one part in so many of all KV blocks may be asked for ahead of need
_PREFETCHED = 8  # requests in the queue whose adapters are read ahead


class Line:
    """The queues, the slots and the KV pool."""

    def __init__(
        self,
        limits: Limits,
        residency: Residency,
        eos_ids: frozenset[int],
        *,
        prefix_caching: bool,
        prefetching: bool,
        observe_preemption: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self.pool = residency.room.pool
        self.waiting: FairQueue[Open] = FairQueue(lambda opened: opened.request.asked.priority)
        self.loading: deque[Open] = deque()  # admitted; waits for its adapter, a slot or blocks
        self.running: list[Open] = []  # in the order of admission
        self._leaving: list[Open] = []  # ended, but a plan aside still uses what they hold
        self._limits, self._residency, self._eos_ids = limits, residency, eos_ids
        iteration_blocks = ceil_div(limits.max_step_tokens, limits.block_tokens) + limits.num_slots
        self._most_taken = iteration_blocks  # by one iteration
        self._ahead = max(1, min(iteration_blocks, residency.room.most_blocks // _MOST_AHEAD))
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
        waiting = (opened.request for opened in self.waiting)
        return sum(request.prompt_tokens + request.asked.params.max_tokens for request in waiting)

    def check(self) -> None:
        """Raises AssertionError when a slot or a block has no owner, or two."""
        holders = [*self.running, *self._leaving]
        self.pool.check([opened.request.blocks for opened in holders])
        assert len(self._free_slots) + len(holders) == self._limits.num_slots, "a slot is lost"
        assert all(opened.is_aside for opened in self._leaving), "one that has ended is kept for nothing"

    @property
    def is_settled(self) -> bool:
        """Whether all that ended requests held has been given back."""
        return not self._leaving

    def admit(self) -> None:
        """Queue → loading, as far as slots may come free. Adapters that are not on the device begin to load; those of
        the next in the queue are read ahead."""
        if self._residency.copies.claims_memory:
            self._residency.copies.go_on()  # blocks may have been given back since
        while self._places_taken() < self._limits.num_slots and self._residency.copies.admits:
            tenant = self.waiting.first()
            if tenant is None:
                break
            opened = self.waiting.pop(tenant)
            self.waiting.charge(opened.request.asked.tenant, opened.request.prompt_tokens, 0)
            self._hold_adapter(opened)
            self.loading.append(opened)
        if self.waiting and self._prefetching:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Only after a change of the queue or of the reads under way: there may be thousands of tenants."""
        seen = len(self.waiting), self._residency.loading
        if seen == self._read_ahead_at:
            return
        for opened in self.waiting.upcoming(_PREFETCHED):
            if opened.version is not None:
                self._residency.prefetch(opened.version)
        self._read_ahead_at = len(self.waiting), self._residency.loading

    def _places_taken(self) -> int:
        return len(self.loading) + len(self.running) + len(self._leaving)

    def start(self, begins_s: float) -> None:
        """Loading → running, as far as slots and blocks are free and adapters are there, or will be when an iteration
        that begins at `begins_s` needs them."""
        self.next_start_s, self._start_lacks, self.is_short = None, 0, False
        for opened in list(self.loading):
            if self._free_slots and self._may_start(opened, begins_s):
                if self._start(opened):
                    continue
                if opened.is_streamed:
                    opened.wait_for_whole()  # as it waits anyway
                    continue
                self.is_short = True
                break  # no blocks: later ones must not overtake for ever
            if opened.request.phase is Phase.WAITING and opened.version is not None:
                opened.request.to(Phase.LOADING, self._now())

    def _may_start(self, opened: Open, begins_s: float) -> bool:
        """Whether a request's adapter is on the device, or will be by the time that it is needed."""
        if opened.version is None:
            return True
        if opened.is_streamed and (opened.waits_whole or not self._may_stream()):
            return False
        start = self._start_of(opened, begins_s, may_assist=self._has_helpers())
        if start is None:
            return False
        opened.assist = start.assist
        self._note_choice(opened, opened.version, start)
        return self._is_time(start, begins_s)

    def _start_of(self, opened: Open, begins_s: float, *, may_assist: bool) -> Start | None:
        assert opened.version is not None
        left = total_tokens(opened.request) - opened.request.computed
        tokens = min(left, self._limits.max_step_tokens)
        return self._residency.arrivals.start_of(opened.version, tokens, begins_s, may_assist=may_assist)

    def _is_time(self, start: Start, begins_s: float) -> bool:
        if start.at_s <= begins_s:
            return True
        self.next_start_s = min(start.at_s, self.next_start_s or start.at_s)
        return False

    def _note_choice(self, opened: Open, version: Version, start: Start) -> None:
        if start.ends_s is None:
            return
        if opened.choice is None:
            is_there = version.tier is Tier.DEVICE
            opened.choice = Choice("cached" if is_there else "pipelined", self._now(), start.ends_s)
        if start.assist and not opened.choice.is_observed:
            opened.choice.name = "assisted"

    # --- plans aside ---

    def _has_helpers(self) -> bool:
        """Whether one more prompt may go aside; always, where they go with the others."""
        if not self._limits.aside_plans:
            return True
        helped = sum(self.goes_aside(opened) for opened in self.running)
        return helped + len(self._leaving) < self._limits.aside_plans

    def _may_stream(self) -> bool:
        """Whether one more prompt may go aside whose adapter is."""
        streamed = sum(opened.is_aside or opened.is_streamed for opened in self.running)
        return streamed + len(self._leaving) < self._limits.streamed_plans

    def goes_aside(self, opened: Open) -> bool:
        """Whether a plan aside is under way for a running request, or is to be launched next; in iterations it has no
        place."""
        if opened.is_aside or not opened.can_go_on:
            return True
        if not (self._limits.aside_plans and opened.assist and opened.request.phase is Phase.PREFILL):
            return False
        return opened.version is not None and opened.version.tier is Tier.COPYING

    def is_ready(self, opened: Open, begins_s: float) -> bool:
        """Whether a running request may be in an iteration that begins then: it would stop at layers of its adapter
        that have not arrived, and all others with it."""
        if opened.version is None or opened.version.tier is not Tier.COPYING or not self._limits.aside_plans:
            return True
        start = self._start_of(opened, begins_s, may_assist=False)
        return start is not None and self._is_time(start, begins_s)

    def set_back(self, opened: Open) -> None:
        """A running request whose adapter is not here yet gives up what it holds, and begins again when all of it is:
        its plan aside was recalled, or there are no blocks for one."""
        opened.wait_for_whole()
        self.pool.release(opened.request.blocks)
        self.preempt(opened)

    def begin_aside(self, opened: Open) -> None:
        """A plan aside is launched. Until it has ended, whatever becomes of the request, its slot, its blocks and its
        adapter stay as they are."""
        assert opened.version is not None
        opened.is_aside = True
        self._residency.begin_aside(opened.version)

    def end_aside(self, opened: Open) -> None:
        """It has ended."""
        assert opened.version is not None
        opened.is_aside = False
        self._residency.end_aside(opened.version)
        if opened in self._leaving:
            self._leaving.remove(opened)
            self._give_back(opened)

    # --- memory ---

    def growable(self) -> int:
        """KV blocks that there could be more; 0 while there are enough for any iteration."""
        return 0 if self.pool.available >= self._most_taken else self._residency.device.growable()

    def grow(self, lacking: int) -> None:
        """Asks for KV blocks where memory is shared: those that running requests lack, those that the next one to start
        lacks, and some ahead of need, so that normally nobody waits. The latter two come after adapters that admitted
        requests wait for."""
        self._residency.room.wanted_blocks = self.pool.num_blocks + lacking if lacking else 0
        short = self._ahead - self.pool.available
        if lacking or self._start_lacks or (self.running and short > 0):
            self._residency.copies.grow_kv(lacking, self._start_lacks + max(0, short) + self._ahead)

    # --- slots ---

    def _hold_adapter(self, opened: Open) -> None:
        if opened.version is None:
            self._residency.copies.passed(None)
        elif not opened.uses:
            opened.uses = True
            self._residency.use(opened.version)

    def _start(self, opened: Open) -> bool:
        """Gives a request a slot and the blocks of its longest known prefix. False when there is no room for it."""
        request = opened.request
        needed = ceil_div(total_tokens(request) + 1, self._limits.block_tokens)
        if self.running and needed > self.pool.available:
            lacks = needed - self.pool.available
            self._start_lacks = lacks if lacks <= self._residency.device.growable() else 0
            return False
        self.loading.remove(opened)
        request.slot = self._free_slots.pop()
        tokens = (*request.asked.prompt_ids, *request.output_ids)
        self._reuse_prefix(opened, tokens)
        self._starts.append(SlotStart(request.slot, tokens, self._sampling(request)))
        request.to(Phase.PREFILL, self._now())
        self.running.append(opened)
        return True

    def _reuse_prefix(self, opened: Open, tokens: tuple[int, ...]) -> None:
        """Takes published blocks from the front; at least one token is always computed."""
        request, size = opened.request, self._limits.block_tokens
        digest = opened.version.digest if opened.version else None
        opened.key, opened.published, opened.reused = root_key(digest, request.asked.cache_salt), 0, 0
        if not self._prefix_caching or request.asked.params.prompt_logprobs is not None:
            return
        while (opened.published + 1) * size < len(tokens):
            key = next_key(opened.key, tokens[opened.published * size : (opened.published + 1) * size])
            block = self.pool.find(key)
            if block is None:
                break
            request.blocks.append(block)
            opened.key, opened.published = key, opened.published + 1
        opened.reused = opened.published
        request.computed = opened.published * size
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

    def preempt(self, opened: Open) -> None:
        """Back to the head of the line; everything is computed again (the scheduler has released the blocks)."""
        request = opened.request
        log.debug("%s is preempted after %d tokens", request.asked.request_id, len(request.output_ids))
        self.running.remove(opened)
        self._free_slot(request)
        request.computed = 0
        request.to(Phase.PREEMPTED, self._now())
        self.loading.appendleft(opened)
        self._observe_preemption()

    def publish(self, opened: Open) -> None:
        """Makes the full blocks of known tokens findable: stream order puts their writing before any reading."""
        if not self._prefix_caching:
            return
        request, size = opened.request, self._limits.block_tokens
        known = min(request.computed, request.prompt_tokens + len(request.output_ids))
        while (opened.published + 1) * size <= known:
            start = opened.published * size
            opened.key = next_key(opened.key, _tokens(request, start, start + size))
            self.pool.publish(request.blocks[opened.published], opened.key)
            opened.published += 1

    def take_out(self, opened: Open) -> None:
        """Removes a request from where it is, with all that it holds; while a plan aside is under way, that stays."""
        request = opened.request
        if opened in self.running:
            self.running.remove(opened)
            if opened.is_aside:
                self._leaving.append(opened)
                return
        elif opened in self.loading:
            self.loading.remove(opened)
        else:
            self.waiting.remove(request.asked.tenant, opened)
        self._give_back(opened)

    def _give_back(self, opened: Open) -> None:
        request = opened.request
        if request.slot is not None:
            self.pool.release(request.blocks)
            self._free_slot(request)
        if opened.version is not None:
            if opened.uses:
                self._residency.unuse(opened.version)
            self._residency.unpin(opened.version)

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
