"""One connection to one peer: handshake, signing and verification of frames, and the send queue. No I/O, no clock.

    dialling: Hello(nonce) ─► dialled: Hello(nonce, repeats) ─► dialling: up, Hello(nonce, repeats) ─► dialled: up

The dialled side sends nothing before it has received a Hello signed with one of its secrets, so an unauthenticated
connection reveals no name, address or model. (A recorded Hello is answered too; it contains the same information.) Each
side is in session once its own nonce is repeated to it, and resends Hello until the other is, too. So the handshake
survives lost and reordered frames, and no recording passes it, because none repeats a fresh nonce.
"""

from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from caraserve.cluster.membership.auth import (
    HELLO_FRAME,
    SESSION_FRAME,
    Keyring,
    ReplayWindow,
    sign_frame,
    verify_frame,
)
from caraserve.cluster.membership.events import ProtocolSettings
from caraserve.cluster.membership.messages import Heartbeat, Hello, Malformed, Message, Refuse, decode, encode
from caraserve.cluster.membership.swim import MAX_LIVE, MAX_UPDATES

UNKNOWN_SECRET = "it knows no secret of ours; is its --cluster-secret-file another one?"
NO_ANSWER = "it does not answer our greeting; is its --cluster-secret-file another one?"
MAX_WAITING = 256  # control frames for a peer that does not read; after that its connection is dropped
_FIRST = 0.8  # of `handshake_s`: the dialling side gives up first, so that both sides log the reason
_MAX_BAD = 16  # frames that do not verify or decode; after that the connection is dropped too
_MAX_STRANGERS = 2 * MAX_LIVE  # accepted connections that are not in session yet
_MAX_ACCEPTED = 4 * MAX_LIVE  # accepted connections


class Connection:
    """A connection. `peer` is the other side's Hello, once its signature has verified; `up` is true once that side has
    repeated this side's nonce."""

    def __init__(self, number: int, dialled: str | None, nonce: str, keys: Keyring, now: float) -> None:
        self.number = number
        self.dialled = dialled  # the address, if this instance opened the connection
        self.nonce = nonce
        self.opened_s = self.heard_s = self.greeted_s = now
        self.peer: Hello | None = None
        self.up = False
        self.barred = False  # this instance has refused the peer
        self.closing: str | None = None  # the reason, once the connection is to be closed
        self.is_close_sent = False  # whether a CloseConnection was put out
        self._keys = keys
        self._verify_key: bytes | None = None  # the one that the last frame was signed with
        self._greet = dialled is not None
        self._named = False  # the peer has been sent a Hello
        self._refusal: Refuse | None = None
        self._window = ReplayWindow()
        self._sent = 0
        self._bad = 0
        self._heartbeat: Heartbeat | None = None
        self._control: deque[Message] = deque()
        self.rekey(keys)

    def rekey(self, keys: Keyring) -> None:
        """Derives the session keys from other secrets and both nonces."""
        self._keys = keys
        peer = self.peer.nonce if self.peer else ""
        self._sign_key = keys.session_keys(self.nonce, peer)[0]
        self._verify_keys = keys.session_keys(peer, self.nonce)

    # ---- receiving

    def open(self, frame: bytes, now: float) -> Message | Malformed | None:
        """Verifies and decodes a frame. Returns its message, or why it has none; None for a frame that does not count:
        a repetition, one that came before the session, or one of a barred peer."""
        message: Message | Malformed | None
        if frame[:1] == HELLO_FRAME:
            message = self._open_hello(frame)
        elif frame[:1] == SESSION_FRAME and not self.up:
            return None  # its Hello was lost or comes later; both will be sent again
        else:
            message = self._open_session(frame)
        if isinstance(message, Malformed):
            self._bad += 1
            if self._bad > _MAX_BAD:
                self.close("its frames do not verify" if self.peer else UNKNOWN_SECRET)
        elif self.barred and not isinstance(message, Refuse):
            return None
        elif message is not None:
            self.heard_s = now
        return message

    def greeted(self, hello: Hello, now: float) -> bool:
        """Accepts a Hello that passed all checks. Returns whether the session begins with it."""
        if self.up and self.peer is not None and hello.nonce != self.peer.nonce:
            return False  # a recording: a connection has one nonce
        self.peer = hello
        self._greet |= not hello.ready
        if self.up or hello.echo != self.nonce:
            self.rekey(self._keys)
            return False
        self.rekey(self._keys)
        self.up = True
        self.heard_s = now
        return True

    def _open_hello(self, frame: bytes) -> Message | Malformed:
        opened = verify_frame(HELLO_FRAME, self._keys.hello_keys(), frame)
        if opened is None:
            return Malformed("a greeting that is not signed with a secret of ours")
        message = decode(opened[1])
        if isinstance(message, Hello | Refuse | Malformed):
            return message
        return Malformed("a message that belongs into a session")

    def _open_session(self, frame: bytes) -> Message | Malformed | None:
        # The key that verified last is tried first: otherwise, with two secrets, a frame may cost two hashes.
        opened = verify_frame(SESSION_FRAME, (self._verify_key,), frame) if self._verify_key else None
        for key in () if opened else self._verify_keys:
            opened = opened or verify_frame(SESSION_FRAME, (key,), frame)
            self._verify_key = key if opened else None
            if opened:
                break
        if opened is None:
            return Malformed("a frame that is not signed for this connection")
        if not self._window.is_new(opened[0]):
            return None
        message = decode(opened[1])
        return Malformed("a greeting inside a session") if isinstance(message, Hello | Refuse) else message

    # ---- sending

    def send(self, message: Message) -> None:
        """Queues a message. A heartbeat replaces an older one in the queue: only the newest matters."""
        if self.closing is not None or self.barred:
            return
        if isinstance(message, Heartbeat):
            if self._heartbeat is not None:
                updates = dict.fromkeys((*self._heartbeat.updates, *message.updates))  # these were counted as sent
                message = replace(message, updates=tuple(updates)[:MAX_UPDATES])
            self._heartbeat = message
        elif len(self._control) < MAX_WAITING:
            self._control.append(message)
        else:
            self.close("it does not read what it is sent")

    def watch(self, settings: ProtocolSettings, now: float) -> None:
        """Resends Hello when it is due, and closes a silent connection."""
        if self.up:
            if now - self.heard_s > settings.connection_silent_s:
                self.close("nothing comes from it")
        elif now - self.opened_s > settings.handshake_s * (1.0 if self.dialled is None else _FIRST):
            self._give_up()
        elif now - self.greeted_s > settings.greet_s:
            self._greet = not self.barred and (self.dialled is not None or self.peer is not None)

    def _give_up(self) -> None:
        if self.peer is None and self._bad:
            self.close(UNKNOWN_SECRET)
        else:
            self.close(NO_ANSWER if self.peer is None and self.dialled is not None else "it did not greet in time")

    def refuse(self, reason: str, now: float) -> None:
        """Sends the peer the reason and ignores its further frames; the peer, or the handshake's timeout, ends the
        connection.

        Closing here would lose one refusal when both sides refuse and the two cross. A Hello is sent first if none
        was, so that a peer that refuses as well can tell which of the two instances has to exit.
        """
        if self.peer is not None and not self.barred:
            self._refusal = Refuse(self.peer.nonce, reason)
        self.barred, self.up, self.opened_s = True, False, now
        self._heartbeat, self._greet = None, not self._named
        self._control.clear()

    def close(self, reason: str) -> None:
        """Marks the connection to be closed and empties its queue."""
        if self.closing is None:
            self.closing = reason
            self._heartbeat, self._greet = None, False
            self._control.clear()

    @property
    def waiting(self) -> int:
        """The number of frames that wait to be sent."""
        return len(self._control) + (self._heartbeat is not None) + self._greet + (self._refusal is not None)

    def pull(self, hello: Hello, now: float) -> bytes | None:
        """Returns the next frame to send, or None. Frames are signed here, so that sequence numbers ascend. `hello`:
        the Hello to send if one is due."""
        if self._greet:
            self._greet, self._named, self.greeted_s = False, True, now
            return sign_frame(HELLO_FRAME, self._keys.hello_keys()[0], 0, encode(hello))
        if self._refusal is not None:
            body, self._refusal = encode(self._refusal), None
            return sign_frame(HELLO_FRAME, self._keys.hello_keys()[0], 0, body)
        if not self.up:
            return None
        message: Message | None = self._control.popleft() if self._control else self._heartbeat
        if message is None:
            return None
        if message is self._heartbeat:
            self._heartbeat = None
        self._sent += 1
        return sign_frame(SESSION_FRAME, self._sign_key, self._sent, encode(message))


def should_replace(new: Connection, old: Connection, hello: Hello, me: str) -> bool:
    """Returns whether the new one of two connections with the peer that sent `hello` is to be used.

    There are two when both sides dialled, or when one broke and only one side has noticed. Both sides must choose
    alike: of two connections dialled by one side the newer, else the one that the instance with the lesser name
    dialled.
    """
    same_side = (old.dialled is None) == (new.dialled is None)
    lesser_dialled = (new.dialled is not None) == (me < hello.name)
    return same_side or lesser_dialled or (old.peer is not None and hello.epoch > old.peer.epoch)


def limit_accepted(connections: Iterable[Connection]) -> None:
    """Closes an accepted connection when there are too many, so that connections without a session exclude no instance.

    Of those without a session it closes the oldest, and first those whose key has not been verified. Dialled
    connections do not count.
    """
    accepted = [connection for connection in connections if connection.dialled is None and connection.closing is None]
    strangers = [connection for connection in accepted if not connection.up]
    if len(strangers) > _MAX_STRANGERS:
        min(strangers, key=lambda connection: (connection.peer is not None, connection.opened_s)).close(
            "others wait for its place"
        )
    elif len(accepted) > _MAX_ACCEPTED:
        accepted[-1].close("no room for another connection")
