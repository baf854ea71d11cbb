"""Routes requests in a cluster: each is answered by this instance or forwarded to another one.

A client's request is parsed here in any case: mistakes in it are never forwarded, and routing needs its adapter and its
lengths. Only its grammar is compiled where it is answered. A request that another instance has forwarded is answered
here or refused, never forwarded again.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from aiohttp import web

from caraserve.cluster.membership.member import Member, QueryBody
from caraserve.cluster.placement.migration import QueuedRequest, rebalanced
from caraserve.cluster.routing.cost import Arrival, CostEstimate
from caraserve.cluster.routing.forward_auth import REFUSED_HEADER, ForwardClaims, ForwardVerifier, format_refusal
from caraserve.cluster.routing.router import Reason, Refusal
from caraserve.cluster.routing.routing_metrics import increment
from caraserve.cluster.routing.selector import InstanceSelector, LocalTarget, PeerTarget, RoutingAttempts
from caraserve.errors import (
    BackendFailed,
    CaraServeError,
    Draining,
    Forbidden,
    ForwardRefused,
    Overloaded,
    ServerBusy,
    Unreachable,
)
from caraserve.http.access.adapter_choice import (
    BASE_MODEL,
    AdapterFinder,
    chosen_adapter,
    find_forwarded,
    settings_of,
)
from caraserve.http.api_request import ApiRequest, ReceivedBody
from caraserve.http.body.field_types import Fields
from caraserve.http.body.json_reader import Body, parse_object
from caraserve.http.client import CLIENT, Client, note_client
from caraserve.http.context import ANSWERED_BY, CONTEXT, FORWARDED, REQUEST_ID
from caraserve.http.deadline import within_deadline
from caraserve.http.generation import Generation, OtherVersionError
from caraserve.http.generation_routes import GenerationRoute
from caraserve.http.proxy import ForwardedRequest, PeerProxy, RefusedError, UnreachedError, body_digest
from caraserve.http.responses import error_response, note_parsed, read_body
from caraserve.loop import Engine
from caraserve.lora.settings import AdapterSettings
from caraserve.util.tasks import in_turns

log = logging.getLogger("caraserve.http")

_INTERVAL_S = 1.0  # between rebalancings
_COST_TOKENS = 32.0  # least gain of a move, in tokens of work: it costs a forward and a place at the end of a queue
ANSWERING_QUESTION = "answering"  # kind of a query: (ANSWERING_QUESTION, id of a forwarded request, attempt)
_RETRY_S = 1.0
_NEVER = CostEstimate(inf, inf)
_NO, _YES = 0, 1
_ANSWER_S = 1.0
_ASKED = 5  # times, with a second in between: connections of the cluster break and come back


@dataclass(slots=True, eq=False)
class TrackedGeneration:
    """A generation on this instance, which moves if it still waits."""

    generation: Generation
    arrival: Arrival
    moved: bool = False

    def is_queued(self, waiting: Set[str]) -> bool:
        """Whether none of its engine requests has started, and its client has received nothing."""
        requests = self.generation.api_request.requests
        return not self.generation.response_started and all(one.request_id in waiting for one in requests)

    def move(self) -> None:
        """Cancels it here, for another instance to answer."""
        self.moved = True
        self.generation.cancel()


class QueueRebalancer:
    """Queue rebalancing as in dLoRA: once a second, moves waiting requests to an instance with less work.

    Only for `--routing dlora`. Only a request that waits moves: it is cancelled here and returned to the instance that
    has its client, which forwards it to another one and keeps the stream. The paper also moves running requests with
    their KV blocks, by an integer program. `cluster/placement/migration.py` chooses the moves.
    """

    def __init__(self, engine: Engine, selector: InstanceSelector) -> None:
        self._engine, self._selector = engine, selector
        self._tracked: dict[str, TrackedGeneration] = {}  # by the id of the first engine request

    @contextmanager
    def track(self, generation: Generation, arrival: Arrival) -> Iterator[TrackedGeneration]:
        """Lets a generation move while the context is open."""
        tracked = TrackedGeneration(generation, arrival)
        request_id = generation.api_request.requests[0].request_id
        self._tracked[request_id] = tracked
        try:
            yield tracked
        finally:
            del self._tracked[request_id]

    async def run(self) -> None:
        """Rebalances once a second, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self.rebalance()

    def rebalance(self) -> None:
        """Moves the waiting requests that other instances would finish sooner."""
        waiting = self._engine.waiting()
        queued = {request_id: one for request_id, one in self._tracked.items() if one.is_queued(waiting)}
        if not queued:
            return
        selector = self._selector
        queue = [
            QueuedRequest(request_id, one.arrival.adapter, round(one.arrival.prompt_tokens + one.arrival.output_tokens))
            for request_id, one in queued.items()
        ]
        outstanding, holders = selector.outstanding({one.adapter for one in queue})
        for move in rebalanced({selector.name: queue}, outstanding, holders, _COST_TOKENS):
            queued[move.request_id].move()
            selector.routing_metrics.moved += 1


async def is_answering(node: Member, peer: str, request_id: str, attempt: int) -> bool:
    """Asks another instance whether it still answers a request that was forwarded to it. No answer to several questions
    counts as no; one that is neither yes nor no counts as yes, since instances of earlier versions send it."""
    for _ in range(_ASKED):
        answer = await node.query(peer, (ANSWERING_QUESTION, request_id, attempt), _ANSWER_S)
        if answer is not None:
            return answer != (_NO,)
        await asyncio.sleep(_ANSWER_S)
    return False


class ClusterRouter:
    """The `RequestRouter` of an instance with peers."""

    def __init__(
        self, selector: InstanceSelector, proxy: PeerProxy, verifier: ForwardVerifier, rebalancer: QueueRebalancer
    ) -> None:
        self.selector, self.proxy, self.rebalancer = selector, proxy, rebalancer
        self._verifier = verifier
        self._answering: set[tuple[str, str, int]] = set()  # sender, id and attempt of forwarded requests under way

    def draw_seed(self) -> int | None:
        return self.selector.draw_seed() if self.selector.forwards else None

    def not_ready_reason(self) -> str | None:
        if self.selector.is_registry_known:
            return None
        return "This instance has yet to hear from its cluster which adapters there are."

    async def drain(self, timeout_s: float) -> None:
        await self.proxy.drain(timeout_s)

    async def close(self) -> None:
        """Closes the connections to other instances."""
        await self.proxy.close()

    async def route(self, request: web.Request, api_request: ApiRequest, received: ReceivedBody) -> web.StreamResponse:
        return await _RoutedRequest(self, request, api_request).route(received)

    async def answer_forwarded(self, request: web.Request, route: GenerationRoute) -> web.StreamResponse:
        """Verifies a request that another instance has forwarded, then answers or refuses it."""
        if not self.selector.joined:
            raise web.HTTPServiceUnavailable(text="This instance has not joined its cluster yet.")
        claims = self._verifier.admit(request.path, request.headers, int(time.time() * 1000))
        attempt = (claims.sender, claims.id, claims.attempt)
        self._answering.add(attempt)
        try:
            body = await read_body(request)
            if await body_digest(body) != claims.body_digest:
                raise Forbidden("The body is not the one that was signed.")
            request[ANSWERED_BY], request[FORWARDED] = self.selector.name, True
            note_client(request, Client(claims.client, weight=claims.weight, owns_cache=claims.owns_cache))
            return await _answer_verified(request, self, route, claims, body)
        finally:
            self._answering.discard(attempt)

    def answer_query(self, peer: str, body: QueryBody) -> QueryBody:
        """Answers another instance that has forwarded a request and waits, whether it is still answered here."""
        match body:
            case (_, str(request_id), int(attempt)):
                return (_YES if (peer, request_id, attempt) in self._answering else _NO,)
        return ()


@within_deadline
async def _answer_verified(
    request: web.Request, router: ClusterRouter, route: GenerationRoute, claims: ForwardClaims, body: Body
) -> web.StreamResponse:
    engine, selector = request.app[CONTEXT].engine, router.selector
    values = await parse_object(body, route.most_numbers)
    if claims.seed is not None:
        values["seed"] = claims.seed
    fields = Fields(values)
    # The sender has resolved the model's name; this instance may not know it yet.
    chosen = BASE_MODEL
    if claims.adapter is not None:
        context = request.app[CONTEXT]
        chosen = chosen_adapter(context, claims.adapter, find_forwarded(context, claims.adapter))
        if chosen.defaults.digest != claims.defaults_digest:
            return _refused(engine, selector, Refusal("no-adapter", _NEVER))
    find: AdapterFinder = lambda model: BASE_MODEL if model in engine.base_names else chosen  # noqa: E731
    api_request = await route.parse(fields, engine, find, request[CLIENT])
    note_parsed(request, fields, api_request)
    routed = _RoutedRequest(router, request, api_request, forwarded_digest=claims.digest)
    # Without a digest, the adapter is one that is, or was a moment ago, being uploaded to this instance.
    refusal = selector.refusal(routed.arrival, force=claims.force, digest=claims.digest or None)
    if refusal is None:
        try:
            response = await routed.answer_here()
        except _MovedError as moved:
            refusal = moved.refusal
        except OtherVersionError:
            refusal = Refusal("no-adapter", _NEVER)
        else:
            selector.routing_metrics.received += 1
            return response
    return _refused(engine, selector, refusal)


def _refused(engine: Engine, selector: InstanceSelector, refusal: Refusal) -> web.Response:
    """The response to an instance whose request is not answered here."""
    increment(selector.routing_metrics.refused, refusal.reason)
    retry_after_s = engine.predicted_wait_s() if refusal.reason == "full" else _RETRY_S
    refused = error_response(ForwardRefused(refusal.reason, retry_after_s=retry_after_s))
    refused.headers[REFUSED_HEADER] = format_refusal(refusal)
    return refused


class _MovedError(Exception):
    """The request waited in this instance's queue; the rebalancer has cancelled it, for another instance to answer."""

    refusal = Refusal("stale-epoch", _NEVER)


class _RoutedRequest:
    """One request that this instance or another one answers."""

    def __init__(
        self,
        router: ClusterRouter,
        request: web.Request,
        api_request: ApiRequest,
        *,
        forwarded_digest: str | None = None,
    ) -> None:
        """`forwarded_digest`: of the adapter's version that the forwarding instance means, empty if it knows none; None
        for a request that was not forwarded."""
        self._forwarded_digest = forwarded_digest
        self._router, self._request, self._api_request = router, request, api_request
        self._selector, self._adapter = router.selector, api_request.adapter
        # The largest of several prompts or answers stands for all of them: it decides where they fit.
        prompt_tokens = max(len(one.prompt_ids) for one in api_request.requests)
        max_tokens = max(one.params.max_tokens for one in api_request.requests)
        self.arrival = self._selector.arrival(self._adapter, prompt_tokens, max_tokens)

    async def route(self, received: ReceivedBody) -> web.StreamResponse:
        """Tries one instance after the other until one answers, which the answer's header names. Raises CaraServeError
        when nothing has been sent, or returns the last refusal, under this instance's name."""
        attempts = await self._selector.begin(self.arrival)
        refused: web.Response | None = None
        while (target := attempts.next()) is not None:
            self._request[ANSWERED_BY] = self._selector.name if isinstance(target, LocalTarget) else target.name
            try:
                if isinstance(target, LocalTarget):
                    return await self.answer_here()
                return await self._forward(target, attempts, received)
            except (Overloaded, Draining, ServerBusy, Unreachable, BackendFailed) as error:
                if isinstance(error, ServerBusy) and not isinstance(target, LocalTarget):
                    raise  # this instance has no memory for the answers of others
                if isinstance(error, BackendFailed):
                    log.error("request %s failed: %s", self._request[REQUEST_ID], error.message)
                refused = error_response(error)
                attempts.failed(Refusal(_reason(error), _NEVER))
            except _MovedError as moved:
                attempts.failed(moved.refusal)
            except RefusedError as error:
                if error.refusal.reason != "no-adapter":  # which no client could make anything of
                    refused = error.response
                attempts.failed(error.refusal)
            except UnreachedError:
                attempts.failed(None)
        self._request[ANSWERED_BY] = self._selector.name
        if refused is not None:
            return refused
        raise Unreachable("No instance that has the adapter can be reached now.", retry_after_s=_RETRY_S)

    async def answer_here(self) -> web.StreamResponse:
        """Answers on this engine. Raises CaraServeError, _MovedError or OtherVersionError before anything is sent."""
        await self._selector.obtain(self._adapter)
        predicted_ms = self._count_sent(self._selector.name)
        generation = Generation(self._request, self._api_request, self._forwarded_digest or "")
        with self._router.rebalancer.track(generation, self.arrival) as queued:
            try:
                result = await generation.run()
            except Draining:
                if queued.moved:
                    raise _MovedError from None
                raise
        if not self._api_request.requests[0].embeds:  # the lengths of answers predict those of later ones
            async for finish in in_turns(result.finishes):
                self._selector.answered(self._adapter, finish.completion_tokens)
        if result.finishes:
            first = result.finishes[0]
            self._observe(self._selector.name, predicted_ms, first.phases.e2e_ms, first.completion_tokens)
        return result.response

    async def _forward(self, peer: PeerTarget, attempts: RoutingAttempts, received: ReceivedBody) -> web.StreamResponse:
        """Has another instance answer. Raises RefusedError, UnreachedError or Draining when nothing has been sent."""
        routing_metrics, adapter = self._selector.routing_metrics, self._adapter
        known = None if adapter is None else self._selector.resolve(adapter)
        digest = "" if known is None else known.digest
        settings = AdapterSettings() if adapter is None else settings_of(self._request.app[CONTEXT], adapter)
        forwarded = ForwardedRequest(
            received.raw,
            await body_digest(received.raw),
            attempts.id,
            adapter,
            digest,
            settings.request_defaults.digest,
            received.drawn_seed,
            self._api_request.stream,
            self._api_request.most_answer_bytes(len(received.raw), self._request.app[CONTEXT].engine.embedding_size),
        )
        predicted_ms, began_s = self._count_sent(peer.name), time.perf_counter()
        try:
            result = await self._router.proxy.forward(self._request, peer, forwarded)
        except UnreachedError:
            increment(routing_metrics.unreached, peer.name)
            self._selector.mark_unreachable(peer.name)
            raise
        except RefusedError:
            self._selector.mark_reached(peer.name)
            raise
        if result.end == "lost":
            increment(routing_metrics.lost, peer.name)
            self._selector.mark_unreachable(peer.name)
        elif result.end == "whole":
            self._selector.mark_reached(peer.name)
            if result.response.status < 500:
                increment(routing_metrics.forwarded, peer.name)
                self._observe(peer.name, predicted_ms, 1000 * (time.perf_counter() - began_s), result.tokens)
        return result.response

    def _count_sent(self, name: str) -> float:
        """Adds the engine requests to an instance's predicted load. Returns the predicted time per token in ms."""
        predicted_ms = self._selector.began(name, self.arrival)
        for _ in self._api_request.requests[1:]:
            self._selector.began(name, self.arrival)
        return predicted_ms

    def _observe(self, name: str, predicted_ms: float, took_ms: float, tokens: int) -> None:
        """Compares the predicted time per token with the observed one."""
        if len(self._api_request.requests) == 1 and tokens > 0 and self._forwarded_digest is None:
            self._selector.routing_metrics.observe_latency(name, predicted_ms, took_ms / tokens)


def _reason(error: CaraServeError) -> Reason:
    """The reason for which another instance may answer what this one does not."""
    if isinstance(error, Overloaded | ServerBusy):
        return "full"
    if isinstance(error, Unreachable):
        return "unreachable"
    return "failed" if isinstance(error, BackendFailed) else "draining"
