"""The reasoning before an answer, as a grammar: that of the answer applies after it, and its length may be limited."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from caraserve.core.grammar import Grammar, TokenMatcher
from caraserve.core.token_filter import allow_tokens, ban_tokens, every_token

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
    with one, the reasoning cannot be ended by `end_ids`, the tokens that end an answer. `is_blank`: whether a token's
    text is white space or nothing, which may come before the reasoning."""

    tokens: ReasoningTokens
    state: ReasoningState
    budget_tokens: int | None
    grammar: Grammar | None
    end_ids: Sequence[int]
    vocab_size: int
    is_blank: Callable[[int], bool]

    async def prepare(self) -> None:
        if self.grammar is not None:
            await self.grammar.prepare()

    def matcher(self, output_ids: Sequence[int] = ()) -> TokenMatcher:
        ids, state, count = list(output_ids), self.state, 0
        if state is ReasoningState.NOT_BEGUN:
            first = next((at for at, one in enumerate(ids) if not self.is_blank(one)), len(ids))
            if ids[first : first + 1] == [self.tokens.begin_id]:
                state, ids = ReasoningState.UNDER_WAY, ids[first + 1 :]
            elif first < len(ids):
                state = ReasoningState.ENDED
        if state is ReasoningState.UNDER_WAY:
            is_ended = self.tokens.end_id in ids
            count = ids.index(self.tokens.end_id) + 1 if is_ended else len(ids)
            state, ids = ReasoningState.ENDED if is_ended else state, ids[count:]
        return _ReasoningMatcher(self, state, count, None if self.grammar is None else self.grammar.matcher(ids))


class _ReasoningMatcher:
    """The `TokenMatcher` of one answer."""

    def __init__(
        self, grammar: ReasoningGrammar, state: ReasoningState, count: int, answer: TokenMatcher | None
    ) -> None:
        """`count`: of the tokens of the reasoning. `answer`: the matcher of what follows it."""
        self._grammar, self._state, self._count, self._answer = grammar, state, count, answer

    def append(self, token_id: int) -> None:
        tokens = self._grammar.tokens
        if self._state is ReasoningState.NOT_BEGUN and token_id == tokens.begin_id:
            self._state = ReasoningState.UNDER_WAY
            if self._grammar.grammar is not None:  # white space before the reasoning is not of the answer
                self._answer = self._grammar.grammar.matcher()
        elif self._state is ReasoningState.UNDER_WAY:
            self._count += 1
            if token_id == tokens.end_id:
                self._state = ReasoningState.ENDED
        else:
            if self._state is ReasoningState.NOT_BEGUN and not self._grammar.is_blank(token_id):
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
            allow_tokens(mask, [self._grammar.tokens.begin_id])

    def _write_reasoning_mask(self, mask: _Mask) -> None:
        grammar = self._grammar
        if grammar.budget_tokens is not None and self._count >= grammar.budget_tokens:
            mask[:] = 0
            allow_tokens(mask, [grammar.tokens.end_id])
            return
        mask[:] = every_token(grammar.vocab_size)
        if self._answer is not None:
            ban_tokens(mask, grammar.end_ids)
