"""The reasoning before an answer, as a grammar: that of the answer applies after it, and its length may be limited."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from caraserve.core.grammar import Grammar, TokenMatcher
from caraserve.core.token_filter import every_token, mask_of

_Mask = NDArray[np.uint32]


class ReasoningState(Enum):
    """How far the reasoning is."""

    NOT_BEGUN = "not begun"
    UNDER_WAY = "under way"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReasoningTokens:
    """The tokens around the reasoning."""

    begin_id: int
    end_id: int


@dataclass(frozen=True, slots=True, eq=False)
class ReasoningGrammar:
    """A `Grammar` of answers that may begin with reasoning. `state`: where the prompt ends. `budget_tokens`: after so
    many the end of the reasoning is chosen; None without a limit. `grammar`: what follows it, None if that is free;
    with one, the reasoning cannot be ended by `end_ids`, the tokens that end an answer."""

    tokens: ReasoningTokens
    state: ReasoningState
    budget_tokens: int | None
    grammar: Grammar | None
    end_ids: Sequence[int]
    vocab_size: int

    async def prepare(self) -> None:
        if self.grammar is not None:
            await self.grammar.prepare()

    def matcher(self, output_ids: Sequence[int] = ()) -> TokenMatcher:
        matcher = _ReasoningMatcher(self)
        for token_id in output_ids:
            matcher.append(token_id)
        return matcher


class _ReasoningMatcher:
    """The `TokenMatcher` of one answer."""

    def __init__(self, grammar: ReasoningGrammar) -> None:
        self._grammar, self._state = grammar, grammar.state
        self._answer = None if grammar.grammar is None else grammar.grammar.matcher()
        self._count = 0  # tokens of the reasoning

    def append(self, token_id: int) -> None:
        tokens = self._grammar.tokens
        if self._state is ReasoningState.NOT_BEGUN and token_id == tokens.begin_id:
            self._state = ReasoningState.UNDER_WAY
        elif self._state is ReasoningState.UNDER_WAY:
            self._count += 1
            if token_id == tokens.end_id:
                self._state = ReasoningState.ENDED
        else:
            self._state = ReasoningState.ENDED
            if self._answer is not None:
                self._answer.append(token_id)

    def write_mask(self, mask: _Mask) -> None:
        if self._state is ReasoningState.UNDER_WAY:
            self._write_reasoning_mask(mask)
            return
        if self._answer is None:
            mask[:] = every_token(self._grammar.vocab_size)
        else:
            self._answer.write_mask(mask)
        if self._state is ReasoningState.NOT_BEGUN:
            mask |= mask_of([self._grammar.tokens.begin_id], self._grammar.vocab_size)

    def _write_reasoning_mask(self, mask: _Mask) -> None:
        grammar = self._grammar
        if grammar.budget_tokens is not None and self._count >= grammar.budget_tokens:
            mask[:] = mask_of([grammar.tokens.end_id], grammar.vocab_size)
            return
        mask[:] = every_token(grammar.vocab_size)
        if self._answer is not None:
            mask &= ~mask_of(grammar.end_ids, grammar.vocab_size)
