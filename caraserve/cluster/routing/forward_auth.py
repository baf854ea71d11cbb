"""What a forwarded request carries besides its body, signed with the cluster's secret. No I/O, no clock.

An instance answers a forwarded request itself or refuses it, so there is one hop whatever anybody's view says: the
paths below have no way on. Only a header that verifies gets in there; on all other paths it means nothing, whoever
sends it. The signature covers the path, the receiver and the body's digest, so that a body is read only of those who
know the secret. Each hop is taken once.
"""

import hmac
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.routing.cost import CostEstimate
from caraserve.cluster.routing.router import Reason, Refusal
from caraserve.config import ADAPTER_NAME
from caraserve.errors import Forbidden, TooManyForwards

PREFIX = "/cluster"  # before the path at which the client asked
CLAIMS_HEADER = "X-CaraServe-Hop"
SIGNATURE_HEADER = "X-CaraServe-Signature"
REFUSED_HEADER = "X-CaraServe-Refused"  # with which an instance hands a request back before its first byte
INSTANCE_HEADER = "X-CaraServe-Instance"  # of the answers that a hop gets: whose they are

_WINDOW_MS = 30_000  # that clocks may differ, with the time on the way
_MOST_REMEMBERED = 100_000  # hops of the last minute, a few ten MB
_MOST_HEADER = 8192
_REASONS: tuple[Reason, ...] = ("slo", "full", "draining", "no-adapter", "stale-epoch")


@dataclass(frozen=True, slots=True)
class ForwardClaims:
    """One attempt to have a request answered by another instance."""

    id: str  # of the request, the same at every attempt
    attempt: int
    sender: str
    receiver: str
    adapter: str | None  # what the request's model means; None: the base model
    digest: str  # of that adapter
    seed: int | None  # for a client that gave none, so that every attempt draws the same tokens
    force: bool  # the receiver may refuse only what it cannot serve at all
    time_ms: int
    body_digest: str  # SHA-256 in hex
    client: str  # the name of its key, or its address, which the receiver shares its service by


def forward_headers(keys: Keyring, path: str, hop: ForwardClaims) -> dict[str, str]:
    """The headers that say it."""
    text = orjson.dumps(hop).decode()
    return {CLAIMS_HEADER: text, SIGNATURE_HEADER: _mac(keys.forward_keys()[0], path, text)}


class ForwardVerifier:
    """Lets in what other instances forward to this one, once each."""

    def __init__(self, me: Callable[[], str], keys: Callable[[], Keyring]) -> None:
        self._me, self._keys = me, keys
        self._seen: OrderedDict[tuple[str, str, int], int] = OrderedDict()  # (sender, id, attempt) → its time

    def admit(self, path: str, headers: Mapping[str, str], wall_ms: int) -> ForwardClaims:
        """The hop of a request's headers; its body has yet to be compared. Raises Forbidden with the reason, which an
        operator will want to know, and TooManyForwards when more hops came in a minute than can be remembered."""
        text, signature = headers.get(CLAIMS_HEADER, ""), headers.get(SIGNATURE_HEADER, "")
        keys = self._keys().forward_keys()
        given = signature.encode("utf-8", "surrogateescape")
        if len(text) > _MOST_HEADER or not any(
            hmac.compare_digest(given, _mac(key, path, text).encode()) for key in keys
        ):
            raise Forbidden("This address is for other instances: the request is not signed with the cluster's secret.")
        hop = _read(text)
        if hop.receiver != self._me():
            raise Forbidden(f"The request is for {hop.receiver[:100]!r}; this is {self._me()!r}.")
        if abs(wall_ms - hop.time_ms) > _WINDOW_MS:
            raise Forbidden(f"The clocks of {hop.sender[:100]!r} and {self._me()!r} differ by over 30 s.")
        self._take(hop, wall_ms)
        return hop

    def _take(self, hop: ForwardClaims, wall_ms: int) -> None:
        key = (hop.sender, hop.id, hop.attempt)
        if key in self._seen:
            raise Forbidden("This hop has been taken already.")
        while self._seen and self._seen[oldest := next(iter(self._seen))] <= wall_ms - 2 * _WINDOW_MS:
            del self._seen[oldest]
        if len(self._seen) >= _MOST_REMEMBERED:  # to forget one that is still good would let it in again
            raise TooManyForwards(f"{_MOST_REMEMBERED} requests were forwarded here within a minute", retry_after_s=1.0)
        self._seen[key] = hop.time_ms


def _read(text: str) -> ForwardClaims:
    """The hop in a header. Raises Forbidden, also for one of other types that is signed all the same."""
    try:
        hop = ForwardClaims(**orjson.loads(text))
    except (TypeError, ValueError):
        raise Forbidden(f"{CLAIMS_HEADER} has other fields than this version of the server reads.") from None
    texts = hop.id, hop.sender, hop.receiver, hop.digest, hop.body_digest, hop.client
    numbers = hop.attempt, hop.time_ms, *(() if hop.seed is None else (hop.seed,))
    typed = all(type(value) is str for value in texts) and all(type(value) is int for value in numbers)
    named = hop.adapter is None or (type(hop.adapter) is str and ADAPTER_NAME.fullmatch(hop.adapter))
    if not (typed and named and type(hop.force) is bool):
        raise Forbidden(f"{CLAIMS_HEADER} has a value of a wrong type; compare both instances' versions of the server.")
    return hop


def format_refusal(refusal: Refusal) -> str:
    """A refusal as a header's value."""
    cost, latency_ms = map(to_json_number, refusal.estimate)
    return f"{refusal.reason} {cost!r} {latency_ms!r}"


def parse_refusal(text: str) -> Refusal:
    """The refusal in a header's value. What cannot be read is a full instance."""
    try:
        reason, cost, latency_ms = text.split()
        estimate = CostEstimate(from_json_number(float(cost)), from_json_number(float(latency_ms)))
    except ValueError:
        return Refusal("full", CostEstimate(float("inf"), float("inf")))
    return Refusal(next((known for known in _REASONS if known == reason), "full"), estimate)


def to_json_number(value: float) -> float:
    """A cost or a latency as one that JSON has, too: -1 is without end."""
    return -1.0 if value == float("inf") else value


def from_json_number(value: float) -> float:
    """The other way round. Whatever is no amount is without end."""
    return value if 0.0 <= value < float("inf") else float("inf")


def _mac(key: bytes, path: str, text: str) -> str:
    message = b"\n".join((path.encode(), text.encode("utf-8", "surrogateescape")))
    return hmac.digest(key, message, "sha256").hex()
