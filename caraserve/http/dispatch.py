"""Requests for answers: who gives them, this instance or another one.

A client's request is parsed here in any case, so that faults in it never travel, and so that routing knows what it
asks for. What another instance forwards is answered here or refused: that handler has no way on.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from aiohttp import web

from caraserve.cluster.routing.cost import CostEstimate
from caraserve.cluster.routing.forward_auth import REFUSED_HEADER, ForwardClaims, ForwardVerifier, format_refusal
from caraserve.cluster.routing.forwarding import Forwarding, LocalTarget, PeerTarget, RoutingAttempts
from caraserve.cluster.routing.router import Reason, Refusal
from caraserve.cluster.routing.routing_metrics import increment
from caraserve.core.request import Finish
from caraserve.errors import BackendFailed, CaraServeError, Draining, Forbidden, Overloaded, Unreachable
from caraserve.http.context import ANSWERED_HERE, CLIENT, CONTEXT, REQUEST_ID, Client
from caraserve.http.deadline import in_time
from caraserve.http.generation import Job, respond
from caraserve.http.interfaces import EngineApi, Find, named_adapter
from caraserve.http.json_reader import MOST_NUMBERS, Body, parse_object
from caraserve.http.proxy import ForwardedRequest, PeerProxy, RefusedError, UnreachedError, body_digest
from caraserve.http.queue_rebalance import QueueRebalancer
from caraserve.http.request_log import SUMMARY, model_label
from caraserve.http.responses import error_response, note_ignored, read_body
from caraserve.http.validation import Fields

log = logging.getLogger("caraserve.http")

_RETRY_S = 1.0
_MOVED = Refusal("stale-epoch", CostEstimate(inf, inf))

Parse = Callable[[Fields, EngineApi, Find, str], Awaitable[Job]]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An instance's part in a fleet, as far as requests go."""

    forwarding: Forwarding
    relays: PeerProxy
    gate: ForwardVerifier
    moves: QueueRebalancer


@in_time
async def answer(request: web.Request, parse: Parse, *, most_numbers: int = MOST_NUMBERS) -> web.StreamResponse:
    """A client's request; `most_numbers` as for `parse_object`."""
    context = request.app[CONTEXT]
    body = await read_body(request)
    values = await parse_object(body, most_numbers)
    dispatch, seed = context.dispatch, None
    if dispatch is not None and dispatch.forwarding.forwards and values.get("seed") is None:
        seed = values["seed"] = dispatch.forwarding.draw_seed()
    job = await _parsed(request, values, parse, lambda model: named_adapter(context, model))
    if dispatch is None:
        return await respond(request, job)
    return await _Journey(request, dispatch, job).run(body, seed)


async def answer_forwarded(
    request: web.Request, parse: Parse, *, most_numbers: int = MOST_NUMBERS
) -> web.StreamResponse:
    """A client's request that another instance has forwarded. It is answered here or refused."""
    dispatch = request.app[CONTEXT].dispatch
    if dispatch is None or not dispatch.forwarding.joined:
        raise web.HTTPServiceUnavailable(text="This instance has not joined its cluster yet.")
    hop = dispatch.gate.admit(request.path, request.headers, int(time.time() * 1000))
    body = await read_body(request)
    if await body_digest(body) != hop.body_digest:
        raise Forbidden("The body is not the one that was signed.")
    request[ANSWERED_HERE] = dispatch.forwarding.name
    request[CLIENT] = Client(hop.client)
    return await _answer_admitted(request, parse, dispatch, hop, body, most_numbers)


@in_time
async def _answer_admitted(
    request: web.Request, parse: Parse, dispatch: Dispatch, hop: ForwardClaims, body: Body, most_numbers: int
) -> web.StreamResponse:
    values = await parse_object(body, most_numbers)
    if hop.seed is not None:
        values["seed"] = hop.seed
    base_names = request.app[CONTEXT].engine.base_names
    job = await _parsed(request, values, parse, lambda model: None if model in base_names else hop.adapter)
    journey = _Journey(request, dispatch, job, hop=1)
    refusal = dispatch.forwarding.refusal(journey.arrival, force=hop.force, digest=hop.digest)
    if refusal is None:
        try:
            response = await journey.here()
        except _MovedError:
            refusal = _MOVED
        else:
            dispatch.forwarding.routing_metrics.received += 1
            return response
    increment(dispatch.forwarding.routing_metrics.refused, refusal.reason)
    error = Overloaded(f"this instance does not take the request now: {refusal.reason}", retry_after_s=_RETRY_S)
    refused = error_response(error)
    refused.headers[REFUSED_HEADER] = format_refusal(refusal)
    return refused


async def _parsed(request: web.Request, values: dict[str, Any], parse: Parse, find: Find) -> Job:
    fields = Fields(values)
    engine = request.app[CONTEXT].engine
    job = await parse(fields, engine, find, request[CLIENT].name)
    note_ignored(request, fields)
    request[SUMMARY].model = job.requests[0].adapter or engine.base_name
    return job


def _reason(error: CaraServeError) -> Reason:
    """Why this instance does not answer what another one may."""
    if isinstance(error, Overloaded):
        return "full"
    if isinstance(error, Unreachable):
        return "unreachable"
    return "failed" if isinstance(error, BackendFailed) else "draining"


class _MovedError(Exception):
    """The request waited here, and is to be answered elsewhere."""


class _Journey:
    """One request that this instance or another one answers."""

    def __init__(self, request: web.Request, dispatch: Dispatch, job: Job, hop: int = 0) -> None:
        self._request, self._job = request, job
        self._forwarding, self._relays, self._moves = dispatch.forwarding, dispatch.relays, dispatch.moves
        self._adapter = job.requests[0].adapter
        # Of a body with several prompts or answers the largest stands for all: it decides where they fit.
        prompt_tokens = max(len(one.prompt_ids) for one in job.requests)
        max_tokens = max(one.params.max_tokens for one in job.requests)
        self.arrival = self._forwarding.arrival(self._adapter, prompt_tokens, max_tokens, hop)

    async def run(self, body: Body, seed: int | None) -> web.StreamResponse:
        """Goes wherever the request may be answered, until it is. Raises CaraServeError when nothing has been sent."""
        trip = await self._forwarding.begin(self.arrival)
        words: web.Response | None = None
        while (stop := trip.next()) is not None:
            try:
                if isinstance(stop, LocalTarget):
                    return await self.here()
                return await self._there(stop, trip, body, seed)
            except (Overloaded, Draining, Unreachable, BackendFailed) as error:
                if isinstance(error, BackendFailed):
                    log.error("request %s failed: %s", self._request[REQUEST_ID], error.message)
                words = error_response(error)
                trip.failed(Refusal(_reason(error), CostEstimate(inf, inf)))
            except _MovedError:
                trip.failed(_MOVED)
            except RefusedError as refused:
                words = refused.response
                trip.failed(refused.refusal)
            except UnreachedError:
                trip.failed(None)
        if words is not None:
            return words
        raise Unreachable("No instance that has the adapter can be reached now.", retry_after_s=_RETRY_S)

    async def here(self) -> web.StreamResponse:
        """Answers. Raises CaraServeError or _MovedError when nothing has been sent yet."""
        await self._forwarding.obtain(self._adapter)
        predicted_ms = self._began(self._forwarding.name)

        def told(finishes: Sequence[Finish]) -> None:
            for finish in finishes:
                self._forwarding.answered(self._adapter, finish.completion_tokens)
            self._observe(self._forwarding.name, predicted_ms, finishes[0].phases.e2e_ms, finishes[0].completion_tokens)

        with self._moves.answering(self._job, self.arrival) as here:
            try:
                return await respond(self._request, self._job, told, here.running)
            except Draining:
                if here.moved:
                    raise _MovedError from None
                raise

    async def _there(self, peer: PeerTarget, trip: RoutingAttempts, body: Body, seed: int | None) -> web.StreamResponse:
        """Has another instance answer. Raises RefusedError, UnreachedError or Draining when nothing has been sent."""
        routing_metrics = self._forwarding.routing_metrics
        meant = None if self._adapter is None else self._forwarding.resolve(self._adapter)
        parcel = ForwardedRequest(
            body, await body_digest(body), trip.id, self._adapter, "" if meant is None else meant.digest, seed
        )
        predicted_ms, began_s = self._began(peer.name), time.perf_counter()
        try:
            carried = await self._relays.carry(self._request, peer, parcel)
        except UnreachedError as error:
            log.warning("request %s: no answer from %s: %s", self._request[REQUEST_ID], peer.name, error)
            increment(routing_metrics.unreached, peer.name)
            self._forwarding.mark_unreachable(peer.name)
            raise
        summary = self._request[SUMMARY]
        summary.forwarded_to, summary.completion_tokens = peer.name, carried.tokens
        if self._adapter is not None:
            summary.model = model_label(self._adapter, parcel.adapter_digest)
        if carried.end == "lost":
            log.warning("request %s: %s has gone in the middle of an answer", self._request[REQUEST_ID], peer.name)
            increment(routing_metrics.lost, peer.name)
        elif carried.end == "whole" and carried.response.status < 500:
            increment(routing_metrics.forwarded, peer.name)
            self._observe(peer.name, predicted_ms, 1000 * (time.perf_counter() - began_s), carried.tokens)
        return carried.response

    def _began(self, name: str) -> float:
        predicted_ms = self._forwarding.began(name, self.arrival)
        for _ in self._job.requests[1:]:
            self._forwarding.began(name, self.arrival)
        return predicted_ms

    def _observe(self, name: str, predicted_ms: float, took_ms: float, tokens: int) -> None:
        if len(self._job.requests) == 1 and tokens > 0 and self.arrival.hop == 0:
            self._forwarding.routing_metrics.observe_latency(name, predicted_ms, took_ms / tokens)
