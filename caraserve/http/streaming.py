"""Server-sent events: writes a response event by event; a slow or silent client delays only its own response.

The response starts with the first event, so that an error before it still gets an HTTP status.
"""

import asyncio
import re
from collections.abc import Callable
from types import TracebackType
from typing import Self

from aiohttp import hdrs, web

from caraserve.errors import CaraServeError
from caraserve.http.api_request import StreamFormat
from caraserve.http.context import HttpTimings
from caraserve.util.tasks import forget_frames

_NEVER_WAITS_BYTES = 32 << 10  # unsent, of the 64 KiB above which a write waits for the client
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
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
    """The comment before an error's event, whose form depends on the API: for the log of an instance that forwards."""
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


class _EventResponse(web.StreamResponse):
    """A response whose headers go out with the first event, in one packet."""

    _send_headers_immediately = False


class EventStream:
    """An event stream to one client, as an async context manager.

    `send` waits while the client's socket is full; the connection is cut when its client reads nothing for too long,
    and aiohttp then cancels the handler, as it does when the client leaves. A comment is sent after `ping_s` of
    silence.
    """

    def __init__(self, request: web.Request, timings: HttpTimings, stream_format: StreamFormat) -> None:
        self.response = _EventResponse(headers=_HEADERS)
        self._request = request
        self._format = stream_format
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._starting = asyncio.Lock()
        self._is_chunked = False  # known once the response is prepared
        self._held = b""  # already counted
        self.num_events = 0  # passed to `send`
        self.ended = False  # whether the stream's end has been passed to `send`
        self.error: CaraServeError | None = None  # that ended it
        # Timers, not tasks: the exception of a cancelled task keeps its frame, and so the whole request, in a cycle.
        self._silence: asyncio.TimerHandle | None = None
        self._next_progress: asyncio.TimerHandle | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._timings = timings

    @property
    def started(self) -> bool:
        """Whether a byte may have gone out."""
        return self.response.prepared

    async def __aenter__(self) -> Self:
        self._silence = self._loop.call_later(self._timings.ping_s, self._end_silence)
        return self

    def show_progress(self, progress: Callable[[], bytes]) -> None:
        """Sends the comment that `progress` returns, which may be empty, once a second until there is an event."""
        self._next_progress = self._loop.call_later(self._timings.progress_s, self._show_progress, progress, b"")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_pings()

    async def send(self, events: bytes) -> None:
        """Writes whole events. Raises ConnectionError when the client has left."""
        await self._prepare()
        await self.response.write(self._counted(events))

    def hold(self, events: bytes) -> None:
        """Keeps whole events, the last ones of the answer, to be written by `end`: a write takes 30 µs."""
        self._held = self._counted(events)

    async def end(self, events: bytes) -> None:
        """Writes whole events and the stream's end, and ends the response. Raises ConnectionError when the client has
        left."""
        await self._prepare()
        held, self._held = self._held, b""
        last = held + self._counted(events + self._format.stream_end)
        transport = self._request.transport
        # aiohttp would end the response a second time if a deadline came while it waits for the client.
        waits = transport is not None and transport.get_write_buffer_size() + len(last) > _NEVER_WAITS_BYTES
        await (self.response.write(last) if waits else self.response.write_eof(last))

    async def _prepare(self) -> None:
        if not self.response.prepared:
            async with self._starting:
                await self.response.prepare(self._request)
                self._request[EVENT_STREAM] = self
                self._is_chunked = hdrs.TRANSFER_ENCODING in self.response.headers

    def _counted(self, events: bytes) -> bytes:
        """Counts events that are written now, and returns them."""
        self._last_s = self._loop.time()
        self.num_events += events.count(b"data: {")
        self.ended = events.endswith(self._format.stream_end)
        return events

    @property
    def takes_more(self) -> bool:
        """Whether events written now go to the client's socket: it has received some, but not the stream's end, is
        there, and reads them."""
        transport = self._request.transport
        return (
            self.started
            and not self.ended
            and transport is not None
            and not (transport.is_closing() or self._request.protocol.writing_paused)
        )

    def write_now(self, events: bytes) -> None:
        """Writes whole events, which `takes_more` allows, at once. `send` takes 7 µs more, for a turn of the event loop
        that nothing needs."""
        self._counted(events)
        transport = self._request.transport
        assert transport is not None
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)

    async def end_with_error(self, error: CaraServeError) -> None:
        """Sends an error as the last event, unless the stream has ended already. The connection stays usable: a client
        may have sent its next request over it."""
        self._stop_pings()
        try:
            if not self.ended:
                forget_frames(error)
                self.error = error
                await self.end(error_comment(error) + self._format.error_event(error, self.num_events))
            await self.response.write_eof()
        except ConnectionError:
            return  # the client has left; aiohttp notices when it ends the response

    def _end_silence(self) -> None:
        """Sends a comment if nothing was sent for `ping_s` and nothing waits for the client; then plans the next."""
        left_s = self._last_s + self._timings.ping_s - self._loop.time()
        if left_s <= 0:
            left_s = self._timings.ping_s
            self._send_alone(self._format.ping)
        self._silence = self._loop.call_later(left_s, self._end_silence)

    def _show_progress(self, progress: Callable[[], bytes], shown: bytes) -> None:
        if self.num_events:
            return
        if (now := progress()) not in (b"", shown):
            self._send_alone(now)
        self._next_progress = self._loop.call_later(self._timings.progress_s, self._show_progress, progress, now)

    def _send_alone(self, events: bytes) -> None:
        """Sends events beside the task of the answer, unless something waits for the client."""
        if self._pinging is None and not self._request.protocol.writing_paused:
            self._pinging = self._loop.create_task(self._ping(events))

    async def _ping(self, events: bytes) -> None:
        try:
            await self.send(events)
        except ConnectionError:
            pass  # the handler is being cancelled already
        finally:
            self._pinging = None

    def _stop_pings(self) -> None:
        for timer in (self._silence, self._next_progress):
            if timer is not None:
                timer.cancel()
        self._silence = self._next_progress = None
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None


EVENT_STREAM = web.RequestKey("EVENT_STREAM", EventStream)  # of a request, from the response's first byte on
