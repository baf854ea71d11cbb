"""The token counts and times of a whole response, which its usage, its phases header and its log line report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from caraserve.core.request import Finish, FinishReason, Phases
from caraserve.util.tasks import in_turns


class TokenCounts(NamedTuple):
    """The tokens of one engine request, or of all of a response."""

    prompt: int
    completion: int
    cached: int  # of the prompt


@dataclass(frozen=True, slots=True)
class ResponseTotals:
    """Sums over the engine requests of one API request. `slowest`: the phases of the one that took longest."""

    tokens: TokenCounts
    reasons: tuple[FinishReason, ...]  # each once, in the order of the answers
    slowest: Phases
    served_by: str  # `adapter@digest`, or the base model's name

    @classmethod
    async def of(cls, finishes: Sequence[Finish], n: int) -> Self:
        """Adds up at least one finish, in turns of the event loop: there may be 2,048. The tokens of a prompt, which
        has `n` answers in a row, count once."""
        prompt_tokens = completion_tokens = cached_tokens = 0
        reasons: dict[FinishReason, None] = {}
        slowest, longest_ms = finishes[0].phases, 0.0
        async for position, finish in in_turns(enumerate(finishes)):
            if position % n == 0:
                prompt_tokens += finish.prompt_tokens
                cached_tokens += finish.cached_tokens
            completion_tokens += finish.completion_tokens
            reasons[finish.reason] = None
            if (e2e_ms := finish.phases.e2e_ms) > longest_ms:
                slowest, longest_ms = finish.phases, e2e_ms
        return cls(
            TokenCounts(prompt_tokens, completion_tokens, cached_tokens), tuple(reasons), slowest, finishes[0].served_by
        )

    def phases(self) -> str:
        """Returns the phases of the slowest answer as the value of a header, in milliseconds."""
        phases = self.slowest
        return (
            f"queued={phases.queued_ms:.3f};load={phases.load_ms:.3f};"
            f"prefill={phases.prefill_ms:.3f};decode={phases.decode_ms:.3f};"
            f"stalled={phases.stalled_ms:.3f};interrupted={phases.interrupted_ms:.3f};"
            f"cpu_lora={phases.cpu_lora_ms:.3f};cpu_layers={phases.cpu_layers}"
        )
