"""How many adapters are uploaded at the same time: by all clients together, and by each of them, so that one client's
slow uploads leave room for others."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from caraserve.errors import ServerBusy

_MOST_UPLOADS = 16
_MOST_OF_CLIENT = 4
_MOST_WAITING = 64  # of a client
_LONGEST_WAIT_S = 30.0
_RETRY_S = 1.0


class UploadPlaces:
    """Counts the uploads under way. For the event loop."""

    def __init__(self, longest_wait_s: float = _LONGEST_WAIT_S) -> None:
        self._longest_wait_s = longest_wait_s
        self._of_client: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []  # in the order in which they came

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncIterator[None]:
        """Waits for a place, and keeps it. Raises ServerBusy if too many of the client wait, or for too long."""
        if not self._waiting and self._is_free_for(client):
            self._of_client[client] += 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]
            self._give_places()

    def _is_free_for(self, client: str) -> bool:
        return self._of_client[client] < _MOST_OF_CLIENT and self._of_client.total() < _MOST_UPLOADS

    async def _wait(self, client: str) -> None:
        busy = ServerBusy(
            f"{_MOST_UPLOADS} adapters are being uploaded, or {_MOST_OF_CLIENT} by this client; try again",
            retry_after_s=_RETRY_S,
        )
        if [other for other, _ in self._waiting].count(client) >= _MOST_WAITING:
            raise busy
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((client, turn))
        self._give_places()  # it may pass those whose client has all of its places
        try:
            async with asyncio.timeout(self._longest_wait_s):
                await turn
        except BaseException as error:
            if turn.cancelled():
                self._waiting.remove((client, turn))
            else:  # it has got its place at the same time
                self._of_client[client] -= 1
                self._give_places()
            if isinstance(error, TimeoutError):
                raise busy from None
            raise

    def _give_places(self) -> None:
        for client, turn in list(self._waiting):
            if self._is_free_for(client) and not turn.done():
                self._waiting.remove((client, turn))
                self._of_client[client] += 1
                turn.set_result(None)
