"""An open request with what belongs to it in this process. `queues.py` and `loop.py` are its only writers."""

from dataclasses import dataclass

from caraserve.core.batch import BASE_ADAPTER_SLOT, RowResult, ScheduledRow
from caraserve.core.request import Request, TokenDelta, TokenLogprob
from caraserve.engine.stream import Stream
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.start_policy import ModeChoice
from caraserve.tokenizer.detokenizer import Detokenizer


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """An open request with what belongs to it here: its stream, text, adapter version and prefix keys."""

    request: Request
    stream: Stream
    detokenizer: Detokenizer
    adapter: Adapter | None  # None: the base model
    key: bytes  # prefix key of the blocks published so far
    published: int = 0  # blocks published
    reused: int = 0  # blocks taken from the prefix index when it last took a slot
    holds_adapter: bool = False  # whether `adapter` is held on the device
    assist: bool = False  # whether CPU workers may compute layers of `adapter` that have not arrived
    is_aside: bool = False  # whether a plan aside with it is under way
    waits_whole: bool = False  # whether it starts only when all of its adapter is in host memory
    choice: ModeChoice | None = None  # how it began, where mode `auto` has chosen
    prompt_scored: int = 0
    last_token_s: float | None = None

    @property
    def adapter_slot(self) -> int:
        """Of the device's adapter table."""
        return BASE_ADAPTER_SLOT if self.adapter is None else self.adapter.slot

    @property
    def is_streamed(self) -> bool:
        """Whether layers of its adapter are still on their way to this host."""
        return self.adapter is not None and self.adapter.tier is AdapterTier.STREAMING

    @property
    def can_go_on(self) -> bool:
        """Whether it may be in an iteration: it may wait there for its adapter, but not for a network, nor be on one
        that is about to leave the device."""
        adapter = self.adapter
        return adapter is None or (adapter.tier in (AdapterTier.COPYING, AdapterTier.DEVICE) and adapter.takes_requests)

    def put_prompt_scores(self, row: ScheduledRow, result: RowResult) -> None:
        """Scores of prompt tokens, each once: a preempted request computes them again."""
        new = result.prompt_scored[max(0, self.prompt_scored - row.start) :]
        if not new:
            return
        first: tuple[TokenLogprob | None, ...] = (None,) if self.prompt_scored == 0 else ()
        self.prompt_scored += len(new)
        self.stream.put(TokenDelta("", (), prompt_logprobs=(*first, *new)))

    def wait_for_whole(self) -> None:
        """Its adapter is not here yet, and it waits until all of it is."""
        self.waits_whole = True
        if self.choice is not None and not self.choice.is_observed:
            self.choice = None  # it will begin otherwise
