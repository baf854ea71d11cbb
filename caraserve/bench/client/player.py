"""Sends a workload to an endpoint and records every request.

Open loop: each request is sent at its scheduled time, whether or not earlier ones have ended. Closed loop: at most
`max_concurrency` requests are in flight; a request that is due waits until another one ends.
"""

import asyncio
import contextlib
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import orjson

from caraserve.bench.client.connection import Connections, HttpExchange
from caraserve.bench.client.dialects import LoadSettings, decode, request_head
from caraserve.bench.client.endpoint import Endpoint
from caraserve.bench.records import PlannedRequest, RequestRecord, Run, Workload
from caraserve.util.alarm import Alarm

_EARLY_S = 120e-6  # time to wake up from a timer: the kernel, the event loop and a sleeping core


class Pacer:
    """Calls `call(index)` at each of the given ascending times, to within microseconds.

    A timer wakes it 120 µs early, and it spins for the rest.
    """

    def __init__(self, moments_s: Sequence[float], call: Callable[[int], None]) -> None:
        """`moments_s` are times of `time.perf_counter`. Create a pacer in the running event loop."""
        self._moments_s, self._call, self._next = moments_s, call, 0
        self._alarm = Alarm()
        self._arm()

    def stop(self) -> None:
        """Stops calling."""
        self._next = len(self._moments_s)
        self._alarm.close()

    def _arm(self) -> None:
        if self._next == len(self._moments_s):
            self.stop()
        else:
            self._alarm.set(self._moments_s[self._next] - _EARLY_S, self._fire)

    def _fire(self) -> None:
        while self._next < len(self._moments_s):
            ahead_s = self._moments_s[self._next] - time.perf_counter()
            if ahead_s > 2 * _EARLY_S:
                break
            while time.perf_counter() < self._moments_s[self._next]:
                pass
            index, self._next = self._next, self._next + 1
            self._call(index)
        self._arm()


_LEAD_S = 0.05  # from the start to the first request, so that it is not late already
_INTERRUPTED = "interrupted"


@dataclass(slots=True)
class RunProgress:
    """Progress of a run, for display."""

    total: int
    sent: int = 0
    done: int = 0
    failed: int = 0
    recent_ttft_s: list[float] = field(default_factory=list)  # of the last 200 completed requests


class Player:
    """Performs one run; `stop` can be called at any time from the event loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        workload: Workload,
        names: Sequence[str],
        settings: LoadSettings,
        label: str,
        others: Sequence[Endpoint] = (),
    ) -> None:
        """`names[i]` is the name of the adapter with index i in the workload. Requests go in turn to `endpoint` and to
        `others`, further instances of the same service."""
        self._endpoint, self._names, self._settings, self._label = endpoint, names, settings, label
        self._planned = workload.requests
        endpoints = (endpoint, *others)
        heads = [request_head(one.dialect, one.root, one.headers) for one in endpoints]
        bodies = (orjson.dumps(endpoint.dialect.body(one, self._model(one), settings)) for one in self._planned)
        self._requests = [
            f"{heads[place % len(heads)]}{len(body)}\r\n\r\n".encode("latin-1") + body
            for place, body in enumerate(bodies)
        ]
        self._exchanges: dict[int, HttpExchange] = {}
        self._waiting: list[int] = []  # closed loop: requests that are due while `max_concurrency` are in flight
        self._stopped = False
        self.live = RunProgress(len(self._planned))
        self._ended = asyncio.Event()
        self._connections = [Connections(one.root, one.tls) for one in endpoints]
        self._pacer: Pacer | None = None

    async def play(self) -> Run:
        """Sends all requests and waits for all responses. Raises OSError when the endpoint cannot be reached."""
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each request in flight needs one
        for connections in self._connections:
            await connections.warm_up()
        if self._stopped:
            self._close()
            return Run(self._label, (), 0.0, interrupted=True, concurrency=self._settings.max_concurrency)
        with undisturbed():
            started_s = time.perf_counter() + _LEAD_S
            moments_s = [started_s + planned.at_s for planned in self._planned]
            if self._planned:
                self._pacer = Pacer(moments_s, self._due)
                await self._ended.wait()
            ended_s = time.perf_counter()
        self._close()
        records = tuple(self._record(index, exchange, started_s) for index, exchange in sorted(self._exchanges.items()))
        return Run(self._label, records, ended_s - started_s, self._stopped, self._settings.max_concurrency)

    def stop(self) -> None:
        """Stops sending, closes all connections, and records the requests in flight as interrupted."""
        self._stopped = True
        if self._pacer is not None:
            self._pacer.stop()
        for exchange in list(self._exchanges.values()):
            exchange.finish(_INTERRUPTED)
        self._close()
        self._ended.set()

    def _close(self) -> None:
        for connections in self._connections:
            connections.close()

    # --- sending ---

    def _due(self, index: int) -> None:
        most = self._settings.max_concurrency
        if most is not None and self.live.sent - self.live.done >= most:
            self._waiting.append(index)
        else:
            self._send(index)

    def _send(self, index: int) -> None:
        exchange = HttpExchange(self._requests[index], self._done)
        self._exchanges[index] = exchange
        self.live.sent += 1
        self._connections[index % len(self._connections)].send(exchange)

    def _done(self, exchange: HttpExchange) -> None:
        live = self.live
        live.done += 1
        if exchange.error is not None or exchange.status != 200:
            live.failed += 1
        elif exchange.pieces:
            live.recent_ttft_s.append(exchange.pieces[0][0] - exchange.sent_s)
            del live.recent_ttft_s[:-200]
        if self._stopped:
            return
        if self._waiting:
            self._send(self._waiting.pop(0))
        elif live.done == live.total:
            self._ended.set()

    # --- records ---

    def _model(self, planned: PlannedRequest) -> str | None:
        return None if planned.adapter is None else self._names[planned.adapter]

    def _record(self, index: int, exchange: HttpExchange, started_s: float) -> RequestRecord:
        planned, answer = self._planned[index], decode(self._endpoint.dialect, exchange)
        return RequestRecord(
            index=planned.index,
            model=self._model(planned) or self._endpoint.base_model,
            rank=self._endpoint.ranks.get(self._names[planned.adapter]) if planned.adapter is not None else 0,
            due_s=planned.at_s,
            sent_s=exchange.sent_s - started_s,
            done_s=exchange.done_s - started_s,
            prompt_tokens=planned.prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            asked_prompt_tokens=planned.prompt_tokens,
            asked_output_tokens=planned.output_tokens,
            token_s=tuple(at_s - started_s for at_s in answer.token_s),
            error=answer.error,
            phases=answer.phases,
        )


@contextmanager
def undisturbed() -> Iterator[None]:
    """Turns garbage collection off and, if the system allows it, gives this thread real-time priority.

    A collection would block the event loop for longer than the measured latencies; and on a machine whose cores the
    server keeps busy, requests would be sent late.
    """
    enabled, policy, priority = gc.isenabled(), os.sched_getscheduler(0), os.sched_getparam(0)
    gc.collect()
    gc.disable()
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, policy, priority)
        if enabled:
            gc.enable()


async def report_progress(player: Player, shown: Callable[[RunProgress], None], every_s: float) -> None:
    """Calls `shown` with a run's progress every `every_s` seconds until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        shown(player.live)
