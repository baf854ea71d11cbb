"""Keys of KV blocks: equal only where everything that the block depends on is equal."""

from hypothesis import given
from hypothesis import strategies as st

from caraserve.kv.block_pool import next_key, root_key

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
