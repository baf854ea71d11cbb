"""Request bodies within the server's memory: how much of all may be held."""

from aiohttp import web

from caraserve.errors import ServerBusy
from caraserve.util.units import human_bytes

_FREE_BYTES = 64 << 10  # of each body: large bodies of some clients are no reason to refuse small ones of others
_LEAST_BYTES = 256 << 20
_LARGEST_BODIES = 4  # that there is room for, whatever the limit for one
_RETRY_S = 1.0

_HELD_BYTES = web.RequestKey("_HELD_BYTES", int)


class BodyBudget:
    """Bytes of the bodies of all requests under way. A body counts as it arrives and until its request has ended."""

    def __init__(self, max_body_bytes: int) -> None:
        self._most_bytes = max(_LEAST_BYTES, _LARGEST_BODIES * max_body_bytes)
        self.held_bytes = 0

    def hold(self, request: web.Request, num_bytes: int) -> None:
        """Counts the first `num_bytes` of a request's body. Raises ServerBusy when that is too much with the others."""
        held_bytes = request.get(_HELD_BYTES, 0)
        more_bytes = max(0, num_bytes - _FREE_BYTES) - held_bytes
        if self.held_bytes + more_bytes > self._most_bytes:
            raise ServerBusy(
                f"The bodies of all requests under way exceed {human_bytes(self._most_bytes)}; send the request again.",
                retry_after_s=_RETRY_S,
            )
        self.held_bytes += more_bytes
        request[_HELD_BYTES] = held_bytes + more_bytes

    def release(self, request: web.Request) -> None:
        """When a request has ended."""
        self.held_bytes -= request.get(_HELD_BYTES, 0)
        request[_HELD_BYTES] = 0
