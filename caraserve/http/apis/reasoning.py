"""Reads the fields of a chat's reasoning: whether the model reasons first, how long, and whether the client sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from caraserve.core.grammar import Grammar
from caraserve.core.reasoning_grammar import ReasoningGrammar, ReasoningState, ReasoningTokens
from caraserve.core.request import SamplingParams
from caraserve.errors import InvalidRequest
from caraserve.http import body_fields
from caraserve.http.validation import Fields
from caraserve.loop import Engine
from caraserve.tokenizer.reasoning import BEGIN, BLANKS, END, ReasoningFormat, ReasoningParser
from caraserve.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of one chat's answers. `state`: how far it is at the end of the prompt. `budget_tokens`: None
    without a limit. `is_shown`: whether the client sees it. `kept_special_ids`: those of its marks that are special
    tokens, which must be in the text that is divided."""

    format: ReasoningFormat
    state: ReasoningState
    budget_tokens: int | None
    is_shown: bool
    kept_special_ids: frozenset[int]

    def parser(self) -> ReasoningParser:
        """Returns the parser of one answer."""
        return ReasoningParser(self.state)

    def before(self, grammar: Grammar | None, params: SamplingParams, tokenizer: Tokenizer) -> Grammar | None:
        """Returns the grammar of answers that reason first and then follow `grammar`; None if nothing is asked of
        them."""
        if self.state is ReasoningState.ENDED or (grammar is None and self.budget_tokens is None):
            return grammar
        return ReasoningGrammar(
            self.format.tokens,
            self.state,
            self.budget_tokens,
            grammar,
            (*params.stop_token_ids, *tokenizer.eos_ids),
            tokenizer.vocab_size,
            _blank_test(params, tokenizer),
        )

    def token_count(self, params: SamplingParams, tokenizer: Tokenizer) -> "ReasoningTokenCount":
        """Returns the counter of one answer."""
        return ReasoningTokenCount(self.format.tokens, self.state, _blank_test(params, tokenizer))


class ReasoningTokenCount:
    """Counts the tokens of one answer's reasoning, without its marks."""

    def __init__(self, tokens: ReasoningTokens, state: ReasoningState, is_blank: Callable[[int], bool]) -> None:
        self.num_tokens = 0
        self._tokens, self._state, self._is_blank = tokens, state, is_blank

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of the answer."""
        ids = token_ids
        if self._state is ReasoningState.NOT_BEGUN:
            first = next((at for at, one in enumerate(ids) if not self._is_blank(one)), None)
            if first is None:
                return
            is_begin = ids[first] == self._tokens.begin_id
            self._state = ReasoningState.UNDER_WAY if is_begin else ReasoningState.ENDED
            ids = ids[first + 1 :]
        if self._state is ReasoningState.UNDER_WAY:
            is_ended = self._tokens.end_id in ids
            self.num_tokens += ids.index(self._tokens.end_id) if is_ended else len(ids)
            self._state = ReasoningState.ENDED if is_ended else self._state


def _blank_test(params: SamplingParams, tokenizer: Tokenizer) -> Callable[[int], bool]:
    """Returns whether a token's text is white space or nothing, as a function."""

    def is_blank(token_id: int) -> bool:
        if token_id in params.kept_special_ids:
            return False
        return not tokenizer.decode([token_id], skip_special_tokens=params.skip_special_tokens).strip(BLANKS)

    return is_blank


def parse_reasoning(fields: Fields, engine: Engine, prompt_ids: tuple[int, ...]) -> Reasoning | None:
    """Reads the fields of the reasoning after the prompt is known; None for a model that does not reason. Raises
    InvalidRequest."""
    tokenizer = engine.tokenizer
    budget_tokens = body_fields.THINKING_TOKEN_BUDGET.read(fields)
    budget_tokens = None if budget_tokens is None or budget_tokens < 0 else budget_tokens
    is_shown = body_fields.INCLUDE_REASONING.read(fields)
    if (reasoning_format := tokenizer.reasoning_format) is None:
        if budget_tokens is not None:
            raise InvalidRequest(
                "thinking_token_budget is not supported by this model, whose chat template has no reasoning.",
                param="thinking_token_budget",
            )
        if fields.raw("include_reasoning") is not None:
            fields.skip("include_reasoning")
        return None
    state = reasoning_format.state_after(prompt_ids, tokenizer.token_text)
    if _continues_reasoning(fields):
        state = ReasoningState.UNDER_WAY
    return Reasoning(
        reasoning_format,
        state,
        budget_tokens,
        is_shown,
        frozenset(one for one in map(tokenizer.special_id, (BEGIN, END)) if one is not None),
    )


def template_arguments(fields: Fields, reasoning_format: ReasoningFormat | None) -> dict[str, Any]:
    """Returns the arguments of the chat template: those that the client gives, and what `reasoning_effort` says by the
    template's own ones. Raises InvalidRequest if a model that reasons cannot be told not to."""
    given, effort = fields.mapping("chat_template_kwargs"), body_fields.REASONING_EFFORT.read(fields)
    if effort is None:
        return given
    if reasoning_format is None:
        fields.skip("reasoning_effort")
        return given
    switch = reasoning_format.switch
    if effort == "none" and switch is None:
        raise InvalidRequest(
            "reasoning_effort cannot be none: the model's chat template cannot leave the reasoning out; send "
            "thinking_token_budget to limit it.",
            param="reasoning_effort",
        )
    by_effort: dict[str, Any] = {} if switch is None else {switch: effort != "none"}
    if reasoning_format.takes_effort and effort != "none":
        by_effort["reasoning_effort"] = effort
    if not by_effort:
        fields.skip("reasoning_effort")
    return by_effort | given


def _continues_reasoning(fields: Fields) -> bool:
    """Whether the answer continues a message that ends within the reasoning."""
    if not body_fields.CONTINUE_FINAL_MESSAGE.read(fields):
        return False
    content = fields.raw("messages")[-1].get("content")
    return isinstance(content, str) and content.rfind(BEGIN) > content.rfind(END)
