"""One API request on this instance's engine: submits its engine requests, then gathers or streams their deltas."""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from caraserve.core.request import Finish, GenerateRequest
from caraserve.engine.token_stream import TokenStream
from caraserve.errors import BackendFailed, CaraServeError, Draining
from caraserve.http.access.adapter_choice import check_version
from caraserve.http.api_request import ApiRequest, ReceivedBody, ResponseTotals, TokenCounts
from caraserve.http.context import CONTEXT, FORWARDED, REQUEST_ID, SERVED_BY
from caraserve.http.direct_text import DirectText
from caraserve.http.management.adapters import tier_of
from caraserve.http.request_log import SUMMARY, model_label
from caraserve.http.streaming import EventStream, comment, progress_comment, tokens_comment
from caraserve.http.tracing import TRACE
from caraserve.http.whole_answer import ANSWER_BODY, WholeAnswer, paced
from caraserve.util.tasks import in_turns, run_together

log = logging.getLogger("caraserve.http")


class LocalRouter:
    """Answers every request on this instance. For a server without peers."""

    def draw_seed(self) -> int | None:
        return None

    async def route(self, request: web.Request, api_request: ApiRequest, received: ReceivedBody) -> web.StreamResponse:
        return (await Generation(request, api_request).run()).response

    def not_ready_reason(self) -> str | None:
        return None

    async def drain(self, timeout_s: float) -> None:
        return None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A response that has been sent or can be. `finishes`: of all engine requests if all ended well, else empty."""

    response: web.StreamResponse
    finishes: Sequence[Finish] = ()


class OtherVersionError(Exception):
    """The adapter's name stands for another version now than the instance meant that forwarded the request."""


class Generation:
    """Answers one API request. However `run` ends, a disconnect included, no engine request is left running."""

    def __init__(self, request: web.Request, api_request: ApiRequest, digest: str = "") -> None:
        """`digest`: of the version of the adapter that must answer; empty: the one for which its name stands now."""
        self.api_request = api_request
        self._request, self._digest = request, digest
        self._context = request.app[CONTEXT]
        self._streams: list[TokenStream] = []
        self._events: EventStream | None = None

    @property
    def response_started(self) -> bool:
        """Whether the client may have received a byte."""
        return self._events is not None and self._events.started

    def cancel(self) -> None:
        """Ends all engine requests; nothing is computed any more for those that wait."""
        for stream in self._streams:
            stream.cancel()

    async def run(self) -> GenerationResult:
        """Generates and sends the response. Raises CaraServeError or OtherVersionError before anything is sent."""
        result, self._request[SUMMARY].phases = None, None  # another attempt may have noted its own
        try:
            await self._submit()
            result = await (self._stream() if self.api_request.stream else self._gather())
            return result
        finally:
            if result is None or not result.finishes:  # otherwise all have ended, and 2,048 calls take 4 ms
                if self._streams and self._request[SUMMARY].phases is None:
                    # Those of the engine request that failed or, where the client or its deadline ended all, of the
                    # one that was queued last.
                    self._request[SUMMARY].phases = self._streams[-1].phases()
                self.cancel()
            if self._streams:
                self._streams[0].unread.drop_kept()

    async def _submit(self) -> None:
        """Submits all engine requests or, where one is refused, none: clients send the whole body again."""
        engine, first = self._context.engine, self.api_request.requests[0]
        if (grammar := first.params.grammar) is not None:  # all have the same
            await grammar.prepare(first.tenant)
        if (trace := self._request.get(TRACE)) is not None and (adapter := self.api_request.adapter) is not None:
            trace.tier = tier_of(engine.catalog.manager.find(engine.adapter(adapter).digest))
        with closing(engine.submit_each(self.api_request.requests)) as submitted:
            async for stream in in_turns(submitted):
                self._streams.append(stream)
                if len(self._streams) == 1:  # all of them get this version of the adapter
                    served_by = stream.served_by()
                    if self._digest and served_by.partition("@")[2] != self._digest:
                        raise OtherVersionError
                    self._note_version(served_by)

    def _note_version(self, served_by: str) -> None:
        """Notes what answers, for the header and the log line. Raises VersionDiffers if the client requires another."""
        if served_by and SERVED_BY not in self._request:
            check_version(self._request, served_by)
            self._request[SERVED_BY], self._request[SUMMARY].model = served_by, model_label(served_by)

    def _checked(self, finish: Finish | None) -> Finish:
        """Raises the error of a request that failed, or that the server, not the client, has cancelled."""
        if finish is None:
            raise BackendFailed("The engine ended a request without saying how.")
        if finish.reason in ("error", "cancelled"):
            self._request[SUMMARY].phases = finish.phases
        if finish.reason == "error":
            raise finish.error or BackendFailed("The request failed on the device.")
        if finish.reason == "cancelled":
            raise Draining("The server stopped before the answer was complete.", retry_after_s=1.0)
        return finish

    async def _gather(self) -> GenerationResult:
        writer, turns = self.api_request.writer, self._context.logprob_turns
        answers = [WholeAnswer(partial(writer.logprobs, at)) async for at in in_turns(range(len(self._streams)))]

        async def finish(answer: WholeAnswer, stream: TokenStream) -> Finish:
            try:
                await answer.gather(stream, turns)
            finally:
                self._request[SUMMARY].note_tokens(answer.num_tokens)
            return self._checked(answer.finish)

        finishes = await run_together(map(finish, answers, self._streams), len(answers))
        totals = await self._note_totals(finishes)
        self._note_version(totals.served_by)
        response = await writer.whole(answers, totals)
        if (body := response.get(ANSWER_BODY)) is not None and (transport := self._request.transport) is not None:
            body.count(self._streams[0].unread, transport.abort)
        response.headers["x-caraserve-phases"] = totals.phases()
        return GenerationResult(response, finishes)

    async def _stream(self) -> GenerationResult:
        writer = self.api_request.writer
        finishes: Sequence[Finish] = ()
        for one in self._streams:
            one.interval_tokens = self._context.config.stream_interval
        async with EventStream(self._request, self._context.timings, writer) as events:
            self._events = events
            if FORWARDED not in self._request:  # the instance that forwards could not try another one any more
                events.show_progress(self._progress)
            try:
                parts = enumerate(zip(self._streams, self.api_request.requests, strict=True))
                sending = (self._send_answer(events, index, *part) for index, part in parts)
                finishes = await run_together(sending, len(self._streams))
                totals = await self._note_totals(finishes)
                phases = comment(f"phases {totals.phases()}")  # too late for a header
                comments = phases + tokens_comment(totals.tokens.completion)
                await events.end(writer.last_events(totals) + comments)
            except ConnectionError:
                pass  # the client has left; aiohttp notices when it ends the response
            except Exception as error:
                if not events.started:
                    raise
                await events.end_with_error(_late_error(self._request, error))
        return GenerationResult(events.response, finishes)

    def _progress(self) -> bytes:
        """Returns a comment with how many tokens of the prompts are computed; empty before the first of them."""
        prompts = [len(one.prompt_ids) for one in self.api_request.requests]
        parts = zip(self._streams, prompts, strict=True)
        computed = sum([min(stream.num_computed(), tokens) for stream, tokens in parts])
        return comment(f"prefill {computed} of {sum(prompts)} tokens") if computed else b""

    async def _note_totals(self, finishes: Sequence[Finish]) -> ResponseTotals:
        """Adds up the engine requests, also for the log line."""
        totals = await ResponseTotals.of(finishes, self.api_request.n)
        self._request[SUMMARY].note_totals(totals)
        n = self.api_request.n
        async for first in in_turns(range(0, len(finishes), n)):
            longest = max([finish.completion_tokens for finish in finishes[first : first + n]])
            self._context.metrics.observe_prompt(n, longest)
        return totals

    async def _send_answer(
        self, events: EventStream, index: int, stream: TokenStream, inputs: GenerateRequest
    ) -> Finish:
        """Sends the events of one engine request as its deltas come. Raises its error."""
        writer, generated = self.api_request.writer, 0
        summary, direct = self._request[SUMMARY], None
        async for delta in stream:
            if delta.finish is not None:
                self._checked(delta.finish)
            self._note_version(stream.served_by())
            generated += len(delta.token_ids)
            summary.note_tokens(len(delta.token_ids))
            num_tokens = generated + (0 if direct is None else direct.num_tokens)
            counts = TokenCounts(len(inputs.prompt_ids), num_tokens, delta.finish.cached_tokens if delta.finish else 0)
            async for part in paced(delta, self._context.logprob_turns):
                new = writer.events(index, part, counts)
                if FORWARDED in self._request and (new or events.started):
                    new = progress_comment(summary.completion_tokens or 0) + new
                if part.finish is not None and len(self._streams) == 1:
                    events.hold(new)  # for the last events, which follow at once
                elif new:
                    await events.send(new)
            if delta.finish is not None:
                return delta.finish
            if direct is None and (direct := self._direct_text(events, index)) is not None:
                stream.write_with(direct.write)
        raise BackendFailed("The engine ended a request without saying how.")

    def _direct_text(self, events: EventStream, index: int) -> DirectText | None:
        """Returns what writes further text of an answer at once, if all that may come before its end is text."""
        is_plain = FORWARDED not in self._request and SERVED_BY in self._request
        if not is_plain or self._context.config.stream_interval > 1 or not events.started:
            return None
        text_events = self.api_request.writer.text_events(index)
        return None if text_events is None else DirectText(events, text_events, self._request[SUMMARY])


def _late_error(request: web.Request, error: Exception) -> CaraServeError:
    """The error, for a client that has already received a part of the response."""
    if isinstance(error, CaraServeError):
        return error
    log.error("request %s failed", request[REQUEST_ID], exc_info=error)
    return CaraServeError("The server made a mistake; its log has the details.")
