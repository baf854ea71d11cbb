"""Reads the fields of a chat's reasoning: whether the model reasons first, how long, and whether the client sees it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from caraserve.core.grammar import Grammar
from caraserve.core.reasoning_grammar import ReasoningGrammar
from caraserve.core.reasoning_progress import ReasoningProgress, ReasoningState
from caraserve.core.request import SamplingParams, TokenDelta
from caraserve.errors import InvalidRequest
from caraserve.http.apis.chat_format import ChatFormat
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields
from caraserve.tokenizer.reasoning import BEGIN, END, ReasoningFormat, ReasoningParser, state_after
from caraserve.tokenizer.tokenizer import Tokenizer
from caraserve.util.tasks import in_turns, slices

_SLICE = 1024  # tokens added at once


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
        """Returns the grammar of answers that reason first and then follow `grammar`; None if none is needed."""
        if self.state is ReasoningState.ENDED or (grammar is None and self.budget_tokens is None):
            return grammar
        return ReasoningGrammar(
            self.format.tokens,
            self.state,
            self.budget_tokens,
            grammar,
            (*params.stop_token_ids, *tokenizer.eos_ids),
            tokenizer.vocab_size,
            _text_of(params, tokenizer),
        )

    def progress(self, params: SamplingParams, tokenizer: Tokenizer) -> ReasoningProgress:
        """Returns what counts the tokens of one answer's reasoning."""
        return ReasoningProgress(self.state, _text_of(params, tokenizer))


async def add_tokens(progress: ReasoningProgress | None, answer: TokenDelta) -> None:
    """Adds the tokens of a whole answer, in turns of the event loop: 30,000 of them take 5 ms."""
    if progress is not None:
        async for some in in_turns(slices(answer.token_ids, _SLICE)):
            progress.add(some)


def _text_of(params: SamplingParams, tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Returns a function for the text that a token adds, called for every token: after a preemption for all at once."""
    skipped = tokenizer.special_ids - params.kept_special_ids if params.skip_special_tokens else frozenset()
    return functools.cache(lambda token_id: b"" if token_id in skipped else tokenizer.token_bytes(token_id))


def parse_reasoning(fields: Fields, chat_format: ChatFormat, prompt_ids: tuple[int, ...]) -> Reasoning | None:
    """Reads the reasoning's fields after the prompt is known; None for a model without it. Raises InvalidRequest."""
    tokenizer = chat_format.tokenizer
    budget_tokens = body_fields.THINKING_TOKEN_BUDGET.read(fields)
    budget_tokens = None if budget_tokens is None or budget_tokens < 0 else budget_tokens
    is_shown = body_fields.INCLUDE_REASONING.read(fields)
    if (reasoning_format := chat_format.reasoning_format) is None:
        if budget_tokens is not None:
            raise InvalidRequest(
                "thinking_token_budget is not supported by this model, whose chat template has no reasoning.",
                param="thinking_token_budget",
            )
        if fields.raw("include_reasoning") is not None:
            fields.skip("include_reasoning")
        return None
    state = state_after(prompt_ids, tokenizer.token_bytes)
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
            "reasoning_effort cannot be none: the chat template cannot leave the reasoning out; send "
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
