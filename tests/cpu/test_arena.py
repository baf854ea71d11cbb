"""The allocator of the host cache: each byte has one owner, and free neighbours are joined."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from caraserve.core.lora_layout import ALIGN_BYTES, aligned_bytes
from caraserve.cpu.shared_memory import PAGE_BYTES, Arena, SharedRegion

ROOM = 32 * ALIGN_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8 * ALIGN_BYTES)), max_size=60))
def test_in_any_order_of_allocations_each_byte_has_one_owner(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(aligned_bytes(ROOM))
    held: list[tuple[np.ndarray, int]] = []  # type: ignore[type-arg]
    for mark, (takes, amount) in enumerate(steps):
        if takes:
            extent = arena.allocate(amount)
            if extent is None:
                continue
            assert extent.nbytes == amount
            assert extent.ctypes.data % ALIGN_BYTES == 0
            extent[:] = mark
            held.append((extent, mark))
        elif held:
            arena.free(held.pop(amount % len(held))[0])
        arena.check()
        assert all((extent == mark % 256).all() for extent, mark in held), "an extent was overwritten"
    for extent, _ in held:
        arena.free(extent)
    arena.check()
    assert arena.used_bytes == 0
    assert arena.allocate(ROOM) is not None, "what was given back is not one piece"


def test_a_full_arena_returns_none() -> None:
    arena = Arena(aligned_bytes(ROOM))
    assert arena.allocate(ROOM) is not None
    assert arena.allocate(1) is None


def test_separate_free_extents_are_not_combined() -> None:
    arena = Arena(aligned_bytes(3 * ALIGN_BYTES))
    extents = [arena.allocate(ALIGN_BYTES) for _ in range(3)]
    for extent in (extents[0], extents[2]):
        assert extent is not None
        arena.free(extent)
    assert arena.allocate(2 * ALIGN_BYTES) is None


def test_the_smallest_free_extent_that_fits_is_used() -> None:
    arena = Arena(aligned_bytes(8 * ALIGN_BYTES))
    small, _, _ = arena.allocate(ALIGN_BYTES), arena.allocate(ALIGN_BYTES), arena.allocate(2 * ALIGN_BYTES)
    assert small is not None
    arena.free(small)
    again = arena.allocate(ALIGN_BYTES)
    assert again is not None
    assert again.ctypes.data == small.ctypes.data


def test_two_mappings_of_a_region_share_its_bytes() -> None:
    region = SharedRegion(3 * PAGE_BYTES)
    other = SharedRegion(region.num_bytes, fd=region.fd)
    region.carve(10)
    piece = region.carve(10)
    piece[:] = 7
    offset = region.offset(int(piece.ctypes.data))
    assert offset == PAGE_BYTES
    assert (other.bytes[offset : offset + 10] == 7).all()
    region.close()
