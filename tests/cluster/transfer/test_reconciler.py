"""Moving towards the plan: planned adapters are downloaded, and others deleted once their instances have them."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial

from caraserve.cluster.routing.placement_plan import PlacementPlan, Share
from caraserve.cluster.transfer.reconciler import ByteBucket, MigrationLimits, Reconciler, is_elsewhere
from tests.cluster.nodes import until
from tests.cluster.pools import Pools

CLASSES = {"a": 8, "b": 8, "c": 8}


def plan(epoch: int, **where: str) -> PlacementPlan:
    """Returns a plan. `poet="bc"`: equal shares of poet on b and c."""
    shares = {name: tuple(Share(one, 1 / len(names)) for one in names) for name, names in where.items()}
    return PlacementPlan.made(epoch, shares, CLASSES)


class Plans(list[PlacementPlan]):
    """Plans, of which all members move towards the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: Counter[str] = Counter()

    def last(self, name: str) -> PlacementPlan | None:
        """Returns the last plan, and counts the calls of each member."""
        self.looks[name] += 1
        return self[-1] if self else None

    async def several_turns(self, name: str) -> None:
        """Waits for five more turns of one member's reconciler."""
        seen = self.looks[name]
        await until(lambda: self.looks[name] > seen + 5)


def _hastily() -> float:
    """Returns a clock by which failed moves are soon tried again."""
    return 100 * time.monotonic()


@contextlib.asynccontextmanager
async def mended(
    fleet: Pools, limits: MigrationLimits | None = None, now: Callable[[], float] = _hastily
) -> AsyncIterator[Plans]:
    """Runs a reconciler for each member; all move towards the last of the yielded plans."""
    plans = Plans()
    tasks = [
        asyncio.create_task(Reconciler(one.member, one.pool, limits, now, turn_s=0.05).run(partial(plans.last, name)))
        for name, one in fleet.running.items()
    ]
    try:
        yield plans
    finally:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in done), done


async def test_adapters_are_moved_to_where_the_plan_places_them(fleet: Pools) -> None:
    (a, b, c), digest = await fleet.loaded("a", "b", "c")
    async with mended(fleet) as plans:
        plans.append(plan(1, poet="ab"))
        await until(lambda: set(a.member.holders(digest)) == {"a", "b"})
        plans.append(plan(2, poet="ac"))
        await until(lambda: set(a.member.holders(digest)) == {"a", "c"})
        assert (digest in b.stored, digest in c.stored) == (False, True)
        plans.append(plan(3, poet="bc"))
        await until(lambda: set(a.member.holders(digest)) == {"a", "b", "c"})  # a's folder is its user's


async def test_an_adapter_is_kept_until_all_its_planned_instances_have_it(fleet: Pools) -> None:
    (a, b), digest = await fleet.sharing("a", "b")
    async with mended(fleet) as plans:
        plans.append(plan(1, poet="c"))  # which is not there
        await fleet.load(a, "chef", 2)
        plans.append(plan(2, poet="c", chef="b"))
        chef = b.catalog.get("chef").digest
        await until(lambda: chef in b.stored)  # several turns
        assert digest in b.stored


def test_background_moves_keep_to_their_rate() -> None:
    bucket = ByteBucket(MigrationLimits(bytes_per_s=100.0, burst_bytes=200.0))
    taken = sum(bucket.take(100, tenth / 10) for tenth in range(101) for _ in range(9))
    assert 11 <= taken <= 13  # 200 bytes at once, 100 a second after that, the last on credit


def test_an_idle_hour_adds_no_more_credit_than_the_burst() -> None:
    bucket = ByteBucket(MigrationLimits(bytes_per_s=100.0, burst_bytes=200.0))
    assert [bucket.take(100, 3600.0) for _ in range(3)] == [True, True, False]


def test_an_adapter_larger_than_the_burst_still_moves() -> None:
    bucket = ByteBucket(MigrationLimits(bytes_per_s=100.0, burst_bytes=10.0))
    assert [bucket.take(1000, now_s) for now_s in (0.0, 9.0, 10.0)] == [True, False, True]


def test_an_adapter_is_elsewhere_only_when_all_its_planned_instances_have_it() -> None:
    held = plan(1, poet="xy", mine="m")
    assert is_elsewhere(held, "poet", "m", {"x", "y", "m"})
    assert not is_elsewhere(held, "poet", "m", {"x", "m"})
    assert not is_elsewhere(held, "mine", "m", {"x", "m"})
    assert not is_elsewhere(held, "newer than the plan", "m", {"x"})


async def test_moves_keep_to_their_rate(fleet: Pools) -> None:
    a, b = await fleet.start("a"), await fleet.start("b")
    digests = [await fleet.load(a, f"n{index}", index) for index in range(4)]
    now_s = 0.0
    limits = MigrationLimits(bytes_per_s=1.0, burst_bytes=1.0, concurrent=2)
    async with mended(fleet, limits, lambda: now_s) as plans:
        plans.append(plan(1, **{f"n{index}": "b" for index in range(4)}))
        for count in (1, 2):
            await until(lambda count=count: len(b.stored.digests()) == count)
            await plans.several_turns("b")
            assert len(b.stored.digests()) == count
            now_s += b.catalog.get("n0").num_bytes
        assert set(b.stored.digests()) < set(digests)


async def test_planned_adapters_are_not_deleted_to_make_room_on_a_full_disk(fleet: Pools) -> None:
    a, b = await fleet.start("a"), await fleet.start("b", most_bytes=13_000)
    poet, _ = await fleet.load(a, "poet", 1), await fleet.load(a, "chef", 2)
    async with mended(fleet) as plans:
        plans.append(plan(1, poet="b", chef="a"))
        await until(lambda: poet in b.stored)
        await b.want("chef")
        await until(lambda: b.pool.store.cache_full == 1)
        assert poet in b.stored


async def test_moves_evict_nothing_from_the_host_cache(fleet: Pools) -> None:
    (a,), _ = await fleet.loaded("a")
    num_bytes = (await a.want("poet")).data.nbytes
    b = await fleet.start("b", host_bytes=num_bytes)
    await until(lambda: b.knows("poet"))
    await b.want("poet")
    digest = await fleet.load(a, "chef", 2)
    async with mended(fleet) as plans:
        plans.append(plan(1, chef="b"))
        await until(lambda: digest in b.stored)
    assert b.manager.image(b.catalog.get("poet").digest) is not None
    assert b.manager.image(digest) is None


async def test_a_move_that_fails_by_a_defect_is_counted_and_other_moves_continue(fleet: Pools) -> None:
    a, b = await fleet.start("a"), await fleet.start("b")
    poet, chef = await fleet.load(a, "poet", 1), await fleet.load(a, "chef", 2)
    store_planned = b.pool.store_planned

    async def trips(name: str) -> bool:
        if name == "chef":
            raise RuntimeError("a defect")
        return await store_planned(name)

    b.pool.store_planned = trips  # type: ignore[method-assign]
    reconciler = Reconciler(b.member, b.pool, turn_s=0.05)
    held = plan(1, chef="b", poet="b")
    task = asyncio.create_task(reconciler.run(lambda: held))
    await until(lambda: poet in b.stored and reconciler.failed == 1)
    assert chef not in b.stored
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
