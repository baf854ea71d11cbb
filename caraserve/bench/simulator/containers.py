"""Heaps, linked lists and pools of slots in arrays, for compiled code.

A heap is an array of keys and one of items, whose first `count` pairs are in use; each pair is in it once.

Linked lists are an int32 array `[items + 1, lists, 2]` of the items before and after each item in each list. The row of
item -1, which is the last one, has the last and the first item of each list, so the ends need no code of their own.

A pool is an int64 array of slots. Its first element is the number of slots in use; those that follow so many are free.
Slot 0 is never used.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any

import numpy as np

from caraserve.bench.simulator.compiled import kernel

_BEFORE, _AFTER = 0, 1
_ALONE = -2  # after an item that is not in the list


@kernel
def heap_push(keys, items, count, key, item):
    """Adds a pair to a heap of `count` pairs."""
    at = count
    while at > 0:
        above = (at - 1) >> 1
        if keys[above] < key or (keys[above] == key and items[above] < item):
            break
        keys[at], items[at] = keys[above], items[above]
        at = above
    keys[at], items[at] = key, item


@kernel
def heap_pop(keys, items, count):
    """Removes the least pair from a heap of `count` pairs."""
    last = count - 1
    key, item = keys[last], items[last]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= last:
            break
        right = below + 1
        if right < last and (keys[right] < keys[below] or (keys[right] == keys[below] and items[right] < items[below])):
            below = right
        if key < keys[below] or (key == keys[below] and item < items[below]):
            break
        keys[at], items[at] = keys[below], items[below]
        at = below
    keys[at], items[at] = key, item


# --- linked lists ---


def make_lists(lists: int, items: int) -> Any:
    """Returns empty lists of items 0 to `items` - 1."""
    links = np.full((items + 1, lists, 2), _ALONE, np.int32)
    links[-1] = -1
    return links


@kernel
def contains(links, which, item):
    """Whether an item is in a list."""
    return links[item, which, _AFTER] != _ALONE


@kernel
def following(links, which, item):
    """Returns the item after one in a list; after item -1 the first one. Returns -1 after the last one."""
    return links[item, which, _AFTER]


@kernel
def append(links, which, item):
    """Adds an item to the end of a list, unless the list contains it."""
    if not contains(links, which, item):
        last = links[-1, which, _BEFORE]
        links[item, which, _BEFORE], links[item, which, _AFTER] = last, -1
        links[last, which, _AFTER] = links[-1, which, _BEFORE] = item


@kernel
def unlink(links, which, item):
    """Removes an item from a list. Returns False if the list does not contain it."""
    found = contains(links, which, item)
    if found:
        before, after = links[item, which, _BEFORE], links[item, which, _AFTER]
        links[before, which, _AFTER], links[after, which, _BEFORE] = after, before
        links[item, which, _AFTER] = _ALONE
    return found


# --- pools ---


def make_pool(slots: int) -> Any:
    """Returns a pool of free slots 1 to `slots`."""
    pool = np.arange(slots + 1)
    pool[0] = 0
    return pool


def larger_pool(pool: Any) -> Any:
    """Returns a pool with free slots added, so that its array has twice the length."""
    return np.concatenate([pool, np.arange(len(pool), 2 * len(pool))])


@kernel
def has_slot(pool):
    """Whether a slot is free."""
    return pool[0] + 1 < pool.size


@kernel
def take_slot(pool):
    """Returns a free slot, which is then in use."""
    pool[0] += 1
    return pool[pool[0]]


@kernel
def free_slot(pool, slot):
    """Returns a slot to the pool."""
    pool[pool[0]] = slot
    pool[0] -= 1
