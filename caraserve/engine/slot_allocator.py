"""The backend's slots, and the KV blocks of the requests in them: reused by prefix, published, released."""

from collections.abc import Iterable, Sequence

from caraserve.core.backend import Backend
from caraserve.core.batch import BlockGrant, SlotSampling, SlotStart
from caraserve.core.request import Request
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.scheduler import total_tokens
from caraserve.kv.block_pool import activated_key, next_key, root_key
from caraserve.lora.manager import AdapterManager
from caraserve.util.units import ceil_div


class SlotAllocator:
    """Assigns slots and prefixes to requests, and releases them. Runs on the event loop."""

    def __init__(
        self, backend: Backend, manager: AdapterManager, eos_ids: frozenset[int], *, prefix_caching: bool
    ) -> None:
        limits = backend.limits
        self.pool = manager.memory.pool
        # No iteration takes more: as long as so many are free, the pool need not grow.
        self.iteration_blocks = ceil_div(limits.max_step_tokens, limits.block_tokens) + limits.num_slots
        self._backend, self._limits, self._manager, self._eos_ids = backend, limits, manager, eos_ids
        self._prefix_caching = prefix_caching and not limits.state_bytes  # blocks lack the state after them
        self._free = list(range(limits.num_slots - 1, -1, -1))
        self._starts: list[SlotStart] = []  # of requests that took a slot since the last launch
        self._grants: list[BlockGrant] = []  # their reused prefixes

    @property
    def are_free(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def growable(self) -> int:
        """Returns how many KV blocks could be added; 0 while there are enough for any iteration."""
        return 0 if self.pool.available >= self.iteration_blocks else self._manager.device_cache.growable()

    def blocks_for(self, request: Request) -> int:
        """Returns the KV blocks that a request needs to compute its tokens so far and one more."""
        return ceil_div(total_tokens(request) + 1, self._limits.block_tokens)

    def start(self, active: ActiveRequest, now_s: float) -> None:
        """Gives a request a slot, and the published KV blocks of its longest prefix."""
        request, slot = active.request, self._free.pop()
        active.find_activation()
        tokens = (*request.inputs.prompt_ids, *request.output_ids)
        blocks, key = self._find_prefix(active, tokens)
        grammar = request.inputs.params.grammar
        matcher = None if grammar is None else grammar.matcher(request.output_ids)
        active.start(slot, blocks, key, self._limits.block_tokens, now_s, matcher)
        embeds = request.inputs.prompt_embeds
        self._starts.append(SlotStart(slot, tokens, self._sampling(request), embeds.values if embeds else None))
        if blocks:
            self._grants.append(BlockGrant(slot, 0, tuple(blocks)))

    def _find_prefix(self, active: ActiveRequest, tokens: tuple[int, ...]) -> tuple[list[int], bytes]:
        """Returns published blocks that hold the first tokens, now held by the request, and the last block's key. They
        leave at least one token to compute."""
        request, size = active.request, self._limits.block_tokens
        digest = active.adapter.digest if active.adapter and not request.base_tokens else None
        key = root_key(digest, request.inputs.cache_salt, request.inputs.tenant)
        blocks: list[int] = []
        needs_all = request.inputs.params.prompt_logprobs is not None or request.inputs.averages
        if not self._prefix_caching or needs_all:
            return blocks, key
        while (len(blocks) + 1) * size < len(tokens):
            held = tokens[len(blocks) * size : (len(blocks) + 1) * size]
            following = self._next_key(active, len(blocks), key, held)
            block = self.pool.find(following)
            if block is None:
                break
            blocks.append(block)
            key = following
        return blocks, key

    def _next_key(self, active: ActiveRequest, block: int, previous: bytes, tokens: Sequence[int]) -> bytes:
        """Returns the key of a request's block, which holds `tokens`. `previous`: key of the block before."""
        first = active.request.base_tokens
        if active.adapter is not None and first and block == first // self._limits.block_tokens:
            previous = activated_key(previous, active.adapter.digest, first)
        return next_key(previous, tokens, active.request.inputs.prompt_embeds)

    def _sampling(self, request: Request) -> SlotSampling:
        params = request.inputs.params
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

    def take_new(self) -> tuple[tuple[SlotStart, ...], tuple[BlockGrant, ...]]:
        """Returns starts and reused blocks since the last call, of requests that the next batch must contain."""
        new = tuple(self._starts), tuple(self._grants)
        self._starts, self._grants = [], []
        return new

    def publish(self, active: ActiveRequest) -> None:
        """Publishes the request's full blocks of known tokens, so that other requests reuse them. The batch that fills
        them must be launched already: batches run in launch order, so later ones read what it has written."""
        if not self._prefix_caching:
            return
        request, size = active.request, self._limits.block_tokens
        known = min(request.computed, request.prompt_tokens + len(request.output_ids))
        while (active.published + 1) * size <= known:
            start = active.published * size
            held = _tokens(request, start, start + size)
            active.prefix_key = self._next_key(active, active.published, active.prefix_key, held)
            self.pool.publish(request.blocks[active.published], active.prefix_key)
            active.published += 1

    def release(self, active: ActiveRequest) -> None:
        """Releases the slot, the KV blocks and the adapter of a request that has ended or whose client has left."""
        if active.request.slot is not None:
            self.pool.release(active.request.blocks)
            self._free_slot(active.request, active.request.slot)
            active.release_slot()
        if active.adapter is not None:
            if active.holds_adapter:
                self._manager.release(active.adapter)
            self._manager.unpin(active.adapter)

    def preempt(self, active: ActiveRequest, now_s: float) -> None:
        """Preempts a request and frees its slot. Its KV blocks have been released before."""
        assert active.request.slot is not None
        self._free_slot(active.request, active.request.slot)
        active.preempt(now_s)

    def _free_slot(self, request: Request, slot: int) -> None:
        if request.inputs.prompt_embeds is not None:
            self._backend.release_vectors(slot)
        # A start that is not launched yet must not reach the device: its blocks may have another owner by then.
        self._starts = [start for start in self._starts if start.slot != slot]
        self._grants = [grant for grant in self._grants if grant.slot != slot]
        self._free.append(slot)

    def check(self, holders: Iterable[ActiveRequest]) -> None:
        """Raises AssertionError unless `holders` account for every slot and block that is not free."""
        requests = [active.request for active in holders]
        self.pool.check([request.blocks for request in requests])
        assert len(self._free) + len(requests) == self._limits.num_slots, "a slot is lost"


def _tokens(request: Request, start: int, end: int) -> tuple[int, ...]:
    """Returns the tokens at positions [start, end) of prompt ‖ output."""
    prompt = request.prompt_tokens
    if end <= prompt:
        return request.inputs.prompt_ids[start:end]
    return (*request.inputs.prompt_ids[start:], *request.output_ids[max(0, start - prompt) : end - prompt])
