"""An unfinished request: its state, its stream of tokens, its text, its adapter and its prefix key.

`ActiveRequest` is the only writer of `core.request.Request`: each change of a request is one of its methods.

    waiting ─ wait_for_adapter ─ start ─ schedule, record_token … ─ finish
                                   └──── preempt: the request starts again and computes its tokens again
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

from caraserve.core.backend import Limits
from caraserve.core.batch import BASE_ADAPTER_SLOT, RowResult, ScheduledRow
from caraserve.core.grammar import TokenMatcher
from caraserve.core.request import Finish, FinishReason, Phase, Phases, Request, TokenDelta, TokenLogprob
from caraserve.engine.unread import FREE_BYTES, UnreadAnswer, size_of
from caraserve.errors import CaraServeError, ReaderTooSlow
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.start_policy import ModeChoice
from caraserve.tokenizer.detokenizer import Detokenizer


class TokenStream:
    """Async iterator of a request's `TokenDelta`s; the last one has `finish` set, also when the request fails.

    Deltas since the reader's last read are merged into one, of about `FREE_BYTES` at most.
    """

    def __init__(
        self,
        on_cancel: Callable[[], None],
        unread: UnreadAnswer,
        served_by: Callable[[], str] = str,
        phases: Callable[[], Phases] = Phases,
    ) -> None:
        """`unread`: what is unread of the answer that this is a part of. `served_by`: returns what answers, as
        `adapter@digest`, or the base model's name; empty while the digest is unknown, because the adapter is still
        being uploaded. `phases`: returns the request's times until now."""
        self.served_by, self.phases, self.unread = served_by, phases, unread
        self._on_cancel = on_cancel
        self._pending: list[TokenDelta] = []
        self._pending_bytes = self._taken_bytes = 0  # taken: the last delta, which the reader has yet to send
        self._ready = asyncio.Event()
        self._is_counted = True
        self._ended = False
        self._failure: ReaderTooSlow | None = None
        unread.parts.append(ref(self))

    def put(self, delta: TokenDelta) -> None:
        """Adds a delta. Only `ActiveRequest` calls it."""
        if delta.finish is not None:
            # The callback refers to the request, and the request to this stream: without the cycle both are freed at
            # once. With it, the garbage collector took 5 to 11 ms at a time to free requests with logprobs.
            self._on_cancel = _do_nothing
        self._pending.append(delta)
        if self._is_counted:
            num_bytes = size_of(delta)
            self._pending_bytes += num_bytes
            self.unread.add(num_bytes)
        self._ready.set()

    def cancel(self) -> None:
        """Cancels the request, which frees its slot, KV blocks and adapter within an iteration. No effect if it has
        ended, but that what is unread does not count any more."""
        self._on_cancel()
        self._end_count()

    def end_unread(self, error: ReaderTooSlow) -> None:
        """Ends the request, because its reader is too slow; that gets `error` next."""
        self.cancel()
        self._pending, self._failure = [], error
        self._ready.set()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenDelta:
        self._note_read()
        if self._ended:
            raise StopAsyncIteration
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        taken = self._take()
        delta = taken[0] if len(taken) == 1 else merge_deltas(taken)
        if delta.finish is not None:
            self._ended = True
            self._end_count()
        return delta

    def _take(self) -> list[TokenDelta]:
        """Takes what is pending, at most about `FREE_BYTES`: the reader keeps it until it is sent."""
        taken, num_bytes = self._pending, self._pending_bytes
        if num_bytes <= FREE_BYTES:
            self._pending = []
        else:
            count = max(1, len(taken) * FREE_BYTES // num_bytes)
            taken, self._pending = taken[:count], taken[count:]
            num_bytes = sum(map(size_of, taken))
        if not self._pending:
            self._ready.clear()
        self._pending_bytes -= num_bytes
        self._taken_bytes = num_bytes
        return taken

    def _note_read(self) -> None:
        """Counts the last delta as read."""
        if self._taken_bytes:
            self.unread.read(self._taken_bytes)
            self._taken_bytes = 0

    def _end_count(self) -> None:
        """Counts all as read, and nothing more."""
        self._is_counted = False
        self._taken_bytes += self._pending_bytes
        self._pending_bytes = 0
        self._note_read()


def _do_nothing() -> None:
    pass


def merge_deltas(deltas: list[TokenDelta]) -> TokenDelta:
    """Returns one delta with the contents of consecutive ones."""
    return TokenDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=tuple(logprob for delta in deltas for logprob in delta.prompt_logprobs),
        finish=deltas[-1].finish,
        embedding=deltas[-1].embedding,
    )


class TokenText(NamedTuple):
    """The text that an output token adds, and the reasons if the request ends with it."""

    text: str
    reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request from its submission to its end. Identity is the object."""

    request: Request
    stream: TokenStream
    detokenizer: Detokenizer
    adapter: Adapter | None  # None: the base model
    prefix_key: bytes = b""  # of the last KV block published
    published: int = 0  # KV blocks published
    reused: int = 0  # KV blocks found by their prefix when it last took a slot
    holds_adapter: bool = False  # whether `adapter` is acquired for it, since its admission
    assist: bool = False  # whether CPU workers may compute layers of `adapter` that have not arrived
    in_side_batch: bool = False  # whether a side batch with it is under way
    waits_for_whole_adapter: bool = False  # whether it starts only when all of its adapter is in host memory
    choice: ModeChoice | None = None  # the start that mode `auto` has chosen for it
    matcher: TokenMatcher | None = None  # of its grammar, while it has a slot
    prompt_scored: int = 0  # prompt tokens whose scores were sent
    first_token_s: float | None = None
    last_token_s: float | None = None

    # --- state ---

    @property
    def is_finished(self) -> bool:
        return self.request.phase is Phase.FINISHED

    @property
    def adapter_slot(self) -> int:
        """Its adapter's entry of the device's adapter table; 0 for the base model."""
        return BASE_ADAPTER_SLOT if self.adapter is None else self.adapter.slot

    @property
    def is_streamed(self) -> bool:
        """Whether its adapter is copied to the device while it is still being downloaded."""
        return self.adapter is not None and self.adapter.tier is AdapterTier.STREAMING

    @property
    def can_run(self) -> bool:
        """Whether it may be in an iteration: its adapter is on the device or being copied from host memory, and neither
        still being downloaded nor about to leave the device."""
        adapter = self.adapter
        return adapter is None or (adapter.tier in (AdapterTier.COPYING, AdapterTier.DEVICE) and adapter.takes_requests)

    def needs_side_batch(self, limits: Limits) -> bool:
        """Returns whether a running request is in a side batch, or must be in one next instead of an iteration."""
        if self.in_side_batch or not self.can_run:
            return True
        if not (limits.assisted_batches and self.assist and self.request.phase is Phase.PREFILL):
            return False
        return self.adapter is not None and self.adapter.tier is AdapterTier.COPYING

    # --- waiting, and taking a slot ---

    def wait_for_adapter(self, now_s: float) -> None:
        """Counts the time from now on as loading, unless the request was preempted or needs no adapter."""
        if self.request.phase is Phase.WAITING and self.adapter is not None:
            self.request.move_to(Phase.LOADING, now_s)

    def wait_for_whole_adapter(self) -> None:
        """Lets the request start only when all of its adapter is in host memory."""
        self.waits_for_whole_adapter = True
        if self.choice is not None and not self.choice.is_observed:
            self.choice = None  # its prediction was for a start before that

    def start(
        self,
        slot: int,
        prefix: Sequence[int],
        prefix_key: bytes,
        block_tokens: int,
        now_s: float,
        matcher: TokenMatcher | None = None,
    ) -> None:
        """Records the slot, KV blocks `prefix` that hold the first tokens already, and the matcher. `prefix_key`: of
        the last block."""
        request, self.matcher = self.request, matcher
        request.slot = slot
        request.blocks += prefix
        request.computed = len(prefix) * block_tokens
        request.cached_tokens = max(request.cached_tokens, min(request.computed, request.prompt_tokens))
        self.prefix_key, self.published, self.reused = prefix_key, len(prefix), len(prefix)
        request.move_to(Phase.PREFILL, now_s)

    def release_slot(self) -> None:
        """Clears the slot and the KV blocks, which the caller has released, and the matcher."""
        self.request.slot, self.request.blocks, self.matcher = None, [], None

    def preempt(self, now_s: float) -> None:
        """Returns a running request to the state before its start: all its tokens are computed again."""
        self.release_slot()
        self.request.computed = 0
        self.request.move_to(Phase.PREEMPTED, now_s)

    # --- batches ---

    def schedule(self, row: ScheduledRow, blocks: Sequence[int]) -> None:
        """Counts the tokens of a launched row as computed. `blocks`: KV blocks granted for it."""
        self.request.blocks += blocks
        self.request.computed += row.count
        self.request.launched_outputs += row.samples

    def rollback(self, row: ScheduledRow) -> None:
        """Uncounts a launched row of which nothing was computed. It is launched again, without CPU workers."""
        self.request.computed -= row.count
        self.request.launched_outputs -= row.samples
        self.assist = False

    def record_waits(self, result: RowResult, interrupted_ms: float) -> None:
        """Adds the time for which a batch waited for this request's adapter and, `interrupted_ms`, for other
        adapters."""
        self.request.cpu_layers += result.cpu_layers
        self.request.cpu_lora_ms += result.cpu_lora_ms
        self.request.stalled_ms += result.waited_ms
        self.request.interrupted_ms += interrupted_ms

    def record_interruption(self, ms: float) -> None:
        """Adds time in which no iteration ran because of a load."""
        self.request.interrupted_ms += ms

    def record_token(self, token: int, eos_ids: frozenset[int], max_context: int, now_s: float) -> TokenText:
        """Adds an output token. Returns its text, and the reasons if the request ends with it."""
        request, params = self.request, self.request.inputs.params
        request.output_ids.append(token)
        if request.phase is Phase.PREFILL:
            request.move_to(Phase.DECODE, now_s)
        may_stop = len(request.output_ids) >= params.min_tokens
        reason, stop_reason = request.ended_by(token, eos_ids) if may_stop else (None, None)
        text = ""
        if reason is None or params.include_stop_str_in_output:
            text, stop = self.detokenizer.push(token, may_stop=may_stop)
            if reason is None and stop is not None:
                reason, stop_reason = "stop", stop
        if reason is None and not request.wants_more(max_context):
            reason = "length"
        return TokenText(text, reason, stop_reason)

    def send_prompt_scores(self, row: ScheduledRow, result: RowResult) -> None:
        """Sends scores of prompt tokens, each once: a preempted request computes them again."""
        new = result.prompt_scored[max(0, self.prompt_scored - row.start) :]
        if not new:
            return
        first: tuple[TokenLogprob | None, ...] = (None,) if self.prompt_scored == 0 else ()
        self.prompt_scored += len(new)
        self.stream.put(TokenDelta("", (), prompt_logprobs=(*first, *new)))

    def finish(
        self,
        reason: FinishReason,
        now_s: float,
        *,
        stop_reason: str | int | None = None,
        error: CaraServeError | None = None,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        embedding: bytes | None = None,
    ) -> Finish:
        """Ends the request and sends its last delta, which contains the returned `Finish`."""
        request = self.request
        request.move_to(Phase.FINISHED, now_s)
        finish = Finish(
            reason=reason,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=len(request.output_ids),
            cached_tokens=request.cached_tokens,
            phases=request.phases(now_s, "" if self.choice is None else self.choice.name),
            stop_reason=stop_reason,
            error=error,
            served_by=self.stream.served_by(),
        )
        text += self.detokenizer.flush()
        self.stream.put(TokenDelta(text, token_ids, logprobs, finish=finish, embedding=embedding))
        return finish
