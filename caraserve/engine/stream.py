"""What a request's owner holds: an async iterator of token deltas, and the right to cancel.

The engine puts deltas in, an HTTP handler takes them out. A reader that is slower than the engine finds the deltas
since its last look merged into one, so a stalled client costs its own output's memory and nothing else.
"""

import asyncio
from collections.abc import Callable

from caraserve.core.request import TokenDelta


class Stream:
    """Async iterator of `TokenDelta`; the last one has `finish` set. A failed request ends with a finish too."""

    def __init__(self, on_cancel: Callable[[], None]) -> None:
        self._on_cancel = on_cancel
        self._pending: list[TokenDelta] = []
        self._ready = asyncio.Event()
        self._ended = False

    def put(self, delta: TokenDelta) -> None:
        """Engine's side: adds a delta."""
        self._pending.append(delta)
        self._ready.set()

    def cancel(self) -> None:
        """Ends the request; what it holds is free within an iteration. Harmless when it has ended."""
        self._on_cancel()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> TokenDelta:
        if self._ended:
            raise StopAsyncIteration
        await self._ready.wait()
        self._ready.clear()
        pending, self._pending = self._pending, []
        delta = pending[0] if len(pending) == 1 else merge(pending)
        self._ended = delta.finish is not None
        return delta


def merge(deltas: list[TokenDelta]) -> TokenDelta:
    """Consecutive deltas as one."""
    return TokenDelta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=tuple(logprob for delta in deltas for logprob in delta.prompt_logprobs),
        finish=deltas[-1].finish,
    )
