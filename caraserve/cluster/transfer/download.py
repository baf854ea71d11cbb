"""Adapters fetched from the instances that hold them: in ranges, from several at once, each chunk checked.

    holders ─► manifest, checked against the digest ─► runs of chunks from up to three holders, first layers first
                                                       └─ what one fails to give, another gives

A chunk is taken in once its hash is right, so bytes that a peer got wrong cost one chunk, and a peer that dies what was
under way: the rest goes on with the others. While chunks come, nobody gives up. What has been taken in is never
asked for again, so it may be read while the rest comes.
"""

import asyncio
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.cluster.routing.cost import Tier
from caraserve.cluster.transfer.peer_client import TransferFailure
from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.errors import AdapterRejected, Unreachable
from caraserve.lora.host_loader import Came
from caraserve.lora.manifest import chunk_ends, read_manifest
from caraserve.model.spec import ModelSpec

_SOURCES = 3  # holders that give one adapter at a time
_RUN = 4  # chunks asked for at once
_MOST_RUNS = 8  # under way, of all adapters together
_PATIENCE_S = 2.0  # without progress: what is held where may still be on its way to us
_MOST_S = 60.0  # the same, where all holders are busy
_SLOW_S = 5.0  # of a run, from one holder of several
_AGAIN_S = 0.25  # before a peer that failed or is busy is asked again
_MOST_FAILURES = 3  # of one peer, for one adapter
_MOST_WRONG = 2  # corrupt chunks of one peer, for one adapter; then it is not asked for that one any more
_BANNED_S = 60.0  # its disk may have been mended
_MOST_BANS = 1000


class HolderLookup(Protocol):
    """Who holds what."""

    def holders(self, digest: str) -> Mapping[str, Tier]:
        """Other instances that are alive and say that they have its bytes."""

    def address(self, name: str) -> str | None:
        """Where one is."""

    async def news(self, timeout_s: float) -> None:
        """Returns when that may have changed, or after so long."""


class ChunkSource(Protocol):
    """`transfers.Transfers`."""

    async def manifest(self, address: str, digest: str) -> bytes | TransferFailure: ...

    async def chunks(
        self,
        address: str,
        digest: str,
        start: int,
        ends: Sequence[int],
        hashes: Sequence[bytes],
        into: memoryview,
        right: Callable[[], None],
    ) -> TransferFailure | None: ...


@dataclass(slots=True)
class DownloadCounts:
    """Of all fetches so far."""

    fetched: int = 0
    failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    corrupt: int = 0  # chunks


@dataclass(slots=True)
class _Fetch:
    digest: str
    into: NDArray[np.uint8]
    came: Came
    gives_up_s: float  # without progress and without anybody to ask
    ends_s: float  # without progress
    spec: AdapterSpec | None = None
    ends: list[int] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)  # chunks not yet asked for, the first ones first
    right: set[int] = field(default_factory=set)  # chunks that are here
    in_row: int = 0  # so many of them from the first on
    failures: Counter[str] = field(default_factory=Counter)
    again_s: dict[str, float] = field(default_factory=dict)
    is_busy: bool = False

    def take_run(self) -> range:
        """The next chunks that lie side by side."""
        first = self.pending.popleft()
        end = first + 1
        while self.pending and self.pending[0] == end and end - first < _RUN:
            end = self.pending.popleft() + 1
        return range(first, end)

    def take_in(self, chunk: int) -> None:
        """One has come and is right."""
        assert self.spec is not None
        self.right.add(chunk)
        if chunk != self.in_row:
            return
        while self.in_row in self.right:
            self.in_row += 1
        image = HostAdapter(self.spec, self.into[: self.spec.num_bytes])
        self.came(image, bisect_right(self.spec.layer_ends, self.ends[self.in_row - 1]))


class Downloader:
    """Fetches adapters by digest."""

    def __init__(
        self,
        peers: HolderLookup,
        wire: ChunkSource,
        model: ModelSpec,
        now: Callable[[], float] = time.monotonic,
        patience_s: float = _PATIENCE_S,
        slow_s: float = _SLOW_S,
    ) -> None:
        self.counts = DownloadCounts()
        self.under_way = 0
        self._peers, self._wire, self._model = peers, wire, model
        self._now, self._patience_s, self._slow_s = now, patience_s, slow_s
        self._runs = asyncio.Semaphore(_MOST_RUNS)
        self._wrong: dict[tuple[str, str], tuple[int, float]] = {}  # (digest, peer) → corrupt chunks, the last of them

    async def fetch(self, digest: str, into: NDArray[np.uint8], came: Came = lambda image, layers: None) -> HostAdapter:
        """Fills `into` with an adapter's image; `came` is told of its first layers as they are there. Raises
        Unreachable when nobody gives it, and AdapterRejected when it is none for this base model."""
        began_s = self._now()
        fetch = _Fetch(digest, into, came, began_s + self._patience_s, began_s + _MOST_S)
        self.under_way += 1
        try:
            image = await self._filled(fetch)
        except (Unreachable, AdapterRejected):
            self.counts.failed += 1
            raise
        finally:
            self.under_way -= 1
        self.counts.fetched += 1
        self.counts.num_bytes += image.spec.num_bytes
        self.counts.seconds += self._now() - began_s
        return image

    async def _filled(self, fetch: _Fetch) -> HostAdapter:
        while True:
            sources = self._sources(fetch)
            left = len(fetch.pending), fetch.spec is None
            if sources and fetch.spec is None:
                await self._ask_manifest(fetch, sources[0])
            elif sources:
                async with asyncio.TaskGroup() as group:
                    for name in sources[:_SOURCES]:
                        group.create_task(self._take_from(fetch, name))
            if fetch.spec is not None and not fetch.pending:
                return HostAdapter(fetch.spec, fetch.into[: fetch.spec.num_bytes])
            now = self._now()
            if (len(fetch.pending), fetch.spec is None) != left:
                fetch.gives_up_s, fetch.ends_s = now + self._patience_s, now + _MOST_S
            elif fetch.is_busy:
                fetch.gives_up_s = now + self._patience_s
            fetch.is_busy = False
            if now >= fetch.ends_s or (now >= fetch.gives_up_s and not self._hopeful(fetch)):
                raise self._unreachable(fetch)
            if not self._sources(fetch):
                await self._peers.news(_AGAIN_S)

    def _sources(self, fetch: _Fetch) -> list[str]:
        """Whom to ask now: nearest to their memory first, those that failed last."""
        now = self._now()
        usable = [
            (fetch.failures[name], tier >= Tier.DISK, name)
            for name, tier in self._hopeful(fetch).items()
            if fetch.again_s.get(name, now) <= now
        ]
        return [name for _, _, name in sorted(usable)]

    async def _ask_manifest(self, fetch: _Fetch, name: str) -> None:
        address = self._peers.address(name)
        body = TransferFailure.FAILED if address is None else await self._wire.manifest(address, fetch.digest)
        if isinstance(body, TransferFailure):
            self._note(fetch, name, body)
            return
        try:
            spec = read_manifest(body, fetch.digest, self._model)
        except AdapterRejected:
            self._note(fetch, name, TransferFailure.CORRUPT)
            return
        if spec.num_bytes > fetch.into.nbytes:
            raise AdapterRejected(f"adapter {fetch.digest[:12]} has {spec.num_bytes} bytes, more than was registered")
        fetch.spec, fetch.ends = spec, chunk_ends(spec.layer_ends)
        fetch.pending.extend(range(len(fetch.ends)))

    async def _take_from(self, fetch: _Fetch, name: str) -> None:
        """Run after run from one holder, until there is none left or it fails."""
        assert fetch.spec is not None
        while fetch.pending and (address := self._peers.address(name)) is not None:
            async with self._runs:
                if not fetch.pending:
                    return
                run = fetch.take_run()
                trouble = await self._chunks(fetch, name, address, run)
            fetch.pending.extendleft(chunk for chunk in reversed(run) if chunk not in fetch.right)
            if trouble is not None:
                self._note(fetch, name, trouble)
                return

    async def _chunks(self, fetch: _Fetch, name: str, address: str, run: range) -> TransferFailure | None:
        """A run; what is missing of it goes back when it takes long and there is another who may be faster: he comes
        first then. Only who gave nothing of it has failed."""
        assert fetch.spec is not None
        others = any(other != name for other in self._hopeful(fetch))
        start, ends = fetch.ends[run[0] - 1] if run[0] else 0, fetch.ends[run[0] : run[-1] + 1]
        hashes, into = fetch.spec.chunks[run[0] : run[-1] + 1], fetch.into[start : ends[-1]].data
        chunks = iter(run)
        try:
            async with asyncio.timeout(self._slow_s if others else None):
                return await self._wire.chunks(
                    address, fetch.digest, start, ends, hashes, into, lambda: fetch.take_in(next(chunks))
                )
        except TimeoutError:
            return TransferFailure.BUSY if fetch.right.intersection(run) else TransferFailure.FAILED

    def _note(self, fetch: _Fetch, name: str, trouble: TransferFailure) -> None:
        if trouble is TransferFailure.CORRUPT:
            self.counts.corrupt += 1
            self._wrong[fetch.digest, name] = self._wrong.get((fetch.digest, name), (0, 0.0))[0] + 1, self._now()
            while len(self._wrong) > _MOST_BANS:
                del self._wrong[next(iter(self._wrong))]
        elif trouble is TransferFailure.ABSENT:
            fetch.failures[name] = _MOST_FAILURES
        else:
            fetch.is_busy |= trouble is TransferFailure.BUSY
            fetch.failures[name] += trouble is TransferFailure.FAILED
            fetch.again_s[name] = self._now() + _AGAIN_S

    def _hopeful(self, fetch: _Fetch) -> dict[str, Tier]:
        """Holders that it is worth while to ask, now or soon."""
        return {
            name: tier
            for name, tier in self._peers.holders(fetch.digest).items()
            if fetch.failures[name] < _MOST_FAILURES and not self._is_banned(fetch.digest, name)
        }

    def _is_banned(self, digest: str, name: str) -> bool:
        count, last_s = self._wrong.get((digest, name), (0, 0.0))
        if count >= _MOST_WRONG and self._now() - last_s > _BANNED_S:
            del self._wrong[digest, name]
            return False
        return count >= _MOST_WRONG

    def _unreachable(self, fetch: _Fetch) -> Unreachable:
        holders = self._peers.holders(fetch.digest)
        who = f"of {', '.join(sorted(holders))} none gives its bytes" if holders else "no instance that has it is there"
        return Unreachable(f"the adapter {fetch.digest[:12]} cannot be fetched now: {who}", retry_after_s=5.0)
