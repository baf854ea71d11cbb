"""What every handler needs, under one key of the application: the engine, the router, settings and budgets."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web

from caraserve.cluster.membership.member import Member
from caraserve.config import KEEP_ALIVE_S, HttpConfig
from caraserve.errors import ServerBusy
from caraserve.http.api_request import RequestRouter
from caraserve.http.whole_answer import TURN_LOGPROBS
from caraserve.loop import Engine
from caraserve.lora.management import AdapterManagement
from caraserve.telemetry.background import BackgroundTasks
from caraserve.telemetry.metrics import Metrics
from caraserve.util.tasks import TurnBudget
from caraserve.util.units import human_bytes

log = logging.getLogger("caraserve.http")

_UNCOUNTED_BYTES = 64 << 10  # of each body, so that large bodies of some clients do not refuse small ones of others
_LEAST_BODY_BYTES = 256 << 20
_LARGEST_BODIES = 4  # that fit at the same time, whatever the limit for one is
_RETRY_S = 1.0
_BEGUN_PER_TURN = 4  # requests, at 0.3 to 0.6 ms each until they wait for the engine

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class HttpTimings:
    """How long the server waits for its clients, in seconds."""

    ping_s: float = 15.0  # silence in a stream, before a comment line keeps proxies from closing it
    progress_s: float = 1.0  # between two comments on a prompt that is being computed
    write_s: float = 30.0  # in which a client reads next to nothing, before the connection is cut
    body_s: float = 30.0  # from the end of the headers to the end of the body; of an upload, without a byte
    upload_grace_s: float = 60.0  # of an upload, before it must have arrived at the least rate
    first_request_s: float = 75.0  # from the opening of a connection to the end of its first request's headers
    keepalive_s: float = KEEP_ALIVE_S  # between requests
    linger_s: float = 5.0  # for a client to stop sending a body that has been refused
    stop_s: float = 5.0  # for the last bytes, when the server stops and all requests have ended


class BodyBudget:
    """Limits the bytes of the bodies of all requests under way, and of the answers that other instances send to them. A
    body counts as it arrives, until its request ends."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_bytes = max(_LEAST_BODY_BYTES, _LARGEST_BODIES * max_body_bytes)
        self.held_bytes = 0

    def reserve(self, request: web.Request, num_bytes: int) -> None:
        """Counts the first `num_bytes` of a request's body, then of its answer. Raises ServerBusy beyond the limit."""
        held_bytes = request.get(_HELD_BYTES, 0)
        more_bytes = max(0, num_bytes - _UNCOUNTED_BYTES) - held_bytes
        if self.held_bytes + more_bytes > self._max_bytes:
            raise ServerBusy(
                f"The bodies of all requests under way, and the answers of other instances to them, exceed "
                f"{human_bytes(self._max_bytes)}; send the request again.",
                retry_after_s=_RETRY_S,
            )
        self.held_bytes += more_bytes
        request[_HELD_BYTES] = held_bytes + more_bytes

    def release(self, request: web.Request) -> None:
        """Frees what was reserved for a request that has ended."""
        self.held_bytes -= request.get(_HELD_BYTES, 0)
        request[_HELD_BYTES] = 0


@dataclass(frozen=True, slots=True)
class Context:
    """The engine and the settings of the HTTP side."""

    engine: Engine
    metrics: Metrics
    config: HttpConfig
    allow_lora_updates: bool
    timings: HttpTimings
    started_s: float  # unix time
    bodies: BodyBudget
    router: RequestRouter
    cluster: Member | None = None  # None: this server has no peers
    background: BackgroundTasks = field(default_factory=BackgroundTasks)
    management: AdapterManagement | None = None
    begin_turns: TurnBudget = field(default_factory=lambda: TurnBudget(_BEGUN_PER_TURN))
    logprob_turns: TurnBudget = field(default_factory=lambda: TurnBudget(TURN_LOGPROBS))
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def complete(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Awaits `work`, which continues if the client leaves: half of an adapter change would be of no use."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("administrative task ended: %r", task.exception())

    async def close(self) -> None:
        """Cancels the work that `complete` has started."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


CONTEXT = web.AppKey("CONTEXT", Context)
REQUEST_ID = web.RequestKey("REQUEST_ID", str)
RATE_HEADERS = web.RequestKey("RATE_HEADERS", dict[str, str])  # of the response, where the client has limits
ANSWERED_BY = web.RequestKey("ANSWERED_BY", str)  # the name of the instance that answers, in a cluster
FORWARDED = web.RequestKey("FORWARDED", bool)  # set where another instance has forwarded the request to this one
SERVED_BY = web.RequestKey("SERVED_BY", str)  # `adapter@digest`, or the base model's name; once it is known
_HELD_BYTES = web.RequestKey("_HELD_BYTES", int)
