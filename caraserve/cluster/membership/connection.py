"""One connection to one peer: the handshake, what is signed and verified, and what waits to be sent. Pure.

    dialling: Hello(nonce) ─► dialled: Hello(nonce, repeats) ─► dialling: up, Hello(nonce, repeats) ─► dialled: up

Whoever is dialled says nothing until a Hello came that a secret of ours signed: a stranger who connects learns nobody's
name, address or model. (A recorded one is answered, too; who could record it has heard all of that.) Each is in session
once it sees its own nonce repeated, and says Hello again until the other is, too. So the handshake survives a network
that loses and reorders frames, and no recording gets past it, because none repeats a nonce drawn now.
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum

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
_FIRST = 0.8  # of the time to greet: who dialled gives up first, so that both sides say why
_MAX_BAD = 16  # frames that do not verify or decode; after that, too
_MAX_STRANGERS = 2 * MAX_LIVE  # connections that others began and that are not in session yet
_MAX_ACCEPTED = 4 * MAX_LIVE  # that others began


class Ignored(Enum):
    """What a frame may bring when it brings no message."""

    STALE = "a repetition, or it came before the session"


class Connection:
    """A connection. `peer` is the other's Hello once its key has proved right; `up` once it has proved to be fresh."""

    def __init__(self, number: int, dialled: str | None, nonce: str, keys: Keyring, now: float) -> None:
        self.number = number
        self.dialled = dialled  # the address, when it was us
        self.nonce = nonce
        self.opened_s = self.heard_s = self.greeted_s = now
        self.peer: Hello | None = None
        self.up = False
        self.barred = False  # we refused it
        self.closing: str | None = None  # why, once it is to be closed
        self.told = False  # and whether that was said
        self._keys = keys
        self._verify_key: bytes | None = None  # the one that the last frame was signed with
        self._greet = dialled is not None
        self._named = False  # it has been told who we are
        self._refusal: Refuse | None = None
        self._window = ReplayWindow()
        self._sent = 0
        self._bad = 0
        self._beat: Heartbeat | None = None
        self._control: deque[Message] = deque()
        self.rekey(keys)

    def rekey(self, keys: Keyring) -> None:
        """Takes other secrets, now or when the peer's nonce is known."""
        self._keys = keys
        peer = self.peer.nonce if self.peer else ""
        self._sign_key = keys.session_keys(self.nonce, peer)[0]
        self._verify_keys = keys.session_keys(peer, self.nonce)

    # ---- in

    def open(self, frame: bytes, now: float) -> Message | Malformed | Ignored:
        """What a frame says, if it is signed and new."""
        message: Message | Malformed | Ignored
        if frame[:1] == HELLO_FRAME:
            message = self._open_hello(frame)
        elif frame[:1] == SESSION_FRAME and not self.up:
            return Ignored.STALE  # its Hello got lost or was overtaken; both will be said again
        else:
            message = self._open_session(frame)
        if isinstance(message, Malformed):
            self._bad += 1
            if self._bad > _MAX_BAD:
                self.close("its frames do not verify" if self.peer else UNKNOWN_SECRET)
        elif self.barred and not isinstance(message, Refuse):
            return Ignored.STALE
        elif not isinstance(message, Ignored):
            self.heard_s = now
        return message

    def greeted(self, hello: Hello, now: float) -> bool:
        """Takes a Hello that its reader found acceptable. Whether the session begins with it."""
        if self.up and self.peer is not None and hello.nonce != self.peer.nonce:
            return False  # a recording: the nonce is one for the whole connection
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

    def _open_session(self, frame: bytes) -> Message | Malformed | Ignored:
        # The key that verified last is tried first: with two secrets every frame of a peer would else cost two hashes.
        opened = verify_frame(SESSION_FRAME, (self._verify_key,), frame) if self._verify_key else None
        for key in () if opened else self._verify_keys:
            opened = opened or verify_frame(SESSION_FRAME, (key,), frame)
            self._verify_key = key if opened else None
            if opened:
                break
        if opened is None:
            return Malformed("a frame that is not signed for this connection")
        if not self._window.is_new(opened[0]):
            return Ignored.STALE
        message = decode(opened[1])
        return Malformed("a greeting inside a session") if isinstance(message, Hello | Refuse) else message

    # ---- out

    def send(self, message: Message) -> None:
        """Queues a message. A beat takes the place of an older one that still waits: only the newest is of use."""
        if self.closing is not None or self.barred:
            return
        if isinstance(message, Heartbeat):
            if self._beat is not None:
                updates = dict.fromkeys((*self._beat.updates, *message.updates))  # these were counted as sent
                message = replace(message, updates=tuple(updates)[:MAX_UPDATES])
            self._beat = message
        elif len(self._control) < MAX_WAITING:
            self._control.append(message)
        else:
            self.close("it does not read what it is sent")

    def watch(self, settings: ProtocolSettings, now: float) -> None:
        """What time brings: a Hello is said again, and silence ends the connection."""
        if self.up:
            if now - self.heard_s > settings.link_silent_s:
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
        """Tells the peer why, and is deaf to it from then on. It ends the connection, or the time to greet does.

        Closing here would let our refusal and its own, when both object, cross and get lost. If it does not know us
        yet it is told first who refuses it: it may object as well, and the two then know which of them goes.
        """
        if self.peer is not None and not self.barred:
            self._refusal = Refuse(self.peer.nonce, reason)
        self.barred, self.up, self.opened_s = True, False, now
        self._beat, self._greet = None, not self._named
        self._control.clear()

    def close(self, reason: str) -> None:
        """The connection is to end; nothing more is queued."""
        if self.closing is None:
            self.closing = reason
            self._beat, self._greet = None, False
            self._control.clear()

    @property
    def waiting(self) -> int:
        """Frames that wait to be sent."""
        return len(self._control) + (self._beat is not None) + self._greet + (self._refusal is not None)

    def pull(self, hello: Hello, now: float) -> bytes | None:
        """The next frame; `hello` is what to say if it is a greeting. Signed only here, so numbers go up in order."""
        if self._greet:
            self._greet, self._named, self.greeted_s = False, True, now
            return sign_frame(HELLO_FRAME, self._keys.hello_keys()[0], 0, encode(hello))
        if self._refusal is not None:
            body, self._refusal = encode(self._refusal), None
            return sign_frame(HELLO_FRAME, self._keys.hello_keys()[0], 0, body)
        if not self.up:
            return None
        message: Message | None = self._control.popleft() if self._control else self._beat
        if message is None:
            return None
        if message is self._beat:
            self._beat = None
        self._sent += 1
        return sign_frame(SESSION_FRAME, self._sign_key, self._sent, encode(message))


def should_replace(new: Connection, old: Connection, hello: Hello, me: str) -> bool:
    """Whether of two connections with the one that says `hello` the new one is to be used: both dialled, or one broke
    and only one end knows. Both ends must choose alike: of two connections from one side the newer, of two from both
    sides the one that the lesser name dialled."""
    same_side = (old.dialled is None) == (new.dialled is None)
    lesser_dialled = (new.dialled is not None) == (me < hello.name)
    return same_side or lesser_dialled or (old.peer is not None and hello.epoch > old.peer.epoch)


def limit_accepted(links: Iterable[Connection]) -> None:
    """For the last of them, if need be. Those who come and say nothing keep nobody out: the oldest of them goes, and
    first one that has shown no key. What we dialled ourselves is not counted."""
    accepted = [link for link in links if link.dialled is None and link.closing is None]
    strangers = [link for link in accepted if not link.up]
    if len(strangers) > _MAX_STRANGERS:
        min(strangers, key=lambda link: (link.peer is not None, link.opened_s)).close("others wait for its place")
    elif len(accepted) > _MAX_ACCEPTED:
        accepted[-1].close("no room for another connection")
