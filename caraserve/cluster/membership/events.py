"""What goes into the core at its start, and what comes out of it besides bytes."""

from dataclasses import dataclass, field
from typing import TypeAlias

from caraserve.cluster.membership.messages import PROTOCOL_VERSION, Hello, PeerQuery
from caraserve.cluster.membership.swim import MAX_LIVE, DetectorTiming, MemberChanged
from caraserve.cluster.state.replicated_map import Entry

CLUSTER_FULL = (
    f"the cluster has {MAX_LIVE} instances, the most that connect each to each; "
    "run more of them in Kubernetes, behind llm-d's router over a Gateway API InferencePool"
)


@dataclass(frozen=True, slots=True)
class ProtocolSettings:
    """Who we are and how fast. Names and addresses go to others as they stand here."""

    cluster: str
    model: str  # digest of the base model
    name: str
    address: str  # where others reach us
    seeds: tuple[str, ...] = ()
    base_name: str = ""  # by which clients ask for the base model: no adapter's name
    timing: DetectorTiming = field(default_factory=DetectorTiming)
    beat_s: float = 0.25
    sync_s: float = 2.0
    handshake_s: float = 5.0
    greet_s: float = 0.5
    link_silent_s: float = 10.0  # a connection without a frame, of a peer dead by then
    spare_s: float = 2.0  # the second connection of a pair lives on, so that both ends see the first one in use


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to that address, if it is not being tried already; then `connected`. A failure needs no word."""

    address: str


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Send what `pull` still gives for that link, then end it and call `lost`."""

    link: int
    reason: str
    dialled: str | None  # the address, if it was we who asked for the connection


@dataclass(frozen=True, slots=True)
class EntriesChanged:
    """News of adapter names (owner SHARED), or of what an instance holds."""

    owner: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """We turned somebody away, for the log."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class RefusedByPeer:
    """Somebody turned us away. `ours_to_go`: in a cluster that was full when we came, or that is not ours, there is no
    place to serve from.

    Who has served for hours does not stop for another's mistake: of two that do not belong together, and turn each
    other away, only the later started goes, and nobody who has been in session with anyone. Of two versions of the
    protocol neither goes, so that a fleet gets from one to the next, and only `PeerRefused` tells of them.
    """

    peer: str
    reason: str
    ours_to_go: bool


@dataclass(frozen=True, slots=True)
class QueryReceived:
    """A question about a request, or an answer to one of ours."""

    peer: str
    quote: PeerQuery


Output: TypeAlias = (
    Dial | CloseConnection | MemberChanged | EntriesChanged | PeerRefused | RefusedByPeer | QueryReceived
)


def refusal_reason(settings: ProtocolSettings, hello: Hello, known: Hello | None = None) -> str | None:
    """Why who greets us so does not belong here, in words for the person who started it. `known`: who is in session
    with us under that name and heard just now; a restarted instance is not."""
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
    """An instance of our own name there, of which others have told us, is not taken for us."""
    return PeerRefused(f"{settings.name} at {address}", _shared(settings.name, settings.address))


def _shared(name: str, address: str) -> str:
    return f"an instance at {address} is called {name}, too; give each a --name of its own"
