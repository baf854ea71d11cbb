"""Settings of the cluster protocol, and its outputs other than frames."""

from dataclasses import dataclass, field
from typing import TypeAlias

from caraserve.cluster.membership.messages import PROTOCOL_VERSION, Hello, PeerQuery
from caraserve.cluster.membership.swim import MAX_LIVE, DetectorTiming, MemberChanged
from caraserve.cluster.state.lww_map import Entry

CLUSTER_FULL = (
    f"the cluster has {MAX_LIVE} instances, the most that connect each to each; "
    "run more of them in Kubernetes, behind llm-d's router over a Gateway API InferencePool"
)


@dataclass(frozen=True, slots=True)
class ProtocolSettings:
    """Identity and timing of an instance. Other instances see name and address as they are written here."""

    cluster: str
    model: str  # digest of the base model
    name: str
    address: str  # where other instances reach this one
    seeds: tuple[str, ...] = ()
    base_name: str = ""  # by which clients ask for the base model: no adapter's name
    timing: DetectorTiming = field(default_factory=DetectorTiming)
    heartbeat_s: float = 0.25
    sync_s: float = 2.0
    handshake_s: float = 5.0
    greet_s: float = 0.5
    connection_silent_s: float = 10.0  # a connection without a frame, of a peer dead by then
    spare_s: float = 2.0  # for which a second connection to a peer stays open, until both ends use the first one


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to an address, unless that is under way, then call `connected`. Failures are not reported."""

    address: str


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Send what `pull` still returns for a connection, then end it and call `lost`."""

    connection_id: int
    reason: str
    dialled: str | None  # the address, if this instance opened the connection


@dataclass(frozen=True, slots=True)
class EntriesChanged:
    """New entries of the registry (owner REGISTRY), or of what an instance advertises."""

    owner: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """This instance has refused a peer; for the log."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class RefusedByPeer:
    """A peer has refused this instance. `must_exit`: the cluster is full, or this instance does not belong to it.

    On a conflict of configuration both sides refuse each other; only the later started one exits, and never one that
    has already been in session with a peer. On a conflict of protocol versions neither exits, so that a fleet can be
    upgraded instance by instance; both report `PeerRefused` only.
    """

    peer: str
    reason: str
    must_exit: bool


@dataclass(frozen=True, slots=True)
class QueryReceived:
    """A peer's query, or its answer to a query of this instance."""

    peer: str
    quote: PeerQuery


Output: TypeAlias = (
    Dial | CloseConnection | MemberChanged | EntriesChanged | PeerRefused | RefusedByPeer | QueryReceived
)


def refusal_reason(settings: ProtocolSettings, hello: Hello, known: Hello | None = None) -> str | None:
    """Returns why a peer does not belong to this cluster, for its operator, or None.

    `known`: the Hello of the peer with that name that is in session and sent a frame recently, or None.
    """
    if hello.protocol != PROTOCOL_VERSION:
        return (
            f"{settings.name} speaks version {PROTOCOL_VERSION} of the cluster's protocol, not {hello.protocol}; "
            "each serves without the other until both are of one version"
        )
    if hello.cluster != settings.cluster:
        return f"{settings.name} is of cluster {settings.cluster}, not {hello.cluster}"
    if hello.model != settings.model:
        return f"{settings.name} serves another base model ({settings.model}, not {hello.model})"
    address = settings.address if hello.name == settings.name else known.address if known is not None else hello.address
    if hello.name == settings.name or address != hello.address:
        return _shared(hello.name, address)
    return None


def name_conflict_refusal(settings: ProtocolSettings, address: str) -> PeerRefused:
    """Reports an instance with the name of this one, which other instances have met at that address."""
    return PeerRefused(f"{settings.name} at {address}", _shared(settings.name, settings.address))


def _shared(name: str, address: str) -> str:
    return f"an instance at {address} is called {name}, too; give each a --name of its own"
