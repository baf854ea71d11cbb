"""Filling in the middle: how models that were trained for it are given the text before and after a gap."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The special tokens before the text before the gap, before the text after it, and at the end of the prompt."""

    before_prefix: str
    before_suffix: str
    end: str = ""
    suffix_first: bool = False

    def prompt(self, prefix: str, suffix: str) -> str:
        """Returns the prompt whose answer is the text of the gap."""
        first, second = self.before_prefix + prefix, self.before_suffix + suffix
        return (second + first if self.suffix_first else first + second) + self.end

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.before_prefix, self.before_suffix, self.end)))


_FORMATS = (
    InfillFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    InfillFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillFormat("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


def find_format(has_token: Callable[[str], bool]) -> InfillFormat | None:
    """Returns the first format all of whose special tokens the vocabulary has."""
    return next((one for one in _FORMATS if all(map(has_token, one.tokens))), None)
