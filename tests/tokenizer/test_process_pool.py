"""Processes that compute for many clients: whose turn it is, what is refused, and what a lost process costs others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from caraserve.core.tenant import Tenant
from caraserve.errors import Displaced, Overloaded, ServerBusy
from caraserve.tokenizer.process_pool import JobOwner, PoolLimits, ProcessPool

LIMITS = PoolLimits(processes=3, waiting=20, of_client=12, of_user=6)
ONE = PoolLimits(processes=1, waiting=100, of_client=100, of_user=100)


def owner(client: str = "client", user: str = "", adapter: str = "", weight: float = 1.0) -> JobOwner:
    return JobOwner(Tenant(client, user, weight), adapter)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass(eq=False)
class FakeProcess:
    is_usable: bool = True
    is_closed: bool = False

    async def close(self) -> None:
        self.is_closed = True


@dataclass
class PoolHarness:
    """A pool whose processes, clock and jobs the test controls."""

    limits: PoolLimits
    now_s: float = 0.0
    processes: list[FakeProcess] = field(default_factory=list)
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    start_fails: bool = False
    began: list[str] = field(default_factory=list)  # jobs, in order
    running: dict[str, tuple[FakeProcess, asyncio.Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.may_start.set()
        self.pool: ProcessPool[FakeProcess] = ProcessPool(self.start, self.limits, "things", lambda: self.now_s)

    async def start(self) -> FakeProcess:
        await self.may_start.wait()
        if self.start_fails:
            raise OSError("no more processes")
        self.processes.append(FakeProcess())
        return self.processes[-1]

    async def submit(self, name: str, of: JobOwner, num_bytes: int = 0) -> "asyncio.Task[str]":
        async def work(process: FakeProcess) -> str:
            assert process.is_usable
            assert not process.is_closed
            self.began.append(name)
            self.running[name] = process, asyncio.Event()
            await self.running[name][1].wait()
            return f"{name} done"

        task = asyncio.create_task(self.pool.run(of, num_bytes, work))
        await settle()
        return task

    async def end(self, name: str, took_s: float = 1.0, *, kills: bool = False) -> None:
        process, is_over = self.running.pop(name)
        self.now_s += took_s
        process.is_usable = not kills
        is_over.set()
        await settle()

    async def end_all(self) -> None:
        while self.running:
            await self.end(next(iter(self.running)))


@asynccontextmanager
async def harness(limits: PoolLimits = LIMITS) -> AsyncIterator[PoolHarness]:
    made = PoolHarness(limits)
    try:
        yield made
    finally:
        await made.pool.close()
        assert all(process.is_closed or not process.is_usable for process in made.processes)


@pytest.fixture
def there() -> AbstractAsyncContextManager[PoolHarness]:
    return harness()


async def test_a_client_with_many_jobs_does_not_delay_another_one(there: PoolHarness) -> None:
    for number in range(6):
        await there.submit(f"greedy {number}", owner("greedy"))
    modest = await there.submit("modest", owner("modest"))
    assert there.began == ["greedy 0", "modest"]
    await there.end("modest")
    assert await modest == "modest done"


@pytest.mark.parametrize(
    "other", [owner(user="another"), owner(adapter="nice"), owner("another"), owner("another", adapter="evil")]
)
async def test_a_user_has_one_process_for_an_adapter_and_others_do_not_wait_for_it(other: JobOwner) -> None:
    async with harness() as there:
        for number in range(3):
            await there.submit(f"evil {number}", owner(adapter="evil"))
        await there.submit("other", other)
        assert there.began == ["evil 0", "other"]
        await there.end("evil 0")
        assert there.began == ["evil 0", "other", "evil 1"]


@pytest.mark.parametrize(
    ("many", "other"),
    [
        ([owner("greedy", f"user {number}") for number in range(6)], owner("modest")),
        ([owner(f"client {number}", adapter="evil") for number in range(6)], owner("client 0", adapter="nice")),
    ],
)
async def test_no_client_and_no_adapter_has_all_processes(many: list[JobOwner], other: JobOwner) -> None:
    async with harness() as there:
        for number, one in enumerate(many):
            await there.submit(f"many {number}", one)
        assert there.began == ["many 0", "many 1"]
        await there.submit("other", other)
        assert there.began == ["many 0", "many 1", "other"]


async def test_a_single_client_starts_no_more_processes_than_it_uses(there: PoolHarness) -> None:
    for number in range(5):
        await there.submit(f"job {number}", owner())
    await there.end_all()
    assert len(there.began) == 5
    assert len(there.processes) == 1


async def test_clients_get_equal_time_and_those_of_twice_the_weight_twice_as_much() -> None:
    async with harness(ONE) as there:
        for number in range(30):
            await there.submit(f"slow {number}", owner("slow"))
            await there.submit(f"quick {number}", owner("quick"))
            await there.submit(f"heavy {number}", owner("heavy", weight=2.0))
        got_s = {"slow": 0.0, "quick": 0.0, "heavy": 0.0}
        for _ in range(30):
            (name,) = there.running
            client = name.partition(" ")[0]
            took_s = 3.0 if client == "slow" else 1.0
            got_s[client] += took_s
            await there.end(name, took_s)
        assert got_s["slow"] == pytest.approx(got_s["quick"], abs=3.0)
        assert got_s["heavy"] == pytest.approx(2 * got_s["quick"], abs=6.0)


async def test_small_jobs_of_a_queue_go_before_large_ones_that_have_not_waited_long() -> None:
    async with harness(ONE) as there:
        await there.submit("first", owner())
        await there.submit("large", owner(), 1_000_000)
        await there.submit("small", owner(), 100)
        there.now_s += 60
        await there.submit("later", owner(), 100)
        await there.end_all()
        assert there.began == ["first", "small", "large", "later"]


@pytest.mark.parametrize(
    ("owners", "refused", "count", "kind"),
    [
        ([owner()] * 7, owner(), 6, "user"),
        ([owner(user=str(number // 6)) for number in range(14)], owner(user="new"), 12, "client"),
    ],
)
async def test_a_client_and_a_user_may_have_so_many_jobs_that_wait(
    owners: list[JobOwner], refused: JobOwner, count: int, kind: str, there: PoolHarness
) -> None:
    for number, one in enumerate(owners):
        await there.submit(f"job {number}", one)
    assert there.pool.num_waiting == count
    with pytest.raises(Overloaded, match=f"{count} requests of this {kind} wait for things") as caught:
        await there.pool.run(refused, 0, lambda process: asyncio.sleep(0))
    assert caught.value.retry_after_s >= 1.0
    await there.submit("other", owner("other"))
    assert there.began[-1] == "other"
    await there.end("job 0")
    assert not (await there.submit("fits", refused)).done()


async def test_retry_after_is_the_time_that_the_jobs_before_take() -> None:
    async with harness(ONE) as there:
        for number in range(60):
            await there.submit(f"job {number}", owner())
        for number in range(40):
            await there.end(f"job {number}", took_s=0.5)
        for number in range(60, 141):
            await there.submit(f"job {number}", owner())
        with pytest.raises(Overloaded) as caught:
            there.pool.check_room(owner())
        assert caught.value.retry_after_s == pytest.approx(50.0, rel=0.05)


async def test_in_a_full_queue_the_client_with_the_most_jobs_loses_one_for_a_client_with_fewer() -> None:
    async with harness() as there:
        jobs = [await there.submit(f"{number}", owner("abc"[number % 3], str(number // 9))) for number in range(22)]
        assert there.pool.num_waiting == 19
        await there.submit("d 0", owner("d"))
        assert there.pool.num_waiting == 20
        await there.submit("d 1", owner("d"))
        assert there.pool.num_waiting == 20
        (displaced,) = [job for job in jobs if job.done()]
        with pytest.raises(Displaced):
            await displaced


async def test_one_clients_jobs_for_an_adapter_do_not_refuse_those_of_another_client(there: PoolHarness) -> None:
    many = [owner(client, user, "shared") for client in "ab" for user in "xy" for _ in range(6)][:21]
    greedy = [await there.submit(f"greedy {number}", one) for number, one in enumerate(many)]
    assert there.pool.num_waiting == 19
    modest = [await there.submit(f"modest {number}", owner("modest", adapter="shared")) for number in range(2)]
    assert there.pool.num_waiting == 20
    (displaced,) = [job for job in greedy if job.done()]
    with pytest.raises(Displaced):
        await displaced
    assert not any(job.done() for job in modest)
    for _ in range(3):
        await there.end(next(iter(there.running)))
    assert "modest 0" in there.began


async def test_a_job_that_waits_is_dropped_with_its_client_and_one_that_runs_goes_on(there: PoolHarness) -> None:
    jobs = [await there.submit(f"job {number}", owner()) for number in range(3)]
    jobs[0].cancel()
    jobs[1].cancel()
    await settle()
    assert there.pool.num_waiting == 1
    await there.end("job 0")
    assert there.began == ["job 0", "job 2"]
    assert [process.is_closed for process in there.processes] == [False]


async def test_a_lost_process_is_started_again_while_the_place_of_its_job_is_taken(there: PoolHarness) -> None:
    evil = await there.submit("evil 0", owner(adapter="evil"))
    await there.submit("evil 1", owner(adapter="evil"))
    await there.submit("nice 0", owner(adapter="nice"))
    there.may_start.clear()
    await there.end("evil 0", kills=True)
    assert await evil == "evil 0 done"  # the answer does not wait for the process
    await there.end("nice 0")
    await there.submit("nice 1", owner(adapter="nice"))
    assert there.began == ["evil 0", "nice 0", "nice 1"]  # not evil 1, which would end another process
    there.may_start.set()
    await settle()
    assert there.began[-1] == "evil 1"
    assert there.processes[0].is_closed


async def test_an_error_of_a_job_is_that_of_its_caller(there: PoolHarness) -> None:
    async def fail(process: FakeProcess) -> None:
        raise ConnectionError("it died")

    with pytest.raises(ConnectionError, match="it died"):
        await there.pool.run(owner(), 0, fail)
    await there.submit("next", owner())
    assert there.began == ["next"]


async def test_jobs_fail_where_no_process_can_be_started_and_the_next_ones_try_again(there: PoolHarness) -> None:
    there.start_fails = True
    jobs = [await there.submit(f"job {number}", owner()) for number in range(2)]
    for job in jobs:
        with pytest.raises(ServerBusy, match="cannot be started"):
            await job
    there.start_fails = False
    await there.submit("next", owner())
    assert there.began == ["next"]
    there.start_fails = True
    await there.submit("other", owner("other"))
    assert there.began == ["next"]
    await there.end("next")
    assert there.began == ["next", "other"]


async def test_a_process_that_died_while_it_was_idle_is_replaced(there: PoolHarness) -> None:
    await there.submit("first", owner())
    await there.end("first")
    there.processes[0].is_usable = False
    await there.submit("next", owner())
    assert there.began == ["first", "next"]
    assert len(there.processes) == 2


async def test_processes_that_were_idle_for_long_end_but_one() -> None:
    async with harness(PoolLimits(3, 20, 12, 6, idle_s=0.0)) as there:
        for user in "abc":
            await there.submit(user, owner(user, user))
        await there.end_all()
        await there.pool._tasks.end()
        assert [process.is_closed for process in there.processes].count(False) == 1


async def test_closing_cancels_what_runs_and_waits_and_the_pool_may_be_used_again(there: PoolHarness) -> None:
    jobs = [await there.submit(f"job {number}", owner()) for number in range(3)]
    await there.pool.close()
    for job in jobs:
        with pytest.raises(asyncio.CancelledError):
            await job
    assert (there.pool.num_waiting, there.pool.num_processes) == (0, 0)
    await there.submit("next", owner())
    assert there.began == ["job 0", "next"]
