"""What a model writes before its answer between `<think>` and `</think>`: its detection, and an incremental parser."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from caraserve.core import reasoning_progress as marks
from caraserve.core.reasoning_grammar import ReasoningTokens
from caraserve.core.reasoning_progress import ReasoningState
from caraserve.tokenizer.detokenizer import begun_length

BEGIN, END, BLANKS = (text.decode() for text in (marks.BEGIN, marks.END, marks.BLANKS))
SWITCHES = ("enable_thinking", "thinking")  # names by which templates let the client choose
_LAST_TOKENS = 16  # of a prompt, among which a mark is looked for; one has 8 at most, and line ends may follow it


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning. `switch`: the template's argument that turns it on and off, if it has one.
    `takes_effort`: whether the template has the argument `reasoning_effort`."""

    tokens: ReasoningTokens
    switch: str | None = None
    takes_effort: bool = False


def state_after(prompt_ids: Sequence[int], text_of: Callable[[int], bytes]) -> ReasoningState:
    """Returns how far the reasoning is at the end of a prompt: templates open it, or close it to leave it out."""
    text = b"".join(map(text_of, prompt_ids[-_LAST_TOKENS:])).rstrip(marks.BLANKS)
    if text.endswith(marks.BEGIN):
        return ReasoningState.UNDER_WAY
    return ReasoningState.ENDED if text.endswith(marks.END) else ReasoningState.NOT_BEGUN


def detect_reasoning(
    template: str, arguments: frozenset[str], tokens: ReasoningTokens | None
) -> ReasoningFormat | None:
    """Returns the format of a model whose template mentions the marks and whose `tokens` can write them, else None.
    `arguments`: the variables of the template."""
    if END not in template or tokens is None:
        return None
    switch = next((name for name in SWITCHES if name in arguments), None)
    return ReasoningFormat(tokens, switch, "reasoning_effort" in arguments)


def reasoning_tokens(
    ids: Mapping[str, int], encode: Callable[[str], Sequence[int]], text_of: Callable[[int], bytes]
) -> ReasoningTokens | None:
    """Returns the tokens of a vocabulary that write the marks; None if none do. `ids`: by token."""
    end_ids = (ids[END],) if END in ids else tuple(encode(END))
    if b"".join(map(text_of, end_ids)).lstrip(marks.BLANKS) != marks.END:
        return None
    closing = {token_id: text_of(token_id) for token, token_id in ids.items() if END[-1] in token}
    return ReasoningTokens(ids.get(BEGIN), end_ids, _past_end_ids(closing))


def _past_end_ids(closing: Mapping[int, bytes]) -> dict[bytes, tuple[int, ...]]:
    """Returns, by the part of the end mark that is written already, which tokens complete it and go on with more than
    white space. `closing`: the texts of all tokens with the mark's last character."""
    parts = [marks.END[:size] for size in range(len(marks.END))]
    return {
        part: tuple(
            token_id for token_id, text in closing.items() if (part + text).partition(marks.END)[2].strip(marks.BLANKS)
        )
        for part in parts
    }


class ReasoningText(NamedTuple):
    """The parts of an answer's text."""

    reasoning: str
    answer: str


class ReasoningParser:
    """Divides the text of one answer, which may come in pieces; joined parts are the same for all pieces. White space
    around the reasoning is dropped."""

    def __init__(self, state: ReasoningState) -> None:
        self._read = self._read_answer
        if state is ReasoningState.NOT_BEGUN:
            self._read = self._read_beginning
        elif state is ReasoningState.UNDER_WAY:
            self._read = self._read_reasoning
        self._buffer = ""  # not decided yet
        self._is_stripping = state is ReasoningState.UNDER_WAY  # whether white space is dropped until other text comes

    @property
    def is_over(self) -> bool:
        """Whether all further text is the answer, as it comes."""
        return self._read == self._read_answer and not self._is_stripping

    def push(self, text: str, *, is_last: bool) -> ReasoningText:
        """Adds text; returns what it decides."""
        self._buffer += text
        return self._read(is_last)

    def _read_beginning(self, is_last: bool) -> ReasoningText:
        start = self._buffer.lstrip(BLANKS)
        if start.startswith(BEGIN):
            self._buffer, self._read, self._is_stripping = start.removeprefix(BEGIN), self._read_reasoning, True
        elif is_last or not BEGIN.startswith(start):
            self._read = self._read_answer
        else:
            return ReasoningText("", "")
        return self._read(is_last)

    def _read_reasoning(self, is_last: bool) -> ReasoningText:
        at = self._buffer.find(END)
        if at < 0:
            kept = 0 if is_last else begun_length(self._buffer, (END,))
            text = self._stripped(self._buffer[: len(self._buffer) - kept])
            shown = text.rstrip()
            self._buffer = "" if is_last else text[len(shown) :] + self._buffer[len(self._buffer) - kept :]
            return ReasoningText(shown, "")
        reasoning = self._stripped(self._buffer[:at]).rstrip()
        self._buffer, self._read, self._is_stripping = self._buffer[at + len(END) :], self._read_answer, True
        return ReasoningText(reasoning, self._read(is_last).answer)

    def _read_answer(self, is_last: bool) -> ReasoningText:
        text, self._buffer = self._stripped(self._buffer), ""
        return ReasoningText("", text)

    def _stripped(self, text: str) -> str:
        if self._is_stripping:
            text = text.lstrip()
            self._is_stripping = not text
        return text
