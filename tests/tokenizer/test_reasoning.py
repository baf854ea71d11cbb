"""Reasoning before an answer: found by the chat template and the vocabulary, and divided from the answer's text."""

import random

import pytest

from caraserve.core.reasoning_progress import ReasoningState
from caraserve.tokenizer.chat_template import ChatTemplate
from caraserve.tokenizer.reasoning import (
    ReasoningFormat,
    ReasoningParser,
    detect_reasoning,
    reasoning_tokens,
    state_after,
)

NOT_BEGUN, UNDER_WAY, ENDED = ReasoningState.NOT_BEGUN, ReasoningState.UNDER_WAY, ReasoningState.ENDED
VOCABULARY = {"<think>": 7, "</think>": 8}
# As Qwen3's, DeepSeek R1's and Granite's templates do.
SWITCHED = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
OPENED = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<think>\n"
BY_EFFORT = "{% if thinking %}{{ reasoning_effort }}<think></think>{% endif %}{{ messages }}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def detected(
    template: str, vocabulary: dict[str, int] = VOCABULARY, characters: str = "</think>"
) -> ReasoningFormat | None:
    """Returns the format of a model with this vocabulary and a token for each of `characters`."""
    made = ChatTemplate(template, {}, "test")
    texts = {token_id: text.encode() for text, token_id in vocabulary.items()}
    texts |= {ord(one): one.encode() for one in characters}
    tokens = reasoning_tokens(
        vocabulary, encode=lambda text: list(text.encode()), text_of=lambda token_id: texts.get(token_id, b"?")
    )
    return detect_reasoning(made.source, made.arguments, tokens)


@pytest.mark.parametrize(
    ("template", "switch", "takes_effort"),
    [(SWITCHED, "enable_thinking", False), (OPENED, None, False), (BY_EFFORT, "thinking", True)],
)
def test_a_template_with_the_marks_says_how_the_model_reasons(
    template: str, switch: str | None, takes_effort: bool
) -> None:
    found = detected(template)
    assert found is not None
    assert (found.tokens.begin_id, found.tokens.end_ids) == (7, (8,))
    assert (found.switch, found.takes_effort) == (switch, takes_effort)


def test_the_marks_may_be_spelled_with_several_tokens() -> None:
    vocabulary = {">{": 9, "think>\n": 5, "k>.": 4}
    found = detected(SWITCHED, vocabulary)
    assert found is not None
    assert (found.tokens.begin_id, found.tokens.end_ids) == (None, tuple(b"</think>"))
    past_end = {part: ids for part, ids in found.tokens.past_end_ids.items() if ids}
    assert past_end == {b"</think": (9,), b"</thin": (4,)}


def test_other_templates_and_vocabularies_do_not_reason() -> None:
    assert detected(PLAIN) is None
    assert detected(SWITCHED, {}, characters="</thin") is None


@pytest.mark.parametrize(
    ("prompt_ids", "state"),
    [
        ([5, 7], UNDER_WAY),
        ([5, 7, 0], UNDER_WAY),
        ([5, 7, 0, 8, 0], ENDED),
        ([5, 6], NOT_BEGUN),
        ([5, 7, 6, 0], NOT_BEGUN),  # the user's own text
        ([0, 0], NOT_BEGUN),
        ([5, *b"<think>", 0, 0], UNDER_WAY),
        ([*b"<think>", 0, *b"</think>", 0], ENDED),
    ],
)
def test_the_end_of_the_prompt_says_whether_the_reasoning_is_under_way(
    prompt_ids: list[int], state: ReasoningState
) -> None:
    texts = {0: b"\n", 5: b"sea", 6: b"<end>", 7: b"<think>", 8: b"</think>"}
    assert state_after(prompt_ids, lambda token_id: texts.get(token_id, bytes([token_id]))) is state


@pytest.mark.parametrize(
    ("state", "text", "reasoning", "answer"),
    [
        (NOT_BEGUN, "<think>\n a\n\nb </th \n</think>\n\nHi <think> x\n", "a\n\nb </th", "Hi <think> x\n"),
        (NOT_BEGUN, "\n<think></think>Hi", "", "Hi"),
        (NOT_BEGUN, "\u3000<think>Hi", "", "\u3000<think>Hi"),
        (NOT_BEGUN, " Hi </think>", "", " Hi </think>"),
        (NOT_BEGUN, " <thi", "", " <thi"),
        (NOT_BEGUN, "", "", ""),
        (UNDER_WAY, "a\nb\n</think>\n{}", "a\nb", "{}"),
        (UNDER_WAY, "</think>", "", ""),
        (UNDER_WAY, " cut off </thi", "cut off </thi", ""),
        (ENDED, "\nHi</think>", "", "\nHi</think>"),
    ],
)
def test_the_parts_are_the_same_however_the_text_is_cut(
    state: ReasoningState, text: str, reasoning: str, answer: str
) -> None:
    rng = random.Random(1)
    for pieces in range(1, 12):
        cuts = sorted(rng.choices(range(len(text) + 1), k=pieces - 1))
        parser = ReasoningParser(state)
        parts = [
            parser.push(text[start:end], is_last=end is None)
            for start, end in zip([0, *cuts], [*cuts, None], strict=True)
        ]
        assert "".join(part.reasoning for part in parts) == reasoning
        assert "".join(part.answer for part in parts) == answer


def test_text_is_passed_on_as_soon_as_it_is_decided() -> None:
    parser = ReasoningParser(UNDER_WAY)
    assert parser.push("\nWell, ", is_last=False).reasoning == "Well,"
    assert parser.push("so </", is_last=False).reasoning == " so"
    assert parser.push("b>", is_last=False).reasoning == " </b>"
    assert parser.push("</think>Hi", is_last=False).answer == "Hi"
