"""Incremental detokenization: emits whole characters only, and no text that may still become a stop string."""

from collections.abc import Callable, Sequence

_CONTEXT_TOKENS = 6  # of the prompt's end: enough for a decoder to decide on a leading space
_MAX_CONTEXT_TOKENS = 22
_MAX_UNDECIDED_TOKENS = 16  # a character has 4 bytes at most: after so many tokens the bytes are invalid
_REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]
# Returns the text that a token adds after visible text, whatever the tokens around it; None if it may depend on them.
TextOfToken = Callable[[int], str | None]


class Detokenizer:
    """Decodes the output of one request. The work for each token is constant, amortised.

    `_ids` holds a short context and the undecided tokens: text of [0, _shown) is emitted, of [_shown, end) not yet.
    """

    def __init__(
        self,
        decode: Decode,
        prompt_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        text_of_token: TextOfToken = lambda token_id: None,
    ) -> None:
        self._decode, self._text_of_token = decode, text_of_token
        self._prompt_ids: Sequence[int] | None = prompt_ids  # None: their end is in `_ids`
        self._ids: list[int] = []
        self._shown = 0
        self._stop, self._include_stop = stop, include_stop
        self._pending = ""  # decoded, but possibly the start of a stop string
        self._has_text = False  # whether text was added: a decoder may strip a space before it
        self._stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Adds a token. Returns the text to emit, and the completed stop string or None.

        After a stop string the text is empty.
        """
        if self._stopped:
            return "", None
        self._pending += self._added_by(token_id)
        if not (self._stop and may_stop):
            return self._release(len(self._pending)), None
        hits = [(at, text) for text in self._stop if (at := self._pending.find(text)) >= 0]
        if not hits:
            return self._release(len(self._pending) - begun_length(self._pending, self._stop)), None
        at, text = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
        self._stopped = True
        ready = self._pending[: at + len(text)] if self._include_stop else self._pending[:at]
        self._pending = ""
        return ready, text

    def flush(self) -> str:
        """Returns the remaining text at the end of the output; incomplete characters become U+FFFD."""
        if self._stopped:
            return ""
        if len(self._ids) > self._shown:
            self._pending += self._decode_new(final=True)
        return self._release(len(self._pending))

    def _added_by(self, token_id: int) -> str:
        if self._has_text and len(self._ids) == self._shown and (text := self._text_of_token(token_id)) is not None:
            self._ids, self._shown = [token_id], 1
            return text
        self._take_context()
        self._ids.append(token_id)
        return self._decode_new(final=False)

    def _take_context(self) -> None:
        """Begins with the end of the prompt, once it is needed: decoding it takes 20 µs."""
        if self._prompt_ids is not None:
            self._ids, self._prompt_ids = _context(self._decode, self._prompt_ids), None
            self._shown = len(self._ids)

    def _decode_new(self, *, final: bool) -> str:
        """Returns the text of the undecided tokens, or nothing while it ends inside a character."""
        before = self._decode(self._ids[: self._shown])
        text = self._decode(self._ids)
        incomplete = text.endswith(_REPLACEMENT) and len(self._ids) - self._shown < _MAX_UNDECIDED_TOKENS
        if incomplete and not final:
            return ""
        added = text[len(before) :]
        self._ids = self._next_context(before, added)
        self._shown = len(self._ids)
        self._has_text |= bool(added)
        return added

    def _next_context(self, before: str, added: str) -> list[int]:
        """Returns the fewest ids with which the next token decodes as it would after all ids.

        The tokens emitted last begin and end with a character, so they replace all earlier ones. Tokens without text
        (skipped or unknown ones) do not: after visible text they are dropped. Before any they are kept, because one may
        be the space that a decoder strips from the beginning; a bound keeps the work constant.
        """
        if added:
            return self._ids[self._shown :]
        return self._ids[: self._shown] if before or len(self._ids) > _MAX_CONTEXT_TOKENS else self._ids

    def _release(self, length: int) -> str:
        ready, self._pending = self._pending[:length], self._pending[length:]
        return ready


def begun_length(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that begins one of `marks`, which is not complete."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((size for size in range(longest, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def _context(decode: Decode, prompt_ids: Sequence[int]) -> list[int]:
    """Returns the prompt's last ids, from a token that starts a character, because byte tokens decode together."""
    for count in range(_CONTEXT_TOKENS, _MAX_CONTEXT_TOKENS + 1):
        ids = [
            token_id for token_id in prompt_ids[-count:] if token_id >= 0
        ]  # a negative one is a vector, without text
        text = decode(ids)
        if text and not text.startswith(_REPLACEMENT):
            break
    return ids
