"""One HTTP request as one or more engine requests: submits them, gathers or streams their deltas, cancels the rest.

`completions.py` and `chat.py` parse a body into a `Job`, with one `ChoiceWriter` for each (prompt × n), and call
`respond`.
Whatever way the handler ends, a disconnect included, every stream is cancelled, which for a finished one does nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from caraserve.core.request import Finish, GenerateRequest, TokenDelta
from caraserve.errors import BackendFailed, CaraServeError, Draining, InvalidRequest
from caraserve.http.context import CONTEXT, REQUEST_ID
from caraserve.http.field_check import check_fields
from caraserve.http.interfaces import StreamApi
from caraserve.http.request_log import SUMMARY, model_label
from caraserve.http.request_schema import STREAM_OPTIONS
from caraserve.http.responses import error_body, fault_body
from caraserve.http.streaming import DONE, ChunkFrame, EventStream, comment
from caraserve.http.validation import Fields
from caraserve.http.whole_answer import WholeAnswer, WholeChoiceWriter, paced, whole_response
from caraserve.util.tasks import TurnBudget, in_turns

log = logging.getLogger("caraserve.http")

# One body may become this many engine requests: enough for an evaluation's batch, and far below a body's 10⁶ prompts.
MAX_CHOICES = 2048


class ChoiceWriter(WholeChoiceWriter, Protocol):
    """One answer in the shape of its API; keeps what lies between two deltas (text offset, role sent)."""

    def chunks(self, delta: TokenDelta) -> list[dict[str, Any]]:
        """The `choices` entries, one an event, that a delta becomes on a stream."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the client wants its answer."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool


@dataclass(frozen=True, slots=True)
class Job:
    """`requests[i]` is answered as `choices[i]`; prompt p's n answers have the indices [p·n, (p+1)·n).

    `whole_head` and `chunk_head` are the fields that a response and every event of a stream begin with; `first_head`
    stands in the first event alone.
    """

    requests: tuple[GenerateRequest, ...]
    choices: tuple[ChoiceWriter, ...]
    n: int
    delivery: Delivery
    whole_head: dict[str, Any]
    chunk_head: dict[str, Any]
    first_head: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job under way, for whoever may want to end it early."""

    streams: Sequence[StreamApi] = ()
    out: EventStream | None = None

    @property
    def touched(self) -> bool:
        """Whether the client may have been sent something."""
        return self.out is not None and self.out.started


def parse_delivery(fields: Fields) -> Delivery:
    """Raises InvalidRequest naming the field."""
    stream = fields.boolean("stream", False)
    options = fields.nested("stream_options")
    check_fields(options, STREAM_OPTIONS)
    if fields.raw("stream_options") is not None and not stream:
        raise InvalidRequest("stream_options need stream to be true.", param="stream_options")
    include_usage = options.boolean("include_usage", False)
    continuous = options.boolean("continuous_usage_stats", False)
    return Delivery(stream, include_usage, include_usage and continuous, fields.boolean("return_token_ids", False))


async def respond(
    request: web.Request,
    job: Job,
    told: Callable[[Sequence[Finish]], None] = lambda finishes: None,
    running: RunningJob | None = None,
) -> web.StreamResponse:
    """Runs the job. `told`: how its requests ended, if they all ended well. Raises CaraServeError when nothing has been
    sent yet."""
    running, engine, summary = running or RunningJob(), request.app[CONTEXT].engine, request[SUMMARY]
    streams: list[StreamApi] = []
    running.streams = streams

    def ended(finishes: Sequence[Finish]) -> None:
        summary.note_finishes(finishes, job.n)
        told(finishes)

    try:
        # All or nothing: where one is refused, those before it are cancelled, since clients send the whole again.
        with closing(engine.submit_each(job.requests)) as submitted:
            async for stream in in_turns(submitted):
                streams.append(stream)
                adapter = job.requests[0].adapter
                if len(streams) == 1 and adapter is not None:  # the version that they all get
                    summary.model = model_label(adapter, engine.adapter(adapter).digest)
        if job.delivery.stream:
            return await _stream(request, job, running, ended)
        return await _gather(request, job, streams, ended)
    finally:
        for stream in streams:
            stream.cancel()


async def _gather(
    request: web.Request, job: Job, streams: Sequence[StreamApi], told: Callable[[Sequence[Finish]], None]
) -> web.Response:
    turns = request.app[CONTEXT].score_turns
    answers = [WholeAnswer(choice) async for choice in in_turns(job.choices)]
    finishes = await _together(
        [_finished(answer, stream, turns) for answer, stream in zip(answers, streams, strict=True)]
    )
    await asyncio.sleep(0)  # there may be thousands: ending them was enough for one turn
    told(finishes)
    tail = {"usage": total_usage(finishes, job.n)}
    return await whole_response(job.whole_head, answers, tail, {"x-caraserve-phases": _phases(finishes)})


async def _finished(answer: WholeAnswer, stream: StreamApi, turns: TurnBudget) -> Finish:
    """Raises the request's error."""
    await answer.gather(stream, turns)
    return _checked(answer.finish)


async def _stream(
    request: web.Request, job: Job, running: RunningJob, told: Callable[[Sequence[Finish]], None]
) -> web.StreamResponse:
    turns = request.app[CONTEXT].score_turns
    frame = ChunkFrame(job.chunk_head, job.first_head, usage_null=job.delivery.include_usage)
    async with EventStream(request, request.app[CONTEXT].timings) as out:
        running.out = out
        try:
            pumps = [
                _pump(out, frame, choice, turns, stream, asked if job.delivery.continuous_usage else None)
                for choice, stream, asked in zip(job.choices, running.streams, job.requests, strict=True)
            ]
            finishes = await _together(pumps)
            told(finishes)
            if job.delivery.include_usage:
                await out.send(frame.usage(total_usage(finishes, job.n)))
            await out.send(comment(f"phases {_phases(finishes)}") + DONE)  # its headers left long ago
        except ConnectionError:
            return out.response  # the client has left; aiohttp notices when it ends the response
        except Exception as error:
            if not out.started:
                raise
            await out.end_in_error(_late_error(request, error))
    return out.response


async def _pump(
    out: EventStream,
    frame: ChunkFrame,
    choice: ChoiceWriter,
    turns: TurnBudget,
    stream: StreamApi,
    counted: GenerateRequest | None,
) -> Finish:
    """Sends one choice's events as its deltas come; `counted`: each with the usage so far. Raises its error."""
    generated = 0
    async for delta in stream:
        if delta.finish is not None:
            _checked(delta.finish)
        generated += len(delta.token_ids)
        so_far = None
        if counted is not None:
            so_far = usage(len(counted.prompt_ids), generated, delta.finish.cached_tokens if delta.finish else 0)
        async for part in paced(delta, turns):
            events = b"".join([frame.choice(chunk, so_far) for chunk in choice.chunks(part)])
            if events:
                await out.send(events)
        if delta.finish is not None:
            return delta.finish
    raise BackendFailed("The engine ended a request without saying how.")


async def _together(parts: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Runs all at once; the first failure cancels the others and is raised as it is."""
    if len(parts) == 1:  # nearly every request: no task of its own
        return [await parts[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) async for part in in_turns(parts)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for part in parts:
            part.close()  # those that were not begun
    return [task.result() for task in tasks]


def _checked(finish: Finish | None) -> Finish:
    """Raises the error of a request that failed, or that the server, not the client, has cancelled."""
    if finish is None:
        raise BackendFailed("The engine ended a request without saying how.")
    if finish.reason == "error":
        raise finish.error or BackendFailed("The request failed on the device.")
    if finish.reason == "cancelled":
        raise Draining("The server stopped before the answer was complete.", retry_after_s=1.0)
    return finish


def _late_error(request: web.Request, error: Exception) -> dict[str, Any]:
    if isinstance(error, CaraServeError):
        return fault_body(error)
    log.error("request %s failed", request[REQUEST_ID], exc_info=error)
    return error_body("The server made a mistake; its log has the details.", "server_error", None, None)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def total_usage(finishes: Sequence[Finish], n: int) -> dict[str, Any]:
    """Usage of a whole response; a prompt with n answers counts once."""
    prompts = finishes[::n]
    return usage(
        sum(finish.prompt_tokens for finish in prompts),
        sum(finish.completion_tokens for finish in finishes),
        sum(finish.cached_tokens for finish in prompts),
    )


def _phases(finishes: Sequence[Finish]) -> str:
    """Where the time of the slowest choice went, in milliseconds."""
    phases = max((finish.phases for finish in finishes), key=lambda phases: phases.e2e_ms)
    return (
        f"queued={phases.queued_ms:.3f};load={phases.load_ms:.3f};"
        f"prefill={phases.prefill_ms:.3f};decode={phases.decode_ms:.3f};"
        f"stalled={phases.stalled_ms:.3f};interrupted={phases.interrupted_ms:.3f};cpu_layers={phases.cpu_layers}"
    )
