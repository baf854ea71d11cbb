"""The pool of KV blocks: each is accounted for, published ones are reused, the least recently used is overwritten."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.kv.block_pool import BlockPool, next_key, root_key


def test_take_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.take(5) is None
    assert pool.available == 4
    assert len(set(pool.take(4) or [])) == 4
    assert pool.take(1) is None


def test_a_published_block_is_found_after_its_owner_has_left() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1) or []
    pool.publish(block, b"key")
    pool.release([block])
    assert pool.available == 2
    assert pool.find(b"key") == block
    assert pool.available == 1


def test_a_forgotten_block_is_not_found_any_more_and_stays_with_its_holders() -> None:
    pool = BlockPool(3)
    lost, kept, unpublished = pool.take(3) or []
    pool.publish(lost, b"lost")
    pool.publish(kept, b"kept")
    pool.forget([lost, unpublished])
    pool.check([[lost, kept, unpublished]])
    assert (pool.find(b"lost"), pool.find(b"kept")) == (None, kept)
    pool.release([lost, kept, kept, unpublished])
    pool.check([])


def test_a_shared_block_is_free_only_when_the_last_holder_leaves() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1) or []
    pool.publish(block, b"key")
    assert pool.find(b"key") == block
    pool.release([block])
    assert pool.take(1) is None
    pool.release([block])
    assert pool.take(1) == [block]


def test_the_least_recently_released_block_and_the_end_of_a_prefix_are_overwritten_first() -> None:
    pool = BlockPool(3)
    first, second, third = pool.take(3) or []
    for block, key in ((first, b"1"), (second, b"2"), (third, b"3")):
        pool.publish(block, key)
    pool.release([first, second, third])
    assert pool.take(1) == [third]
    assert pool.find(b"3") is None
    assert pool.find(b"1") == first


def test_forgetting_all_leaves_owned_blocks_owned() -> None:
    pool = BlockPool(3)
    kept, left = pool.take(2) or []
    pool.publish(kept, b"kept")
    pool.publish(left, b"left")
    pool.release([left])
    pool.forget_all()
    assert pool.find(b"kept") is None
    assert pool.find(b"left") is None
    pool.check([[kept]])


def test_check_notices_a_block_without_an_owner() -> None:
    pool = BlockPool(2)
    pool.take(1)
    with pytest.raises(AssertionError):
        pool.check([])


# --- keys ---

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=16)


def test_a_root_depends_on_adapter_and_salt_and_their_boundary() -> None:
    roots = [root_key(*pair) for pair in ((None, ""), ("ab", ""), ("a", "b"), ("", "ab"), (None, "a"), ("ab", "ab"))]
    assert len(set(roots)) == len(roots)


@given(first=TOKENS, second=TOKENS)
def test_keys_are_equal_exactly_when_tokens_are(first: list[int], second: list[int]) -> None:
    root = root_key("adapter", "")
    assert (next_key(root, first) == next_key(root, second)) == (first == second)


@given(first=TOKENS, second=TOKENS)
def test_a_key_depends_on_all_blocks_before(first: list[int], second: list[int]) -> None:
    last = [1, 2, 3]
    keys = [next_key(next_key(root_key(None, ""), tokens), last) for tokens in (first, second)]
    assert (keys[0] == keys[1]) == (first == second)
