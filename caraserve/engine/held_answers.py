"""The ends of answers that wait for the digest of their adapter's bytes: an answer names a digest, and must not be
complete under a wrong one."""

from collections.abc import Callable

from caraserve.engine.active_request import ActiveRequest, Ending
from caraserve.errors import CaraServeError
from caraserve.lora.adapter import Adapter


class HeldAnswers:
    """Requests that have ended and hold no slot, blocks or adapter any more. Runs on the event loop."""

    def __init__(self, send_end: Callable[[ActiveRequest, Ending], None]) -> None:
        """`send_end`: sends a request's last delta."""
        self._send_end = send_end
        self._held: dict[Adapter, list[tuple[ActiveRequest, Ending]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def hold(self, active: ActiveRequest, ending: Ending) -> bool:
        """Holds the end of a complete answer whose adapter's digest is still being computed. Returns False for any
        other."""
        adapter = active.adapter
        if adapter is None or adapter.is_checked or ending.reason not in ("stop", "length"):
            return False
        self._held.setdefault(adapter, []).append((active, ending))
        return True

    def release(self, adapter: Adapter, error: CaraServeError | None) -> None:
        """Sends the ends of an adapter's answers: as they are, or with `error`."""
        for active, ending in self._held.pop(adapter, ()):
            self._send_end(active, ending if error is None else Ending("error", error=error))
