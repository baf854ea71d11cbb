"""How far the reasoning of an answer is, by the text of its tokens: models may spell its marks with several tokens."""

import string
from collections.abc import Callable, Sequence
from enum import Enum

BEGIN, END = b"<think>", b"</think>"
BLANKS = string.whitespace.encode()  # may come before BEGIN; in ASCII, so that no character is divided by tokens
_FIRST = END[:1]  # is nowhere else in END
_SLICE = 256  # tokens looked at together


class ReasoningState(Enum):
    """How far the reasoning is."""

    NOT_BEGUN = "not begun"
    UNDER_WAY = "under way"
    ENDED = "ended"


class ReasoningProgress:
    """Follows the tokens of one answer from `state`, where the prompt ends. `text_of`: the text that a token adds to
    the answer. `num_tokens`: of the reasoning so far; the tokens of its marks do not count once they are complete.
    `end_part`: the beginning of END with which the reasoning ends so far, empty if it ends with other text."""

    def __init__(self, state: ReasoningState, text_of: Callable[[int], bytes]) -> None:
        self.state, self.num_tokens, self.end_part = state, 0, b""
        self._text_of = text_of
        self._begin_part = b""  # the beginning of BEGIN that the answer has so far
        self._end_part_tokens = 0  # of `num_tokens`, those that begin within `end_part`

    @property
    def is_over(self) -> bool:
        """Whether no later token belongs to the reasoning."""
        return self.state is ReasoningState.ENDED

    @property
    def may_begin_next(self) -> bool:
        """Whether BEGIN as a whole may follow."""
        return self.state is ReasoningState.NOT_BEGUN and not self._begin_part

    def add(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Adds the next tokens of the answer. Returns those after the reasoning, or all of them where none are of the
        reasoning."""
        num_reasoning = 0  # of `token_ids`
        for start in range(0, len(token_ids), _SLICE):
            if self.state is ReasoningState.ENDED:
                break
            some = token_ids[start : start + _SLICE]
            if self._is_plain(some):
                self.num_tokens += len(some)
                num_reasoning = start + len(some)
            elif count := self._add_each(some):
                num_reasoning = start + count
        return token_ids[num_reasoning:]

    def _is_plain(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens go on with the reasoning and begin no mark. Looking at them one by one would take a long
        answer, which is added again after a preemption, 20 ms."""
        return (
            self.state is ReasoningState.UNDER_WAY
            and not self.end_part
            and _FIRST not in b"".join(map(self._text_of, token_ids))
        )

    def _add_each(self, token_ids: Sequence[int]) -> int:
        """Adds tokens one by one. Returns how many there are up to the last one of the reasoning."""
        num_reasoning = 0
        for at, token_id in enumerate(token_ids):
            if self.state is ReasoningState.ENDED:
                break
            text = self._text_of(token_id)
            if self.state is ReasoningState.UNDER_WAY:
                self._add_reasoning(text, counts=True)
                num_reasoning = at + 1
            elif self._add_beginning(text):
                num_reasoning = at + 1
        return num_reasoning

    def _add_beginning(self, text: bytes) -> bool:
        """Returns whether the reasoning begins with this text."""
        text = (self._begin_part + text).lstrip(BLANKS)
        if text.startswith(BEGIN):
            self.state = ReasoningState.UNDER_WAY
            self._add_reasoning(text.removeprefix(BEGIN), counts=False)
            return True
        self._begin_part = text
        if not BEGIN.startswith(text):
            self.state = ReasoningState.ENDED
        return False

    def _add_reasoning(self, text: bytes, *, counts: bool) -> None:
        """Adds a token's text. `counts`: whether its token is one of the reasoning if it is not one of a mark."""
        if not self.end_part and _FIRST not in text:
            self.num_tokens += counts
            return
        before, text = len(self.end_part), self.end_part + text
        at = text.find(END)
        if at >= 0:
            self.num_tokens += (counts if at > before else 0) - (self._end_part_tokens if at < before else 0)
            self.state, self.end_part = ReasoningState.ENDED, b""
            return
        self.num_tokens += counts
        at = text.rfind(_FIRST)
        if not END.startswith(text[at:]):
            self.end_part, self._end_part_tokens = b"", 0
            return
        in_part = self._end_part_tokens if before and at == 0 else 0
        self.end_part, self._end_part_tokens = text[at:], in_part + (counts if before >= at else 0)
