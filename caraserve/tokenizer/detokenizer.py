"""Token ids → text as they come: whole characters only, and nothing that may still become a stop string."""

from collections.abc import Callable, Sequence

_CONTEXT_TOKENS = 6  # of the prompt's end: enough for a decoder to see whether a leading space belongs there
_MAX_CONTEXT_TOKENS = 22
_MAX_UNDECIDED_TOKENS = 16  # no character has more bytes than a few; after that the bytes are just wrong
_REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text of one request. Amortised constant work for each token.

    `_ids` holds a short context and what is undecided: text of [0, _shown) is out, of [_shown, end) is not yet.
    """

    def __init__(
        self, decode: Decode, prompt_ids: Sequence[int], *, stop: tuple[str, ...] = (), include_stop: bool = False
    ) -> None:
        self._decode = decode
        self._ids = _context(decode, prompt_ids)
        self._shown = len(self._ids)
        self._stop, self._include_stop = stop, include_stop
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self._stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that is ready now, and the stop string that was completed, if any; after that nothing comes."""
        if self._stopped:
            return "", None
        self._ids.append(token_id)
        self._held += self._decoded(final=False)
        if not (self._stop and may_stop):
            return self._release(len(self._held)), None
        hits = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if not hits:
            return self._release(len(self._held) - self._undecided()), None
        at, text = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
        self._stopped = True
        ready = self._held[: at + len(text)] if self._include_stop else self._held[:at]
        self._held = ""
        return ready, text

    def flush(self) -> str:
        """What was held back, at the end."""
        if self._stopped:
            return ""
        self._held += self._decoded(final=True)
        return self._release(len(self._held))

    def _decoded(self, *, final: bool) -> str:
        """New text, unless it ends inside a character."""
        before = self._decode(self._ids[: self._shown])
        text = self._decode(self._ids)
        incomplete = text.endswith(_REPLACEMENT) and len(self._ids) - self._shown < _MAX_UNDECIDED_TOKENS
        if incomplete and not final:
            return ""
        added = text[len(before) :]
        self._ids = self._next_context(before, added)
        self._shown = len(self._ids)
        return added

    def _next_context(self, before: str, added: str) -> list[int]:
        """The fewest ids that decode the next token as all ids would.

        What was shown last begins and ends with a character, so it can stand for all that came earlier. Tokens
        without text (skipped or unknown ones) cannot: after visible text they are dropped. Before any, they are kept,
        since one of them may be the space that a decoder strips from the beginning; a bound keeps work constant.
        """
        if added:
            return self._ids[self._shown :]
        return self._ids[: self._shown] if before or len(self._ids) > _MAX_CONTEXT_TOKENS else self._ids

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0

    def _release(self, length: int) -> str:
        ready, self._held = self._held[:length], self._held[length:]
        return ready


def _context(decode: Decode, prompt_ids: Sequence[int]) -> list[int]:
    """The prompt's end, from a place with text that is not inside a character: a run of byte tokens decodes as one."""
    for count in range(_CONTEXT_TOKENS, _MAX_CONTEXT_TOKENS + 1):
        ids = list(prompt_ids[-count:])
        text = decode(ids)
        if text and not text.startswith(_REPLACEMENT):
            break
    return ids
