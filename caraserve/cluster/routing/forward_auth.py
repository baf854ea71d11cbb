"""Signs and verifies the headers of forwarded requests, with the cluster's secret. No I/O, no clock.

An instance answers a forwarded request itself or refuses it. So a request is forwarded at most once, even if the
instances' views differ. Forwarded requests have paths of their own (`PREFIX`), which require a valid signature; on all
other paths these headers are ignored. The signature covers the path, the receiver and the body's digest, and is
verified before the body is read. Each signed attempt is accepted once.
"""

import hmac
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

import orjson

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.routing.cost import CostEstimate
from caraserve.cluster.routing.router import Reason, Refusal
from caraserve.core.combined_names import members_of
from caraserve.errors import Forbidden, TooManyForwards

PREFIX = "/cluster"  # before the path of the client's request
CLAIMS_HEADER = "X-CaraServe-Hop"
SIGNATURE_HEADER = "X-CaraServe-Signature"
REFUSED_HEADER = "X-CaraServe-Refused"  # on the response with which an instance refuses a forwarded request
INSTANCE_HEADER = "X-CaraServe-Instance"  # on answers: the name of the instance that computed it

_WINDOW_MS = 30_000  # by which clocks may differ, network time included
_MOST_REMEMBERED = 100_000  # attempts of the last minute: some tens of MB
_MOST_HEADER = 8192
_REASONS: tuple[Reason, ...] = ("slo", "full", "draining", "no-adapter", "stale-epoch")


@dataclass(frozen=True, slots=True)
class ForwardClaims:
    """The signed facts about one attempt to have a request answered by another instance."""

    id: str  # of the request, the same at every attempt
    attempt: int
    sender: str
    receiver: str
    adapter: str | None  # that the request's `model` names; None: the base model
    digest: str  # of that adapter
    seed: int | None  # where the client gave none, so that every attempt samples the same tokens
    force: bool  # the receiver may refuse only what it cannot serve at all
    time_ms: int
    body_digest: str  # SHA-256 in hex
    defaults_digest: str  # of what the adapter's requests take where they leave a field out; empty for nothing
    client: str  # the name of its API key, or its address: the tenant, for fairness at the receiver
    weight: float  # of that tenant
    owns_cache: bool  # whether that tenant shares no cached prompts with others


def forward_headers(keys: Keyring, path: str, claims: ForwardClaims) -> dict[str, str]:
    """Returns the headers with the claims and their signature, made with the first key."""
    text = orjson.dumps(claims).decode()
    return {CLAIMS_HEADER: text, SIGNATURE_HEADER: _mac(keys.forward_keys()[0], path, text)}


class ForwardVerifier:
    """Verifies requests that other instances forward to this one, and accepts each attempt once."""

    def __init__(self, me: Callable[[], str], keys: Callable[[], Keyring]) -> None:
        self._me, self._keys = me, keys
        self._seen: OrderedDict[tuple[str, str, int], int] = OrderedDict()  # (sender, id, attempt) → its time

    def admit(self, path: str, headers: Mapping[str, str], wall_ms: int) -> ForwardClaims:
        """Returns the verified claims in a request's headers; the caller compares the body with `body_digest`.

        Raises Forbidden with the reason, which helps operators, and TooManyForwards when more than 100,000 attempts
        arrived within a minute."""
        text, signature = headers.get(CLAIMS_HEADER, ""), headers.get(SIGNATURE_HEADER, "")
        keys = self._keys().forward_keys()
        given = signature.encode("utf-8", "surrogateescape")
        if len(text) > _MOST_HEADER or not any(
            hmac.compare_digest(given, _mac(key, path, text).encode()) for key in keys
        ):
            raise Forbidden("This address is for other instances: the request is not signed with the cluster's secret.")
        claims = _read(text)
        if claims.receiver != self._me():
            raise Forbidden(f"The request is for {claims.receiver[:100]!r}; this is {self._me()!r}.")
        if abs(wall_ms - claims.time_ms) > _WINDOW_MS:
            raise Forbidden(f"The clocks of {claims.sender[:100]!r} and {self._me()!r} differ by over 30 s.")
        self._take(claims, wall_ms)
        return claims

    def _take(self, claims: ForwardClaims, wall_ms: int) -> None:
        key = (claims.sender, claims.id, claims.attempt)
        if key in self._seen:
            raise Forbidden("These claims have been taken already.")
        while self._seen and self._seen[oldest := next(iter(self._seen))] <= wall_ms - 2 * _WINDOW_MS:
            del self._seen[oldest]
        if len(self._seen) >= _MOST_REMEMBERED:  # forgetting one that is still valid would admit it twice
            raise TooManyForwards(f"{_MOST_REMEMBERED} requests were forwarded here within a minute", retry_after_s=1.0)
        self._seen[key] = claims.time_ms


def _read(text: str) -> ForwardClaims:
    """Parses the claims in a header. Raises Forbidden, also for signed ones whose fields have wrong types."""
    try:
        claims = ForwardClaims(**orjson.loads(text))
    except (TypeError, ValueError):
        raise Forbidden(f"{CLAIMS_HEADER} has other fields than this version of the server reads.") from None
    texts = claims.id, claims.sender, claims.receiver, claims.client
    digests = claims.digest, claims.defaults_digest, claims.body_digest
    numbers = claims.attempt, claims.time_ms, *(() if claims.seed is None else (claims.seed,))
    typed = all(type(value) is str for value in texts + digests) and all(type(value) is int for value in numbers)
    named = claims.adapter is None or (type(claims.adapter) is str and members_of(claims.adapter))
    weighted = type(claims.weight) in (int, float) and 0 < claims.weight < inf
    switched = all(type(value) is bool for value in (claims.force, claims.owns_cache))
    if not (typed and named and weighted and switched):
        raise Forbidden(f"{CLAIMS_HEADER} has a value of a wrong type; compare both instances' versions of the server.")
    return claims


def format_refusal(refusal: Refusal) -> str:
    """Returns a refusal as a header's value: reason, cost and time per token."""
    cost, latency_ms = map(to_json_number, refusal.estimate)
    return f"{refusal.reason} {cost!r} {latency_ms!r}"


def parse_refusal(text: str) -> Refusal:
    """Parses the refusal in a header's value. A value that cannot be parsed counts as a full instance."""
    try:
        reason, cost, latency_ms = text.split()
        estimate = CostEstimate(from_json_number(float(cost)), from_json_number(float(latency_ms)))
    except ValueError:
        return Refusal("full", CostEstimate(float("inf"), float("inf")))
    return Refusal(next((known for known in _REASONS if known == reason), "full"), estimate)


def to_json_number(value: float) -> float:
    """Returns a cost or a latency, or -1 for infinity, which JSON does not have."""
    return -1.0 if value == float("inf") else value


def from_json_number(value: float) -> float:
    """Returns a cost or a latency of `to_json_number`. Negative numbers and NaN become infinity."""
    return value if 0.0 <= value < float("inf") else float("inf")


def _mac(key: bytes, path: str, text: str) -> str:
    message = b"\n".join((path.encode(), text.encode("utf-8", "surrogateescape")))
    return hmac.digest(key, message, "sha256").hex()
