"""What every handler needs, under one key of the application. Made by `app.make_app`."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from caraserve.config import HttpConfig
from caraserve.http.bodies import BodyBudget
from caraserve.http.interfaces import ClusterApi, EngineApi
from caraserve.http.whole_answer import TURN_SCORES
from caraserve.telemetry.background import BackgroundTasks
from caraserve.telemetry.metrics import Metrics
from caraserve.util.tasks import TurnBudget

if TYPE_CHECKING:
    from caraserve.http.dispatch import Dispatch

log = logging.getLogger("caraserve.http")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class HttpTimings:
    """How long the server waits for its clients, in seconds."""

    ping_s: float = 15.0  # silence on a stream before a comment line keeps proxies from closing it
    write_s: float = 30.0  # a client that takes nothing for so long is gone
    body_s: float = 30.0  # from the end of the headers to the end of the body
    keepalive_s: float = 75.0  # between requests, and for the headers of the first
    linger_s: float = 5.0  # for a client to stop sending a body that has been refused
    stop_s: float = 5.0  # for last bytes, when the server stops and all requests have ended


@dataclass(frozen=True, slots=True)
class Client:
    """Who sends a request."""

    name: str  # of its key, or its address where it has shown none
    is_admin: bool = False  # whether it may load and unload adapters


@dataclass(frozen=True, slots=True)
class Context:
    """The engine and the settings of the HTTP side."""

    engine: EngineApi
    metrics: Metrics
    config: HttpConfig
    allow_lora_updates: bool
    timings: HttpTimings
    started_s: float  # unix time
    bodies: BodyBudget
    cluster: ClusterApi | None = None  # None: this server serves alone
    dispatch: "Dispatch | None" = None  # None: it answers all requests itself
    background: BackgroundTasks = field(default_factory=BackgroundTasks)
    score_turns: TurnBudget = field(default_factory=lambda: TurnBudget(TURN_SCORES))
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def to_the_end(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Awaits `work`, which goes on should the client leave: half an adapter change helps nobody."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("administrative task ended: %r", task.exception())

    async def close(self) -> None:
        """Cancels what `to_the_end` still runs."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


CONTEXT = web.AppKey("CONTEXT", Context)
REQUEST_ID = web.RequestKey("REQUEST_ID", str)
CLIENT = web.RequestKey("CLIENT", Client)
ANSWERED_HERE = web.RequestKey("ANSWERED_HERE", str)  # our name, where another instance's request got to an answer
