"""Authentication of instances by shared secrets: session frames, HTTP requests, and the file of secrets.

A frame is a kind byte (H while shaking hands, S in a session), 16 bytes of HMAC-SHA256, an 8-byte sequence number, and
the message. Each side of a connection draws a nonce, and each direction's key is derived from a secret and both nonces.
So a frame of another connection, direction or cluster does not verify, and within a connection each sequence number is
accepted once.

A request signature covers the method, the path with its query, and the time, and is valid for 30 s. Repeating such a
request does no harm: adapters' bytes and plans are only read, and checked against a digest.

Of several secrets the first signs and all verify. To rotate secrets without a pause: add the new one everywhere, put it
first everywhere, then remove the old one.
"""

import hmac
from pathlib import Path

from caraserve.cluster.membership.messages import MAX_FRAME
from caraserve.errors import ConfigError

WINDOW = 1024  # sequence numbers within which frames may arrive out of order
HELLO_FRAME, SESSION_FRAME = b"H", b"S"
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
        """Returns the keys for frames before there is a session, the signing one first."""
        return self._derive(b"hello")

    def session_keys(self, sender: str, receiver: str) -> tuple[bytes, ...]:
        """Returns the keys for frames in one direction of one connection, given both sides' nonces."""
        return self._derive(f"session {sender} {receiver}".encode())

    def request_keys(self) -> tuple[bytes, ...]:
        """Returns the keys for HTTP requests between instances."""
        return self._derive(b"request")

    def forward_keys(self) -> tuple[bytes, ...]:
        """Returns the keys for requests of clients that one instance forwards to another."""
        return self._derive(b"forward")

    def _derive(self, use: bytes) -> tuple[bytes, ...]:
        return tuple(hmac.digest(secret, b"caraserve " + use, "sha256") for secret in self._secrets)


def sign_frame(kind: bytes, key: bytes, sequence: int, body: bytes) -> bytes:
    """Returns a signed frame."""
    number = sequence.to_bytes(_SEQUENCE)
    return kind + hmac.digest(key, kind + number + body, "sha256")[:_MAC] + number + body


def verify_frame(kind: bytes, keys: tuple[bytes, ...], frame: bytes) -> tuple[int, bytes] | None:
    """Returns (sequence number, body) of a frame of that kind signed with any of the keys, or None."""
    if not _HEAD <= len(frame) <= MAX_FRAME or frame[:1] != kind:
        return None
    mac, rest = frame[1 : 1 + _MAC], frame[1 + _MAC :]
    for key in keys:
        if hmac.compare_digest(mac, hmac.digest(key, kind + rest, "sha256")[:_MAC]):
            return int.from_bytes(rest[:_SEQUENCE]), rest[_SEQUENCE:]
    return None


class ReplayWindow:
    """The sequence numbers received, of the last 1,024; older ones count as received."""

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit i: the number `highest - i` was received

    def is_new(self, sequence: int) -> bool:
        """Returns whether a number is received for the first time. Only for verified frames: a forged number would
        move the window."""
        ahead = sequence - self._highest
        if ahead > 0:
            self._seen = (self._seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self._highest = sequence
            return True
        if -ahead >= WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


# --- HTTP requests ---

SIGNATURE_HEADER = "X-Cara-Signature"
_SIGNATURE_S = 30.0


def sign_request(keys: Keyring, method: str, path: str, wall_s: float) -> str:
    """Returns the header's value for a request. `path`: as it is sent, the query included."""
    when = str(int(wall_s * 1000))
    return f"{when} {_request_mac(keys.request_keys()[0], method, path, when)}"


def is_signed_request(keys: Keyring, value: str, method: str, path: str, wall_s: float) -> bool:
    """Returns whether a request is signed with one of the secrets, less than 30 s ago."""
    when, _, mac = value.partition(" ")
    if not (when.isascii() and when.isdigit() and len(when) < 20 and mac.isascii()):
        return False
    if abs(int(when) / 1000 - wall_s) > _SIGNATURE_S:
        return False
    return any(hmac.compare_digest(mac, _request_mac(key, method, path, when)) for key in keys.request_keys())


def _request_mac(key: bytes, method: str, path: str, when: str) -> str:
    return hmac.digest(key, f"{when}\n{method}\n{path}".encode("utf-8", "surrogateescape"), "sha256").hex()


# --- the file of secrets ---

# On a loopback interface all processes of the machine are trusted, as with client requests that need no key.
LOOPBACK_SECRET = b"caraserve: every process of this machine may join"


class SecretFile:
    """The file of shared secrets, one to a line. It is read again when it changes, as when Kubernetes renews a
    mounted secret."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when it cannot be read or has no usable secret."""
        self._path = path
        self._lines = self._read()
        self.keys = Keyring(self._lines)

    def reread(self) -> bool:
        """Reads the file again. Returns whether `keys` changed. Raises ConfigError, and keeps the old keys, if the
        file is invalid."""
        lines = self._read()
        if lines == self._lines:
            return False
        self.keys, self._lines = Keyring(lines), lines
        return True

    def _read(self) -> tuple[bytes, ...]:
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"--cluster-secret-file {str(self._path)!r}: {error.strerror}") from None
        return tuple(line.strip() for line in lines if line.strip())
