"""The stream of a request's tokens to its reader, which counts what is not read yet."""

import asyncio
from collections.abc import Callable
from weakref import ref

from caraserve.core.request import Phases, TokenDelta
from caraserve.engine.unread import FREE_BYTES, UnreadAnswer, size_of
from caraserve.errors import ReaderTooSlow

_WAITING_BYTES = FREE_BYTES // 4  # of an answer, for fewer tokens than are sent at a time


class TokenStream:
    """Async iterator of a request's `TokenDelta`s; the last one has `finish` set, also when the request fails.

    Deltas since the reader's last read are merged into one, of about `FREE_BYTES` at most. `interval_tokens`: for so
    many tokens the reader is woken once, but at once for the first ones and for the last.
    """

    def __init__(
        self,
        on_cancel: Callable[[], None],
        unread: UnreadAnswer,
        served_by: Callable[[], str] = str,
        phases: Callable[[], Phases] = Phases,
        num_computed: Callable[[], int] = int,
    ) -> None:
        """`unread`: what is unread of the answer that this is a part of. `served_by`: returns what answers, as
        `adapter@digest`, or the base model's name; empty while the digest is unknown, because the adapter is still
        being uploaded. `phases`: returns the request's times until now. `num_computed`: returns how many of its tokens
        are computed, or in an iteration under way."""
        self.served_by, self.phases, self.unread, self.num_computed = served_by, phases, unread, num_computed
        self._on_cancel = on_cancel
        self.interval_tokens = 1
        self._write: Callable[[str, int], bool] | None = None
        self._awaited_tokens = 0  # the reader is woken when so many more are pending
        self._pending: list[TokenDelta] = []
        self._pending_bytes = self._taken_bytes = 0  # taken: the last delta, which the reader has yet to send
        self._ready = asyncio.Event()
        self._is_counted = True
        self._ended = False
        self._failure: ReaderTooSlow | None = None
        unread.parts.append(ref(self))

    def write_with(self, write: Callable[[str, int], bool]) -> None:
        """Passes the text and the number of further tokens to `write`, as long as the reader has no delta to send, who
        gets them where that returns False."""
        self._write = write

    def put_text(self, text: str, token_ids: tuple[int, ...]) -> None:
        """Adds tokens without scores, the last one not among them. They are written to the client at once where that is
        possible: waking the reader takes longer than all else that a token needs."""
        waits = self._pending or self._taken_bytes  # for the reader, which may rest before it sends what it has taken
        if self._write is None or waits or not self._write(text, len(token_ids)):
            self.put(TokenDelta(text, token_ids))

    def put(self, delta: TokenDelta) -> None:
        """Adds a delta. Only `ActiveRequest` calls it."""
        if delta.finish is not None:
            # These refer to the request, and the request to this stream: without the cycles all are freed at once.
            # With them, the garbage collector took 5 to 11 ms at a time to free requests with logprobs.
            self._on_cancel, self._write = lambda: None, None
        self._pending.append(delta)
        if self._is_counted:
            num_bytes = size_of(delta)
            self._pending_bytes += num_bytes
            self.unread.add(num_bytes)
        self._awaited_tokens -= len(delta.token_ids)
        # An answer that has paused goes on once half of over `FREE_BYTES` is read, so less than that may wait here.
        if self._awaited_tokens <= 0 or delta.finish is not None or self.unread.unread_bytes > _WAITING_BYTES:
            self._ready.set()

    def cancel(self) -> None:
        """Cancels the request, which frees its slot, KV blocks and adapter within an iteration. No effect if it has
        ended, but that what is unread does not count any more."""
        self._on_cancel()
        self._write = None
        self._end_count()

    def end_unread(self, error: ReaderTooSlow) -> None:
        """Ends the request, because its reader is too slow; that gets `error` next."""
        self.cancel()
        self._pending, self._failure = [], error
        self._ready.set()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenDelta:
        self._note_read()
        if self._ended:
            raise StopAsyncIteration
        await self._ready.wait()
        if self._failure is not None:
            raise self._failure
        taken = self._take()
        delta = taken[0] if len(taken) == 1 else merge_deltas(taken)
        if delta.finish is not None:
            self._ended = True
            self._end_count()
        return delta

    def _take(self) -> list[TokenDelta]:
        """Takes what is pending, at most about `FREE_BYTES`: the reader keeps it until it is sent."""
        taken, num_bytes = self._pending, self._pending_bytes
        if num_bytes <= FREE_BYTES:
            self._pending = []
        else:
            count = max(1, len(taken) * FREE_BYTES // num_bytes)
            taken, self._pending = taken[:count], taken[count:]
            num_bytes = sum(map(size_of, taken))
        if not self._pending:
            self._ready.clear()
            if any(delta.token_ids for delta in taken):
                self._awaited_tokens = self.interval_tokens
        self._pending_bytes -= num_bytes
        self._taken_bytes = num_bytes
        return taken

    def _note_read(self) -> None:
        """Counts the last delta as read."""
        if self._taken_bytes:
            self.unread.read(self._taken_bytes)
            self._taken_bytes = 0

    def _end_count(self) -> None:
        """Counts all as read, and nothing more."""
        self._is_counted = False
        self._taken_bytes += self._pending_bytes
        self._pending_bytes = 0
        self._note_read()


def merge_deltas(deltas: list[TokenDelta]) -> TokenDelta:
    """Returns one delta with the contents of consecutive ones."""
    return TokenDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=tuple(logprob for delta in deltas for logprob in delta.prompt_logprobs),
        finish=deltas[-1].finish,
        embedding=deltas[-1].embedding,
    )
