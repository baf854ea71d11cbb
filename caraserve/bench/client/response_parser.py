"""Parses responses of HTTP/1.1 piece by piece, without waiting for what is not there yet."""

_START = b"HTTP/1."
_MOST_HEAD_BYTES = 1 << 16
_NO_BODY = (204, 304)


class ResponseParser:
    """Cuts the bytes of one HTTP/1.1 response into its status, its headers and its body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.is_last = False  # of its connection
        self._rest = b""  # an incomplete head or line
        self._left: int | None = 0  # bytes of the body or of a chunk; None: until the connection closes
        self._is_chunked = self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """Takes what has arrived; returns the part of the body that is in it. Raises ValueError if it is not HTTP."""
        data, self._rest = self._rest + data, b""
        while self.status < 200:  # of 1xx another response follows
            head, end, rest = data.partition(b"\r\n\r\n")
            if not head.startswith(_START[: len(head)]) or len(head) > _MOST_HEAD_BYTES:
                raise ValueError(repr(data[:20]))
            if not end:
                self._rest = data
                return b""
            self._read_head(head)
            data = rest
        if self._is_chunked:
            return self._unchunked(data)
        if self._left is not None:
            self._left -= len(data)
            self.is_complete = self._left <= 0
        return data

    def close(self) -> bool:
        """Says that the connection has been closed; returns whether the response is complete."""
        return self.is_complete or (self.status >= 200 and self._left is None and not self._is_chunked)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        self.status = int(status[:3])
        named = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in named}
        self._is_chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length", "0" if self.status in _NO_BODY else None)
        self._left = 0 if self._is_chunked else None if length is None else int(length)
        asked = self.headers.get("connection", "keep-alive" if version == "HTTP/1.1" else "close").lower()
        self.is_last = asked == "close" or self._left is None

    def _unchunked(self, data: bytes) -> bytes:
        """Returns the contents of the chunks in some bytes of a body."""
        pieces = []
        while data:
            if self._left:
                pieces.append(data[: self._left])
                data = data[self._left :]
                self._left -= len(pieces[-1])
                continue
            line, end, rest = data.partition(b"\r\n")
            if not end:
                self._rest = data
                break
            data = rest
            if self._in_trailer:
                self.is_complete = self.is_complete or not line
            elif line:  # an empty one ends a chunk
                self._left = int(line.partition(b";")[0], 16)
                self._in_trailer = self._left == 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
