"""Downloading an adapter from several holders, despite wrong bytes and deaths, or failing with a reason."""

import asyncio
import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest

from caraserve.cluster.membership.peer_client import TransferFailure
from caraserve.cluster.state.replicated_map import Tier
from caraserve.cluster.transfer.download import Downloader
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import AdapterRejected, Unreachable
from caraserve.lora.manifest import chunk_ends, manifest_of
from tests.cluster.images import MODEL, image
from tests.cluster.nodes import until


class Peer:
    """Another instance that has images, and may be slow, busy, dead or send wrong bytes."""

    def __init__(self, *held: HostAdapter, answers: bool = True, tier: Tier = Tier.HOST, **troubles: int) -> None:
        """`answers`: whether requests for chunks are answered before the event of that name is set."""
        self.held, self.tier = {one.spec.digest: one for one in held}, tier
        self.is_dead = self.is_wrong = self.is_silent = False
        self.busy_times = 0
        self.dies_after: int | None = None  # chunks
        self.given: list[int] = []  # starts of chunks
        self.lingers_after: int | None = None  # chunks, after which it sends nothing more, without ending
        self.most: int | None = None  # chunks of a run, after which it sends nothing more, without ending
        self.answers = asyncio.Event()
        if answers:
            self.answers.set()
        vars(self).update(troubles)

    async def give(
        self, digest: str, start: int, sizes: Sequence[int], into: memoryview, on_verified: Callable[[], None]
    ) -> TransferFailure | None:
        if self.is_dead:
            return TransferFailure.FAILED
        if self.busy_times:
            self.busy_times -= 1
            return TransferFailure.BUSY
        if self.is_wrong:
            into[:1] = b"?"
            return TransferFailure.CORRUPT
        for at, (begin, end) in enumerate(pairwise(accumulate(sizes, initial=start))):
            if at == self.most:
                await asyncio.Event().wait()
            if self.dies_after is not None and len(self.given) >= self.dies_after:
                self.is_dead = True
                return TransferFailure.FAILED
            if self.lingers_after is not None and len(self.given) >= self.lingers_after:
                await asyncio.Event().wait()
            into[begin - start : end - start] = self.held[digest].data[begin:end].data
            self.given.append(begin)
            on_verified()
        return None


class World:
    """Peers by name; has what downloads need of HolderWatch and PeerClient."""

    def __init__(self, **peers: Peer) -> None:
        self.peers = peers
        self.most_in_progress = self.in_progress = 0
        self.manifests: Counter[str] = Counter()

    def holders(self, digest: str) -> Mapping[str, Tier]:
        return {name: peer.tier for name, peer in self.peers.items() if digest in peer.held}

    def address(self, name: str) -> str | None:
        return name

    async def wait_for_change(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.02))

    async def page(self, address: str, path: str, most_bytes: int) -> bytes | TransferFailure:
        peer, digest = self.peers[address], path.split("/")[3]
        self.manifests[address] += 1
        if peer.is_dead:
            return TransferFailure.FAILED
        if peer.is_silent:
            await asyncio.Event().wait()
        return manifest_of(peer.held[digest].spec) + (b" " if peer.is_wrong else b"")

    async def chunks(
        self,
        address: str,
        path: str,
        sizes: Sequence[int],
        hashes: Sequence[bytes],
        into: memoryview,
        on_verified: Callable[[], None],
    ) -> TransferFailure | None:
        match = re.fullmatch(r"/cluster/adapters/(\w+)\?from=(\d+)&to=(\d+)", path)
        assert match is not None
        assert int(match[3]) - int(match[2]) == sum(sizes)
        self.in_progress += sum(sizes)
        self.most_in_progress = max(self.most_in_progress, self.in_progress)
        await asyncio.sleep(0)
        await self.peers[address].answers.wait()
        self.in_progress -= sum(sizes)
        return await self.peers[address].give(match[1], int(match[2]), sizes, into, on_verified)


HELD = image(rank=64, seed=1)
CHUNKS = len(chunk_ends(HELD.spec.layer_ends))


async def fetch(downloader: Downloader, held: HostAdapter = HELD) -> HostAdapter:
    return await downloader.fetch(held.spec.digest, aligned_bytes(held.spec.num_bytes))


async def fetched(world: World, held: HostAdapter = HELD, patience_s: float = 0.3) -> HostAdapter:
    downloader = Downloader(world, world, MODEL, patience_s=patience_s)
    got = await fetch(downloader, held)
    assert got.spec == held.spec
    assert np.array_equal(got.data, held.data)
    assert downloader.counts.num_bytes == held.spec.num_bytes
    return got


async def test_an_adapter_is_downloaded_from_three_holders_and_each_byte_once() -> None:
    world = World(a=Peer(HELD), b=Peer(HELD), c=Peer(HELD), d=Peer(HELD))
    await fetched(world)
    given = [peer.given for peer in world.peers.values()]
    assert sum(map(len, given)) == CHUNKS
    assert sum(map(bool, given)) == 3
    assert sum(world.manifests.values()) == 1


async def test_a_slow_holder_is_replaced_by_another_one() -> None:
    slow = Peer(HELD, answers=False)
    world = World(a=slow, b=Peer(HELD))
    async with asyncio.timeout(5):
        await fetch(Downloader(world, world, MODEL, slow_s=0.05))
    assert slow.given == []


async def test_a_manifest_that_does_not_come_is_requested_from_another_holder() -> None:
    world = World(a=Peer(HELD, is_silent=True), b=Peer(HELD))
    async with asyncio.timeout(5):
        await fetch(Downloader(world, world, MODEL, slow_s=0.05))
    assert world.manifests == {"a": 1, "b": 1}


@contextlib.asynccontextmanager
async def slow_downloads(*more: HostAdapter) -> AsyncIterator[tuple[World, Downloader]]:
    """Yields peers and a downloader that waits for nine adapters from one of them, which sends nothing."""
    adapters = [image(seed=seed) for seed in range(9)]
    world = World(a=Peer(*adapters, *more, answers=False))
    downloader = Downloader(world, world, MODEL)
    stuck = [asyncio.create_task(fetch(downloader, one)) for one in adapters]
    await until(lambda: world.manifests["a"] == len(adapters) and world.in_progress > 0)
    async with asyncio.timeout(3):
        yield world, downloader
    assert not any(task.done() for task in stuck)
    for task in stuck:
        task.cancel()
    await asyncio.gather(*stuck, return_exceptions=True)


async def test_slow_runs_from_one_holder_leave_places_for_others() -> None:
    async with slow_downloads() as (world, downloader):
        world.peers["b"] = Peer(HELD)
        await fetch(downloader)


async def test_slow_runs_from_several_only_holders_do_not_keep_all_places() -> None:
    adapters = [image(seed=seed) for seed in range(9)]
    world = World(b=Peer(HELD), **{f"slow-{at}": Peer(*adapters[at::3], answers=False) for at in range(3)})
    downloader = Downloader(world, world, MODEL, slow_s=0.1)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for one in adapters:
            group.create_task(fetch(downloader, one))
        await until(downloader._runs.locked)
        await fetch(downloader)
        assert downloader.counts.fetched == 1
        for peer in world.peers.values():
            peer.answers.set()
    assert downloader.counts.fetched == 10
    assert downloader._runs._value == 8  # each place was given back once


async def test_an_adapter_does_not_wait_for_a_place_once_others_have_sent_it() -> None:
    async with slow_downloads(HELD) as (world, downloader):
        world.peers["b"] = Peer(HELD)
        await fetch(downloader)
        assert len(world.peers["b"].given) == CHUNKS


async def test_a_busy_holder_is_asked_again_while_another_has_no_place() -> None:
    async with slow_downloads(HELD) as (world, downloader):
        downloader._slow_s = 0.05
        world.peers["b"] = Peer(HELD, busy_times=2)
        await fetch(downloader)


async def test_slow_holders_that_send_some_chunks_do_not_count_as_failed() -> None:
    """Each holder sends one chunk of each request, and then nothing."""
    world = World(a=Peer(HELD, most=1), b=Peer(HELD, most=1))
    downloader = Downloader(world, world, MODEL, slow_s=0.02)
    async with asyncio.timeout(30):
        got = await fetch(downloader)
    assert np.array_equal(got.data, HELD.data)


async def test_a_holder_that_failed_once_after_the_patience_is_tried_again() -> None:
    class Late(World):
        async def page(self, address: str, path: str, most_bytes: int) -> bytes | TransferFailure:
            if not self.manifests[address]:
                self.manifests[address] += 1
                await asyncio.sleep(0.1)
                return TransferFailure.FAILED
            return await super().page(address, path, most_bytes)

    await fetched(Late(a=Peer(HELD)), patience_s=0.05)


async def test_the_chunks_that_a_slow_holder_did_not_send_come_from_another() -> None:
    slow, fast = Peer(HELD, most=1), Peer(HELD)
    world = World(a=slow, b=fast)
    await fetch(Downloader(world, world, MODEL, slow_s=0.1))
    assert (len(slow.given), len(fast.given)) == (1, CHUNKS - 1)


async def test_a_slow_holder_is_waited_for_if_it_is_the_only_one() -> None:
    slow = Peer(HELD, answers=False)
    world = World(a=slow)
    asyncio.get_running_loop().call_later(0.2, slow.answers.set)
    downloader = Downloader(world, world, MODEL, slow_s=0.01)
    await fetch(downloader)
    assert downloader.counts.fetched == 1


async def test_the_first_layers_are_downloaded_first() -> None:
    world = World(a=Peer(HELD))
    await fetched(world)
    assert world.peers["a"].given == sorted(world.peers["a"].given)


def in_row(chunks: list[int]) -> int:
    """Returns how many leading layers are complete with the chunks that begin at these bytes."""
    ends = chunk_ends(HELD.spec.layer_ends)
    there = next((begin for begin in (0, *ends) if begin not in chunks), HELD.spec.num_bytes)
    return sum(end <= there for end in HELD.spec.layer_ends)


async def test_layers_are_reported_once_all_layers_before_them_are_there() -> None:
    first, second = Peer(HELD, answers=False), Peer(HELD)
    world, told = World(a=first, b=second), list[int]()

    def came(held: HostAdapter, layers: int) -> None:
        end = HELD.spec.layer_ends[layers - 1]
        assert held.spec == HELD.spec
        assert np.array_equal(held.data[:end], HELD.data[:end])
        assert layers == in_row(first.given + second.given)
        told.append(layers)

    download = asyncio.create_task(
        Downloader(world, world, MODEL).fetch(HELD.spec.digest, aligned_bytes(HELD.spec.num_bytes), came)
    )
    await until(lambda: len(second.given) == CHUNKS - 4)
    assert told == []
    first.answers.set()
    await download
    assert told == sorted(set(told))
    assert told[-1] == len(MODEL.layers)


async def test_a_verified_chunk_is_never_requested_again() -> None:
    """Its bytes may be read already, so they must not be written again."""
    slow, other = Peer(HELD, lingers_after=2), Peer(HELD)
    world = World(a=slow, b=other)
    image = aligned_bytes(HELD.spec.num_bytes)
    await Downloader(world, world, MODEL, slow_s=0.05).fetch(HELD.spec.digest, image)
    assert len(slow.given) == 2
    assert sorted(slow.given + other.given) == [0, *chunk_ends(HELD.spec.layer_ends)[:-1]]


async def test_the_chunks_that_a_dead_holder_did_not_send_come_from_another_once() -> None:
    dying, other = Peer(HELD, dies_after=3), Peer(HELD, tier=Tier.DISK)
    await fetched(World(a=dying, b=other))
    assert len(dying.given) == 3
    assert sorted(dying.given + other.given) == [0, *chunk_ends(HELD.spec.layer_ends)[:-1]]


async def test_corrupt_chunks_of_one_holder_are_downloaded_from_another() -> None:
    await fetched(World(a=Peer(HELD, is_wrong=True), b=Peer(HELD)))


async def test_a_holder_that_sent_wrong_bytes_twice_is_banned() -> None:
    world = World(a=Peer(HELD, is_wrong=True))
    downloader = Downloader(world, world, MODEL, patience_s=0.1)
    for _ in range(2):
        with pytest.raises(Unreachable):
            await fetch(downloader)
    assert world.manifests["a"] == 2


async def test_an_invalid_manifest_is_each_holders_failure_and_not_the_servers() -> None:
    body = json.dumps([1, "float32", [[0, 0, 8, 10**400]], []]).encode()
    digest = hashlib.sha256(body).hexdigest()

    class Crafted(World):
        async def page(self, address: str, path: str, most_bytes: int) -> bytes | TransferFailure:
            self.manifests[address] += 1
            return body

    world = Crafted(a=Peer(HELD), b=Peer(HELD))
    for peer in world.peers.values():
        peer.held[digest] = HELD
    with pytest.raises(Unreachable, match="none sends its bytes"):
        await Downloader(world, world, MODEL, patience_s=0.0).fetch(digest, aligned_bytes(1))
    assert world.manifests.keys() == {"a", "b"}


async def test_a_ban_ends_after_a_minute() -> None:
    now_s = 0.0
    wrong = Peer(HELD, is_wrong=True)
    world = World(a=wrong)
    downloader = Downloader(world, world, MODEL, now=lambda: now_s, patience_s=0.0)
    with pytest.raises(Unreachable):
        await fetch(downloader)
    wrong.is_wrong, now_s = False, 61.0
    await fetch(downloader)


async def test_a_busy_holder_is_waited_for() -> None:
    await fetched(World(a=Peer(HELD, busy_times=4)))


async def test_a_holder_that_appears_during_the_wait_is_used() -> None:
    world = World()
    asyncio.get_running_loop().call_later(0.05, world.peers.update, {"late": Peer(HELD)})
    await fetched(world)


@pytest.mark.parametrize("names", [(), ("a",), ("a", "b")])
async def test_a_download_without_a_holder_that_sends_fails_and_is_counted(names: tuple[str, ...]) -> None:
    world = World(**{name: Peer(HELD, is_dead=True) for name in names})
    downloader = Downloader(world, world, MODEL, patience_s=0.1)
    with pytest.raises(Unreachable, match="cannot be downloaded now") as caught:
        await fetch(downloader)
    assert caught.value.status == 503
    assert (downloader.counts.fetched, downloader.counts.failed, downloader.in_progress) == (0, 1, 0)


async def test_the_bytes_in_progress_of_all_downloads_are_bounded() -> None:
    held = [image(rank=64, seed=seed) for seed in range(6)]
    world = World(**{f"{index}-{copy}": Peer(one) for index, one in enumerate(held) for copy in range(3)})
    downloader = Downloader(world, world, MODEL)
    await asyncio.gather(*(fetch(downloader, one) for one in held))
    assert world.most_in_progress <= 8 * 4 * (1 << 20)
    assert downloader.counts.fetched == 6


async def test_an_adapter_larger_than_registered_is_refused_before_its_bytes_are_requested() -> None:
    world = World(a=Peer(HELD))
    with pytest.raises(AdapterRejected, match="more than was registered"):
        await Downloader(world, world, MODEL).fetch(HELD.spec.digest, aligned_bytes(HELD.spec.num_bytes - 1))
    assert world.peers["a"].given == []
