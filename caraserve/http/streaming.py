"""Server-sent events: writes a response event by event; a slow or silent client delays only its own response.

The response starts with the first event, so that an error before it still gets an HTTP status.
"""

import asyncio
import re
from types import TracebackType
from typing import Self

from aiohttp import web

from caraserve.errors import CaraServeError
from caraserve.http.api_request import StreamFormat
from caraserve.http.context import HttpTimings

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_PROGRESS_COMMENT = re.compile(rb"(?:\A|(?<=\n\n)): tokens_so_far ([0-9]{1,15})\n\n")
_TOKENS_COMMENT = re.compile(rb"(?:\A|\n\n): completion_tokens ([0-9]{1,15})\n\n")
_ERROR_COMMENT = re.compile(rb"(?:\A|\n\n): error ([a-z_]{1,64})\n\n")


def comment(text: str) -> bytes:
    """A line that clients must skip, by the standard."""
    return b": %b\n\n" % text.encode()


def tokens_comment(count: int) -> bytes:
    """The comment near the end of every stream with the number of its tokens: an instance that forwards the stream
    counts them, also where the client asks for no usage or sees no reasoning."""
    return comment(f"completion_tokens {count}")


def tokens_in(events: bytes) -> int | None:
    """The number that `tokens_comment` has stated in whole events; None if it is not among them."""
    found = _TOKENS_COMMENT.search(events)
    return None if found is None else int(found[1])


def error_comment(error: CaraServeError) -> bytes:
    """The comment before the event of an error, whose form depends on the API: an instance that forwards the stream
    logs the error."""
    return comment(f"error {error.code or error.type}")


def error_in(events: bytes) -> str:
    """The error that `error_comment` has named in whole events; empty if it is not among them."""
    found = _ERROR_COMMENT.search(events) if b": error " in events else None  # nearly always None, in 0.1 µs
    return "" if found is None else found[1].decode()


def progress_comment(count: int) -> bytes:
    """The comment before every event of a stream to an instance that forwards it: the tokens so far, which this counts
    if the stream is cut. Its client does not get them."""
    return comment(f"tokens_so_far {count}")


def without_progress(events: bytes) -> tuple[bytes, int | None]:
    """Takes every `progress_comment` out of whole events. Returns the others, and the last number or None."""
    counts = _PROGRESS_COMMENT.findall(events)
    return (_PROGRESS_COMMENT.sub(b"", events), int(counts[-1])) if counts else (events, None)


class EventStream:
    """An event stream to one client, as an async context manager.

    `send` waits while the client's socket is full. A watchdog writes a comment after `ping_s` of silence, and cuts the
    connection when a write has made no progress for `write_s`; aiohttp then cancels the handler, as it does when the
    client leaves.
    """

    def __init__(self, request: web.Request, timings: HttpTimings, stream_format: StreamFormat) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._request = request
        self._format = stream_format
        self._timings = timings
        self._clock = asyncio.get_running_loop().time
        self._last_s = self._clock()
        self._writes = 0  # in progress; more than one if a response has several choices
        self._progress_s = 0.0  # time of the last progress of a write
        self._starting = asyncio.Lock()
        self.num_events = 0  # passed to `send`
        self.ended = False  # whether the stream's end has been passed to `send`
        self.error: CaraServeError | None = None  # that ended it
        self._watchdog: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Whether a byte may have gone out."""
        return self.response.prepared

    async def __aenter__(self) -> Self:
        self._watchdog = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_watching()

    async def send(self, events: bytes) -> None:
        """Writes whole events. Raises ConnectionError when the client has left."""
        if not self.response.prepared:
            async with self._starting:
                await self.response.prepare(self._request)
                self._request[EVENT_STREAM] = self
        self._last_s = self._clock()
        if not self._writes:
            self._progress_s = self._last_s
        self._writes += 1
        self.num_events += events.count(b"data: {")
        self.ended = events.endswith(self._format.stream_end)
        try:
            await self.response.write(events)
        finally:
            self._writes -= 1
            self._progress_s = self._clock()

    async def end_with_error(self, error: CaraServeError) -> None:
        """Sends an error as the last event, unless the stream has ended already; then closes the connection. Waits at
        most `write_s` for the client to read it."""
        self._stop_watching()
        self.response.force_close()
        try:
            async with asyncio.timeout(self._timings.write_s):
                if not self.ended:
                    self.error = error
                    event = self._format.error_event(error, self.num_events)
                    await self.send(error_comment(error) + event + self._format.stream_end)
                await self.response.write_eof()
        except TimeoutError:
            self._cut()
        except ConnectionError:
            return  # the client has left; aiohttp notices when it ends the response

    async def _watch(self) -> None:
        while True:
            now = self._clock()
            if self._writes:
                pause_s = self._progress_s + self._timings.write_s - now
                if pause_s <= 0:
                    self._cut()
                    return
            else:
                pause_s = self._last_s + self._timings.ping_s - now
                if pause_s <= 0:
                    await self._ping()
                    continue
            await asyncio.sleep(min(pause_s, self._timings.write_s))

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    async def _ping(self) -> None:
        try:
            async with asyncio.timeout(self._timings.write_s):
                await self.send(self._format.ping)
        except TimeoutError:
            self._cut()
        except ConnectionError:
            self._last_s = self._clock()  # the handler is being cancelled already

    def _cut(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


EVENT_STREAM = web.RequestKey("EVENT_STREAM", EventStream)  # of a request, from the response's first byte on
