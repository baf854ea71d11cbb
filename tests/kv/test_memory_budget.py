"""The budget of memory that KV blocks and adapters share: which of them get it when, and that no byte counts twice."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from caraserve.core.backend import Limits, SharedMemory
from caraserve.kv.block_pool import BlockPool
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.util.units import align_up

BLOCK, GRANULE, LEAST = 30, 40, 4


def limits(blocks: int, memory: SharedMemory | None) -> Limits:
    return Limits(
        num_blocks=blocks,
        block_tokens=16,
        num_slots=4,
        adapter_slots=9,
        max_step_tokens=64,
        max_context=LEAST * 16,
        shared=memory,
        embedding_size=1,
    )


def room(blocks: int, *, num_bytes: int = 1000, cap: int = 1000, least: int = LEAST) -> MemoryBudget:
    return MemoryBudget(limits(blocks, SharedMemory(num_bytes, BLOCK, GRANULE, cap, least)), 0)


def test_a_pool_that_grows_hands_out_the_new_blocks_last() -> None:
    pool = BlockPool(2)
    pool.resize(4)
    assert pool.take(4) == [0, 1, 2, 3]


def test_low_block_numbers_are_handed_out_first_in_any_order_of_release() -> None:
    pool = BlockPool(5)
    taken = pool.take(5) or []
    pool.release([taken[3]])
    pool.release([taken[1]])
    pool.release([taken[4]])
    assert pool.take(2) == [1, 3]


def test_a_pool_shrinks_down_to_the_highest_block_that_is_held() -> None:
    pool = BlockPool(6)
    first, second = pool.take(2) or [], pool.take(2) or []
    pool.release(first)
    assert pool.held_end == 4
    with pytest.raises(AssertionError, match="a request holds block 3"):
        pool.resize(3)
    pool.resize(4)
    assert (pool.num_blocks, pool.available) == (4, 2)
    pool.release(second)
    assert pool.held_end == 0


def test_contents_of_removed_blocks_are_not_found_again_even_if_the_pool_grows() -> None:
    pool = BlockPool(3)
    low, high = pool.take(2) or []
    pool.publish(low, b"low")
    pool.publish(high, b"high")
    pool.release([low, high])
    pool.resize(1)
    pool.resize(3)
    assert pool.find(b"high") is None
    assert pool.find(b"low") == low
    pool.check([[low]])


def test_without_shared_memory_adapters_take_no_blocks() -> None:
    own = MemoryBudget(limits(10, None), 100)
    assert own.excess(100) == 0
    assert not own.add_adapter(100)
    assert (own.excess(30), own.most_adapter_bytes, own.most_blocks, own.pool.num_blocks) == (30, 100, 10, 10)


def test_kv_gives_up_no_more_than_an_adapter_needs() -> None:
    memory = room(30)  # 900 bytes, in whole granules 920 of 1000
    assert memory.add_adapter(100)  # takes 120
    assert memory.pool.num_blocks == 880 // BLOCK


def test_an_adapter_that_finds_free_memory_takes_no_block() -> None:
    memory = room(20)
    assert not memory.add_adapter(400)
    assert memory.pool.num_blocks == 20


def test_blocks_that_requests_hold_stay() -> None:
    memory = room(30)
    memory.pool.take(20)  # 600 bytes
    assert memory.excess(500) == 600 + 520 - 1000
    assert memory.excess(400) == 0


def test_the_least_number_of_blocks_stays_even_if_none_is_held() -> None:
    memory = room(30)
    assert memory.most_adapter_bytes == 1000 - 120
    assert memory.excess(900) == 120 + 920 - 1000
    memory.add_adapter(880)
    assert memory.pool.num_blocks == LEAST


def test_adapters_stay_within_their_limit_even_if_there_is_more_memory() -> None:
    memory = room(0, cap=250)
    memory.add_adapter(200)
    assert memory.most_adapter_bytes == 240
    assert memory.excess(80) == memory.over_cap(80) == 30


def test_blocks_that_the_backend_makes_room_for_count_but_cannot_be_taken_yet() -> None:
    memory = room(10)
    memory.grow(20)
    assert (memory.is_growing, memory.pool.num_blocks) == (True, 10)
    assert memory.excess(500) == 600 + 520 - 1000
    memory.grown()
    assert (memory.is_growing, memory.pool.num_blocks) == (False, 20)
    assert memory.excess(500) == 0


def test_blocks_that_running_requests_wait_for_are_not_given_to_adapters() -> None:
    memory = room(10)
    memory.set_lacking_blocks(10)
    memory.grow(20)
    memory.grown()
    assert memory.excess(500) == 600 + 520 - 1000
    memory.set_lacking_blocks(0)
    assert memory.excess(500) == 0


def test_kv_grows_only_into_memory_that_adapters_do_not_take() -> None:
    memory = room(10)
    memory.add_adapter(400)
    assert memory.blocks_without(0) == 20
    assert memory.blocks_without(400) == 33
    assert memory.excess_for_blocks(30) == 320
    with pytest.raises(AssertionError, match="cannot grow to 30"):
        memory.grow(30)


def test_the_least_number_of_blocks_must_hold_a_request_of_full_context() -> None:
    with pytest.raises(AssertionError, match="full context"):
        room(10, least=LEAST - 1)


class Accounts(RuleBasedStateMachine):
    """Requests and adapters start and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.room = room(12, num_bytes=920, cap=600)
        self.held: list[list[int]] = []
        self.adapters: list[int] = []

    @rule(count=st.integers(1, 9))
    def take(self, count: int) -> None:
        blocks = self.room.pool.take(count)
        if blocks is not None:
            assert max(blocks) < self.room.pool.num_blocks
            self.held.append(blocks)
            for block in blocks:
                self.room.pool.publish(block, bytes([block]))

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def release(self, data: Any) -> None:
        self.room.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(block=st.integers(0, 31))
    def find(self, block: int) -> None:
        if self.room.pool.find(bytes([block])) is not None:
            self.held.append([block])

    @rule(num_bytes=st.integers(1, 400))
    def add(self, num_bytes: int) -> None:
        before = self.room.pool.num_blocks
        if self.room.excess(num_bytes) == 0:
            shrunk = self.room.add_adapter(num_bytes)
            self.adapters.append(num_bytes)
            assert shrunk == (self.room.pool.num_blocks < before)

    @rule(data=st.data())
    @precondition(lambda self: self.adapters)
    def remove(self, data: Any) -> None:
        self.room.remove_adapter(self.adapters.pop(data.draw(st.integers(0, len(self.adapters) - 1))))

    @rule(more=st.integers(1, 20))
    @precondition(lambda self: not self.room.is_growing)
    def grow(self, more: int) -> None:
        blocks = self.room.pool.num_blocks + more
        if self.room.excess_for_blocks(blocks) == 0:
            assert blocks <= self.room.blocks_without(0)
            self.room.grow(blocks)

    @rule()
    @precondition(lambda self: self.room.is_growing)
    def grown(self) -> None:
        self.room.grown()

    @invariant()
    def sums_add_up(self) -> None:
        self.room.check()
        self.room.pool.check(self.held)
        taken = sum(align_up(num_bytes, GRANULE) for num_bytes in self.adapters)
        assert self.room.adapter_bytes == taken <= 600
        assert align_up(self.room.pool.num_blocks * BLOCK, GRANULE) + taken <= 920

    @invariant()
    def an_empty_device_has_room_for_one_request_of_full_context(self) -> None:
        if not self.held and not self.room.is_growing:
            assert self.room.blocks_without(0) >= LEAST


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=40)
