"""The reasoning before an answer, as a grammar: that of the answer applies after it, and its length may be limited."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caraserve.core.grammar import Grammar, TokenMatcher
from caraserve.core.reasoning_progress import ReasoningProgress, ReasoningState
from caraserve.core.tenant import Tenant
from caraserve.core.token_filter import allow_tokens, ban_tokens, every_token

_Mask = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """The tokens around the reasoning. `begin_id`: None where no single token begins it. `end_ids`: the tokens that end
    it, one after the other. `past_end_ids`: by the part of the end mark that is written already, the tokens that
    complete it and go on with text of the answer."""

    begin_id: int | None
    end_ids: tuple[int, ...]
    past_end_ids: Mapping[bytes, Sequence[int]] = field(default_factory=dict)

    def next_end_id(self, last_ids: Sequence[int]) -> int:
        """Returns the token that goes on with the end mark after `last_ids`."""
        begun = range(min(len(last_ids), len(self.end_ids) - 1), 0, -1)
        return self.end_ids[next((size for size in begun if tuple(last_ids[-size:]) == self.end_ids[:size]), 0)]


@dataclass(frozen=True, slots=True, eq=False)
class ReasoningGrammar:
    """A `Grammar` of answers that may begin with reasoning. `state`: where the prompt ends. `budget_tokens`: after so
    many the end of the reasoning is chosen; None without a limit. `grammar`: what follows it, None if that is free;
    with one, the reasoning cannot be ended by `stop_ids`, the tokens that end an answer, and begins with a single token
    or in the prompt. `text_of`: the text that a token adds to the answer."""

    tokens: ReasoningTokens
    state: ReasoningState
    budget_tokens: int | None
    grammar: Grammar | None
    stop_ids: Sequence[int]
    vocab_size: int
    text_of: Callable[[int], bytes]

    async def prepare(self, tenant: Tenant) -> None:
        if self.grammar is not None:
            await self.grammar.prepare(tenant)

    def matcher(self, output_ids: Sequence[int] = ()) -> TokenMatcher:
        return _ReasoningMatcher(self, output_ids)


class _ReasoningMatcher:
    """The `TokenMatcher` of one answer."""

    def __init__(self, grammar: ReasoningGrammar, output_ids: Sequence[int]) -> None:
        self._grammar = grammar
        self._progress = ReasoningProgress(grammar.state, grammar.text_of)
        answer_ids = self._progress.add(output_ids)
        self._answer = None if grammar.grammar is None else grammar.grammar.matcher(answer_ids)
        self._last_ids = deque(output_ids, maxlen=len(grammar.tokens.end_ids) - 1)

    def append(self, token_id: int) -> None:
        self._last_ids.append(token_id)
        may_begin = self._progress.state is ReasoningState.NOT_BEGUN
        answer_ids = self._progress.add((token_id,))
        if self._answer is None or self._grammar.grammar is None:
            return
        if may_begin and not answer_ids:
            self._answer = self._grammar.grammar.matcher()  # what came before the reasoning is not of the answer
        for one in answer_ids:
            self._answer.append(one)

    def write_mask(self, mask: _Mask) -> None:
        if self._progress.state is ReasoningState.UNDER_WAY:
            self._write_reasoning_mask(mask)
            return
        if self._answer is None:
            mask[:] = every_token(self._grammar.vocab_size)
        else:
            self._answer.write_mask(mask)
        if self._progress.may_begin_next and self._grammar.tokens.begin_id is not None:
            allow_tokens(mask, [self._grammar.tokens.begin_id])

    def _write_reasoning_mask(self, mask: _Mask) -> None:
        grammar, progress = self._grammar, self._progress
        if grammar.budget_tokens is not None and progress.num_tokens >= grammar.budget_tokens:
            mask[:] = 0
            allow_tokens(mask, [grammar.tokens.next_end_id(tuple(self._last_ids))])
            return
        mask[:] = every_token(grammar.vocab_size)
        if self._answer is not None:
            ban_tokens(mask, grammar.stop_ids)
            ban_tokens(mask, grammar.tokens.past_end_ids.get(progress.end_part, ()))
