"""Frames: messages signed with a shared secret and good for one connection only. No I/O, no clock.

A frame is a kind byte (H while shaking hands, S in a session), 16 bytes of HMAC-SHA256, an 8-byte sequence number, and
the message. Each side of a connection draws a nonce, and the key of each direction is made of a secret and both nonces.
So a frame of another connection, direction or cluster does not verify, and within the connection a sequence number is
taken once. Of several secrets the first signs and all verify: a new one is added everywhere, then put first, then the
old one is taken away.
"""

import hmac

from caraserve.cluster.membership.messages import MAX_FRAME
from caraserve.errors import ConfigError

WINDOW = 1024  # sequence numbers that may overtake one another
HELLO, SESSION = b"H", b"S"
_MAC, _SEQUENCE = 16, 8
_HEAD = 1 + _MAC + _SEQUENCE
_MIN_SECRET = 16


class Keyring:
    """The shared secrets; the first signs, all verify."""

    def __init__(self, secrets: tuple[bytes, ...]) -> None:
        """Raises ConfigError when there is none, or one too short to resist guessing."""
        if not secrets or min(map(len, secrets)) < _MIN_SECRET:
            raise ConfigError(f"--cluster-secret-file: give one or more secrets of at least {_MIN_SECRET} bytes each")
        self._secrets = secrets

    def hello_keys(self) -> tuple[bytes, ...]:
        """For frames before there is a session."""
        return self._derive(b"hello")

    def session_keys(self, sender: str, receiver: str) -> tuple[bytes, ...]:
        """For frames in one direction of one connection, by the nonces of both ends."""
        return self._derive(f"session {sender} {receiver}".encode())

    def request_keys(self) -> tuple[bytes, ...]:
        """For HTTP requests."""
        return self._derive(b"request")

    def forward_keys(self) -> tuple[bytes, ...]:
        """For requests that one instance forwards to another."""
        return self._derive(b"forward")

    def _derive(self, use: bytes) -> tuple[bytes, ...]:
        return tuple(hmac.digest(secret, b"caraserve " + use, "sha256") for secret in self._secrets)


def seal(kind: bytes, key: bytes, sequence: int, body: bytes) -> bytes:
    """A frame."""
    number = sequence.to_bytes(_SEQUENCE)
    return kind + hmac.digest(key, kind + number + body, "sha256")[:_MAC] + number + body


def unseal(kind: bytes, keys: tuple[bytes, ...], frame: bytes) -> tuple[int, bytes] | None:
    """(sequence number, body) of a frame of that kind signed with any of the keys; None otherwise."""
    if not _HEAD <= len(frame) <= MAX_FRAME or frame[:1] != kind:
        return None
    mac, rest = frame[1 : 1 + _MAC], frame[1 + _MAC :]
    for key in keys:
        if hmac.compare_digest(mac, hmac.digest(key, kind + rest, "sha256")[:_MAC]):
            return int.from_bytes(rest[:_SEQUENCE]), rest[_SEQUENCE:]
    return None


class ReplayWindow:
    """Which sequence numbers came already, of the last 1,024; older ones count as come."""

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit i: `highest - i` came

    def is_new(self, sequence: int) -> bool:
        """Whether it comes for the first time. Asked of signed frames only: a forged number would move the window."""
        ahead = sequence - self._highest
        if ahead > 0:
            self._seen = (self._seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self._highest = sequence
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True
