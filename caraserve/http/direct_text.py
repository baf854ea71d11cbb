"""Writes text of an answer to its client as soon as the engine has it, past the task that reads the answer's stream.

Waking that task for each token, and going through its awaits again, takes longer than all else that a token needs.
"""

import logging

from caraserve.http.api_request import TextEvents
from caraserve.http.request_log import RequestSummary
from caraserve.http.streaming import EventStream

log = logging.getLogger("caraserve.http")


class DirectText:
    """Writes text of one answer, of which nothing but text may come before its end. `num_tokens`: written by this."""

    __slots__ = ("_events", "_summary", "_text_events", "num_tokens")

    def __init__(self, events: EventStream, text_events: TextEvents, summary: RequestSummary) -> None:
        self._events, self._text_events, self._summary = events, text_events, summary
        self.num_tokens = 0

    def write(self, text: str, num_tokens: int) -> bool:
        """Writes the text of some tokens, which may be empty. Returns False, and writes nothing, if the client has left
        or reads too slowly, or if the text cannot be written: the error is then its reader's, not that of the engine,
        which goes on with the other answers of the iteration."""
        if not self._events.takes_more:
            return False
        if text:
            try:
                self._events.write_now(self._text_events(text))
            except Exception:
                log.exception("an answer's text could not be written at once")
                return False
        self.num_tokens += num_tokens
        self._summary.note_tokens(num_tokens)
        return True
