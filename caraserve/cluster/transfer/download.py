"""Downloads adapters from the instances that hold them: in ranges, from several at once, each chunk verified.

    holders ─► manifest, checked against the digest ─► runs of chunks from up to three holders, first layers first
                                                       └─ another holder sends what one fails to send

A chunk is accepted once its hash is right. Wrong bytes cost one chunk, and a peer that dies costs the chunks it was
sending; the download continues with the other holders, and does not fail while chunks arrive. An accepted chunk is
never requested again, so it may be read while the rest arrives. Holders that send slowly delay only the downloads
from them: a run of chunks keeps its place among all runs for 5 s at most, one holder sends three runs at a time, and
`PeerClient` ends what comes too slowly.
"""

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from caraserve.cluster.membership.member import Member
from caraserve.cluster.membership.peer_client import PeerClient, TransferFailure
from caraserve.cluster.state.replicated_map import Tier
from caraserve.cluster.transfer.upload import PATH
from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.errors import AdapterRejected, Unreachable
from caraserve.lora.adapter import LayersArrived
from caraserve.lora.manifest import MAX_MANIFEST_BYTES, chunk_ends, read_manifest
from caraserve.model.plan import DecoderPlan

_SOURCES = 3  # holders that send one adapter at a time
_RUN = 4  # chunks in one request
_MAX_RUNS = 8  # in progress, of all adapters together, without those that take longer than _SLOW_S
_MAX_RUNS_OF_HOLDER = 3  # with those
_PATIENCE_S = 2.0  # without progress: the list of holders may still arrive
_MAX_WAIT_S = 60.0  # without progress while holders are busy
_SLOW_S = 5.0  # a manifest or a run that takes longer goes to another holder; without one, the run gives its place back
_RETRY_S = 0.25  # before a peer that failed or is busy is asked again
_MAX_FAILURES = 3  # of one peer, for one adapter
_MAX_CORRUPT = 2  # chunks of one peer, for one adapter; then the peer is banned for that adapter
_BANNED_S = 60.0  # then it is tried again: its disk may have been repaired
_MAX_BANS = 1000


class HolderWatch:
    """The other instances that hold adapters, and waits for changes of them."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._change = asyncio.Event()

    def holders(self, digest: str) -> Mapping[str, Tier]:
        """Returns the other live instances that advertise an adapter, with the tier where each has it."""
        return {name: tier for name, tier in self._member.holders(digest).items() if name != self._member.name}

    def address(self, name: str) -> str | None:
        """Returns an instance's address."""
        record = self._member.record(name)
        return record.address if record is not None else None

    def notify(self) -> None:
        """Ends all waits: an instance came or left, or the adapters of one changed."""
        self._change.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when holders may have changed, or after `timeout_s`."""
        self._change.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change.wait()


@dataclass(slots=True)
class DownloadCounts:
    """Counts over all downloads of this process; `seconds` is the sum of their times."""

    fetched: int = 0
    failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    corrupt: int = 0  # chunks


@dataclass(slots=True)
class _Download:
    digest: str
    into: NDArray[np.uint8]
    came: LayersArrived
    gives_up_s: float  # without progress and without a holder
    ends_s: float  # without progress
    spec: AdapterSpec | None = None
    ends: list[int] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)  # chunks not yet requested, in order
    verified: set[int] = field(default_factory=set)  # chunks
    num_leading: int = 0  # verified chunks before the first missing one
    failures: Counter[str] = field(default_factory=Counter)
    retry_at_s: dict[str, float] = field(default_factory=dict)
    is_busy: bool = False
    under_way: int = 0  # runs
    waiting: set["asyncio.Task[None]"] = field(default_factory=set)  # for a place

    def take_run(self) -> range:
        """Takes the next adjacent chunks from the pending ones."""
        first = self.pending.popleft()
        end = first + 1
        while self.pending and self.pending[0] == end and end - first < _RUN:
            end = self.pending.popleft() + 1
        return range(first, end)

    def end_waits(self) -> None:
        """Ends the tasks that wait for a place if no run is left for them."""
        if not (self.pending or self.under_way):
            for task in self.waiting:
                task.cancel()

    def accept(self, chunk: int) -> None:
        """Accepts a verified chunk, and reports newly complete layers."""
        assert self.spec is not None
        self.verified.add(chunk)
        if chunk != self.num_leading:
            return
        while self.num_leading in self.verified:
            self.num_leading += 1
        image = HostAdapter(self.spec, self.into[: self.spec.num_bytes])
        self.came(image, bisect_right(self.spec.layer_ends, self.ends[self.num_leading - 1]))


class Downloader:
    """Downloads adapters by digest."""

    def __init__(
        self,
        peers: HolderWatch,
        client: PeerClient,
        plan: DecoderPlan,
        now: Callable[[], float] = time.monotonic,
        patience_s: float = _PATIENCE_S,
        slow_s: float = _SLOW_S,
    ) -> None:
        self.counts = DownloadCounts()
        self.in_progress = 0
        self._peers, self._client, self._model = peers, client, plan
        self._now, self._patience_s, self._slow_s = now, patience_s, slow_s
        self._runs = asyncio.Semaphore(_MAX_RUNS)
        # Kept while runs use them or wait, as instances come and go.
        self._runs_of_holder: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # (digest, peer) → corrupt chunks, time of the last
        self._corrupt: dict[tuple[str, str], tuple[int, float]] = {}

    async def fetch(
        self, digest: str, into: NDArray[np.uint8], came: LayersArrived = lambda image, layers: None
    ) -> HostAdapter:
        """Fills `into` with an adapter's image. Calls `came(image, layers)` whenever more leading layers are complete.
        Raises Unreachable when no holder sends it, and AdapterRejected when it does not fit this base model."""
        began_s = self._now()
        fetch = _Download(digest, into, came, began_s + self._patience_s, began_s + _MAX_WAIT_S)
        self.in_progress += 1
        try:
            image = await self._filled(fetch)
        except (Unreachable, AdapterRejected):
            self.counts.failed += 1
            raise
        finally:
            self.in_progress -= 1
        self.counts.fetched += 1
        self.counts.num_bytes += image.spec.num_bytes
        self.counts.seconds += self._now() - began_s
        return image

    async def _filled(self, fetch: _Download) -> HostAdapter:
        while True:
            sources = self._sources(fetch)
            left = len(fetch.pending), fetch.spec is None
            if sources and fetch.spec is None:
                await self._ask_manifest(fetch, sources[0])
            elif sources:
                async with asyncio.TaskGroup() as group:
                    for name in sources[:_SOURCES]:
                        group.create_task(self._download_from(fetch, name))
            if fetch.spec is not None and not fetch.pending:
                return HostAdapter(fetch.spec, fetch.into[: fetch.spec.num_bytes])
            now = self._now()
            if (len(fetch.pending), fetch.spec is None) != left:
                fetch.gives_up_s, fetch.ends_s = now + self._patience_s, now + _MAX_WAIT_S
            elif fetch.is_busy:
                fetch.gives_up_s = now + self._patience_s
            fetch.is_busy = False
            if now >= fetch.ends_s or (now >= fetch.gives_up_s and not self._usable_holders(fetch)):
                raise self._unreachable(fetch)
            if not self._sources(fetch):
                await self._peers.wait_for_change(_RETRY_S)

    def _sources(self, fetch: _Download) -> list[str]:
        """Returns the holders to request from now: fewest failures first, then those with the adapter in memory."""
        now = self._now()
        usable = [
            (fetch.failures[name], tier >= Tier.DISK, name)
            for name, tier in self._usable_holders(fetch).items()
            if fetch.retry_at_s.get(name, now) <= now
        ]
        return [name for _, _, name in sorted(usable)]

    async def _ask_manifest(self, fetch: _Download, name: str) -> None:
        address = self._peers.address(name)
        body: bytes | TransferFailure = TransferFailure.FAILED
        if address is not None:
            with contextlib.suppress(TimeoutError):
                async with self._limit(fetch, name):
                    body = await self._client.page(address, f"{PATH}/{fetch.digest}/manifest", MAX_MANIFEST_BYTES)
        if isinstance(body, TransferFailure):
            self._record_failure(fetch, name, body)
            return
        try:
            spec = read_manifest(body, fetch.digest, self._model)
        except AdapterRejected:
            self._record_failure(fetch, name, TransferFailure.CORRUPT)
            return
        if spec.num_bytes > fetch.into.nbytes:
            raise AdapterRejected(f"adapter {fetch.digest[:12]} has {spec.num_bytes} bytes, more than was registered")
        fetch.spec, fetch.ends = spec, chunk_ends(spec.layer_ends)
        fetch.pending.extend(range(len(fetch.ends)))

    async def _download_from(self, fetch: _Download, name: str) -> None:
        """Downloads run after run from one holder, until none is left or it fails."""
        assert fetch.spec is not None
        while fetch.pending and (address := self._peers.address(name)) is not None:
            try:
                async with self._place(fetch, name):
                    if not fetch.pending:
                        return
                    run = fetch.take_run()
                    fetch.under_way += 1
                    failure = await self._chunks(fetch, name, address, run)
                    fetch.under_way -= 1
            except TimeoutError:
                self._record_failure(fetch, name, TransferFailure.BUSY)
                return
            fetch.pending.extendleft(chunk for chunk in reversed(run) if chunk not in fetch.verified)
            fetch.end_waits()
            if failure is not None:
                self._record_failure(fetch, name, failure)
                return

    @contextlib.asynccontextmanager
    async def _place(self, fetch: _Download, name: str) -> AsyncIterator[None]:
        """Takes a place for one run, and gives it back; the first to wait gets the next one. After `slow_s`, the run
        goes on without its place: at 16 KiB/s it would keep it for 256 s. Raises TimeoutError after `slow_s` if there
        is another holder."""
        of_holder = self._runs_of_holder.get(name)
        if of_holder is None:
            of_holder = self._runs_of_holder[name] = asyncio.Semaphore(_MAX_RUNS_OF_HOLDER)
        task = asyncio.current_task()
        assert task is not None
        async with contextlib.AsyncExitStack() as taken:
            fetch.waiting.add(task)
            try:
                async with self._limit(fetch, name):
                    await taken.enter_async_context(of_holder)
                    await self._runs.acquire()
                place = taken.enter_context(contextlib.ExitStack())
                place.callback(self._runs.release)
                taken.callback(asyncio.get_running_loop().call_later(self._slow_s, place.close).cancel)
            finally:
                fetch.waiting.discard(task)
            yield

    async def _chunks(self, fetch: _Download, name: str, address: str, run: range) -> TransferFailure | None:
        """Downloads one run. Counts as a failure only if no chunk arrived."""
        assert fetch.spec is not None
        start, ends = fetch.ends[run[0] - 1] if run[0] else 0, fetch.ends[run[0] : run[-1] + 1]
        path = f"{PATH}/{fetch.digest}?from={start}&to={ends[-1]}"
        sizes = [end - begin for begin, end in pairwise((start, *ends))]
        hashes, into = fetch.spec.chunks[run[0] : run[-1] + 1], fetch.into[start : ends[-1]].data
        chunks = iter(run)
        failure: TransferFailure | None = TransferFailure.FAILED
        with contextlib.suppress(TimeoutError):
            async with self._limit(fetch, name):
                failure = await self._client.chunks(
                    address, path, sizes, hashes, into, lambda: fetch.accept(next(chunks))
                )
        if failure is TransferFailure.FAILED and fetch.verified.intersection(run):
            return TransferFailure.BUSY
        return failure

    def _limit(self, fetch: _Download, name: str) -> asyncio.Timeout:
        """Returns the time for one request to a holder: `slow_s` if there is another one, which then comes first."""
        others = any(other != name for other in self._usable_holders(fetch))
        return asyncio.timeout(self._slow_s if others else None)

    def _record_failure(self, fetch: _Download, name: str, failure: TransferFailure) -> None:
        if failure is TransferFailure.CORRUPT:
            self.counts.corrupt += 1
            self._corrupt[fetch.digest, name] = self._corrupt.get((fetch.digest, name), (0, 0.0))[0] + 1, self._now()
            while len(self._corrupt) > _MAX_BANS:
                del self._corrupt[next(iter(self._corrupt))]
        elif failure is TransferFailure.ABSENT:
            fetch.failures[name] = _MAX_FAILURES
        else:
            fetch.is_busy |= failure is TransferFailure.BUSY
            fetch.failures[name] += failure is TransferFailure.FAILED
            fetch.retry_at_s[name] = self._now() + _RETRY_S

    def _usable_holders(self, fetch: _Download) -> dict[str, Tier]:
        """Returns the holders from which to download now or soon."""
        return {
            name: tier
            for name, tier in self._peers.holders(fetch.digest).items()
            if fetch.failures[name] < _MAX_FAILURES and not self._is_banned(fetch.digest, name)
        }

    def _is_banned(self, digest: str, name: str) -> bool:
        count, last_s = self._corrupt.get((digest, name), (0, 0.0))
        if count >= _MAX_CORRUPT and self._now() - last_s > _BANNED_S:
            del self._corrupt[digest, name]
            return False
        return count >= _MAX_CORRUPT

    def _unreachable(self, fetch: _Download) -> Unreachable:
        holders = self._peers.holders(fetch.digest)
        who = (
            f"of {', '.join(sorted(holders))} none sends its bytes"
            if holders
            else "no instance that has it is reachable"
        )
        return Unreachable(f"the adapter {fetch.digest[:12]} cannot be downloaded now: {who}", retry_after_s=5.0)
