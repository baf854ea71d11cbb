"""What goes into the core at its start, and what comes out of it besides bytes. Level 4."""

from dataclasses import dataclass, field
from typing import TypeAlias

from caraserve.cluster.facts import Fact
from caraserve.cluster.members import MemberChanged, Timing
from caraserve.cluster.wire import Quote


@dataclass(frozen=True, slots=True)
class Settings:
    """Who we are and how fast. Names and addresses go to others as they stand here."""

    cluster: str
    model: str  # digest of the base model
    name: str
    address: str  # where others reach us
    seeds: tuple[str, ...] = ()
    timing: Timing = field(default_factory=Timing)
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
class Close:
    """Send what `pull` still gives for that link, then end it and call `lost`."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class FactsChanged:
    """News of adapter names (owner SHARED), or of what an instance holds."""

    owner: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """We turned somebody away, for the log."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class RefusedUs:
    """Somebody turned us away: in a cluster that is full, or not ours, there is no place to serve from."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Quoted:
    """A question about a request, or an answer to one of ours."""

    peer: str
    quote: Quote


Output: TypeAlias = Dial | Close | MemberChanged | FactsChanged | PeerRefused | RefusedUs | Quoted
