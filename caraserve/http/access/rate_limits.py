"""Limits of clients by key: requests and tokens per minute, and requests under way. They hold for this instance alone.

A rate is a bucket that holds a minute's worth and is refilled continuously. A request takes itself and its prompt's
tokens when it is admitted, and the tokens of its answer when it has ended; these may leave a debt, which the next
request waits for.
"""

import functools
import math
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from caraserve.errors import CaraServeError, RateLimited
from caraserve.http.api_request import ApiRequest
from caraserve.http.client import CLIENT, RateLimits
from caraserve.http.context import RATE_HEADERS
from caraserve.http.request_log import SUMMARY

_NO_LIMITS = RateLimits()


class _Bucket:
    """What a client may still use of a rate."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.per_minute = self._level = per_minute
        self._at_s = now_s

    def refill(self, per_minute: float, now_s: float) -> None:
        """Adds what has come since the last call. The rate may have changed."""
        self.per_minute = per_minute
        self._level = min(per_minute, self._level + (now_s - self._at_s) * per_minute / 60)
        self._at_s = now_s

    def wait_s(self, amount: float) -> float:
        """The time until `amount`, or a minute's worth if that is less, is there."""
        return max(0.0, (min(amount, self.per_minute) - self._level) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        self._level = min(self.per_minute, self._level - amount)

    def headers(self, unit: str) -> dict[str, str]:
        """OpenAI's headers: the rate, what is left of it, and when all of it will be there."""
        return {
            f"x-ratelimit-limit-{unit}": f"{self.per_minute:.0f}",
            f"x-ratelimit-remaining-{unit}": f"{max(0.0, self._level):.0f}",
            f"x-ratelimit-reset-{unit}": _duration(self.wait_s(self.per_minute)),
        }


class _ClientState:
    """The buckets of one client, and its requests under way."""

    def __init__(self) -> None:
        self.under_way = 0
        self._buckets: dict[str, _Bucket] = {}

    def refill(self, limits: RateLimits, now_s: float) -> dict[str, _Bucket]:
        """The buckets of the limits that a client has now, by unit."""
        rates = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        limited = {unit: rate for unit, rate in rates.items() if rate is not None}
        self._buckets = {
            unit: self._buckets.get(unit) or _Bucket(per_minute, now_s) for unit, per_minute in limited.items()
        }
        for unit, per_minute in limited.items():
            self._buckets[unit].refill(per_minute, now_s)
        return self._buckets


class RateLimiter:
    """Admits requests within their clients' limits; not forwarded ones, which another instance has admitted."""

    def __init__(self, answer_s: Callable[[], float], now: Callable[[], float] = time.monotonic) -> None:
        """`answer_s`: predicts how long an answer takes now."""
        self._answer_s, self._now = answer_s, now
        self._clients: dict[str, _ClientState] = {}  # of those with limits

    async def answered(
        self, request: web.Request, api_request: ApiRequest, answer: Callable[[], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Admits an API request, then has `answer` make its response. Raises RateLimited, and what `answer` raises."""
        client = request[CLIENT]
        if client.limits == _NO_LIMITS:
            return await answer()
        state = self._clients.setdefault(client.name, _ClientState())
        prompt_tokens = sum(len(one.prompt_ids) for one in api_request.requests[:: api_request.n])
        self._admit(request, state, {"requests": 1, "tokens": prompt_tokens})
        state.under_way += 1
        unused = 0
        try:
            response = await answer()
            unused = prompt_tokens if response.status >= 400 else 0
            return response
        except CaraServeError:
            unused = prompt_tokens
            raise
        finally:
            state.under_way -= 1
            if (tokens := state.refill(client.limits, self._now()).get("tokens")) is not None:
                tokens.take((request[SUMMARY].completion_tokens or 0) - unused)

    def admit_without_engine(self, request: web.Request) -> None:
        """Counts a request for which no engine computes anything among its client's per minute. Raises RateLimited."""
        limits = request[CLIENT].limits
        if limits.requests_per_minute is not None:
            state = self._clients.setdefault(request[CLIENT].name, _ClientState())
            self._admit(request, state, {"requests": 1}, by_concurrency=False)

    def _admit(
        self, request: web.Request, state: _ClientState, amounts: Mapping[str, int], *, by_concurrency: bool = True
    ) -> None:
        """Takes `amounts`, by unit, from the client's buckets, or raises RateLimited and takes nothing."""
        limits = request[CLIENT].limits
        buckets = state.refill(limits, self._now())
        request[RATE_HEADERS] = {}
        try:
            if by_concurrency and limits.concurrency is not None and state.under_way >= limits.concurrency:
                # With that many requests under way, one ends in each such part of the time that an answer takes.
                retry_after_s = self._answer_s() / limits.concurrency
                raise RateLimited(f"{limits.concurrency} requests under way", "concurrency", retry_after_s)
            taken = {unit: amount for unit, amount in amounts.items() if unit in buckets}
            waits_s = {unit: buckets[unit].wait_s(amount) for unit, amount in taken.items()}
            longest = max(waits_s, key=waits_s.__getitem__, default="")
            if longest and waits_s[longest] > 0:
                raise RateLimited(f"{buckets[longest].per_minute:.15g} {longest} per minute", longest, waits_s[longest])
            for unit, amount in taken.items():
                buckets[unit].take(amount)
        finally:
            for unit, bucket in buckets.items():
                request[RATE_HEADERS].update(bucket.headers(unit))


RATE_LIMITER = web.AppKey("RATE_LIMITER", RateLimiter)

_Handler = Callable[[web.Request], Awaitable[web.Response]]


def rate_limited(handler: _Handler) -> _Handler:
    """The handler of requests that no engine computes anything for, within the rates of their clients."""

    @functools.wraps(handler)
    async def handle(request: web.Request) -> web.Response:
        request.app[RATE_LIMITER].admit_without_engine(request)
        return await handler(request)

    return handle


def _duration(seconds: float) -> str:
    """A time as OpenAI's headers have it: 20ms, 1.5s, 6m0s."""
    ms = math.ceil(1000 * seconds)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    return f"{minutes}m{rest_ms / 1000:.15g}s" if minutes else f"{rest_ms / 1000:.15g}s"
