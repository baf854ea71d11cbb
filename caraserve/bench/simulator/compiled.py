"""The simulator's arrays, how its code is compiled, and heaps, linked lists and pools of slots in arrays.

The state of a fleet is NumPy arrays of records, which compiled code changes in place. Records have fixed capacities, so
that code is compiled once for all fleets. Times are whole nanoseconds.
"""

# mypy: disable-error-code="no-untyped-def"

import hashlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from caraserve.cluster.routing import cost, perf_model, policy_rules, router
from caraserve.cluster.routing.cost import Backlog, LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cpu import jit

# mypy: disable-error-code="no-untyped-def"


MS = 1_000_000  # nanoseconds
FOREVER = 1 << 62
MAX_RUNNING = 256  # requests in the batch of an instance
MAX_QUEUE = 1024  # requests that wait at an instance
MAX_RANKS = 64  # different ranks in a workload
MAX_ATTEMPTS = 8  # targets of one request; `policy_rules.next_step` has at most 6

_FORMULA = (  # all functions of the server that compiled code calls
    *(cost.cold_ms, cost.total_cost, cost.cost_and_latency, cost.expected_tokens, cost.with_answer),
    *(perf_model.decode_ms, perf_model.prefill_ms, perf_model.mixed_ms, perf_model.iteration_ms),
)
for _function in _FORMULA:
    jit.callee(_function)
_REPLACED = (policy_rules.write_estimate, policy_rules.below, policy_rules.sort_by_keys)  # by `routing`
for _function in vars(policy_rules).values():
    if isinstance(_function, FunctionType) and _function not in _REPLACED:
        jit.callee(_function)

# The modules of this folder with compiled code.
_MODULES = ("adapter_cache", "batching", "compiled", "events", "fleet", "routing", "views")


def _digest() -> str:
    own = [Path(__file__).with_name(f"{name}.py") for name in _MODULES]
    files = [
        *own,
        *(Path(str(module.__file__)).with_suffix(".py") for module in (cost, perf_model, policy_rules, router)),
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


_DIGEST = _digest()


def entry(function: Callable[..., Any]) -> Any:
    """Applies `jit.entry` under a name with the digest of all files that it may call into.

    Numba caches by function name and file; without the digest it would not recompile when another file is edited.
    """
    function.__qualname__ += f"_{_DIGEST}"
    return jit.entry(function)


kernel = jit.kernel
compiled_for = jit.compiled_for


def integers(*names: str) -> list[tuple[str, Any]]:
    """Returns the fields of these names for a record."""
    return [(name, np.int64) for name in names]


def floats(*names: str) -> list[tuple[str, Any]]:
    """Returns the fields of these names for a record."""
    return [(name, np.float64) for name in names]


_MODEL, _LINKS = (np.dtype(floats(*(field.name for field in fields(part)))) for part in (PerfModel, LinkSpeeds))
BACKLOG = np.dtype(floats(*Backlog._fields))
LIMITS = ("max_running", "max_step_tokens", "max_queue", "kv_tokens", "launches_ahead")
MACHINE = np.dtype(
    [
        ("model", _MODEL),
        ("links", _LINKS),
        *integers(*LIMITS, "device_adapter_bytes", "host_adapter_bytes"),
        *floats("request_ms", "beside_prompt_ms"),
    ]
)
REQUEST = np.dtype(
    [
        *integers("arrived", "delivered", "ready", "admitted", "first", "done"),  # ns; -1: not known
        *integers("adapter"),  # -1: the base model
        *integers("rank", "rank_class"),  # the class is an index into the workload's ranks, ascending, with 0
        *integers("prompt", "output", "left"),  # tokens; `left`: of the prompt to compute
        *integers("place"),  # number of the instance that serves it; -1: none
        *integers("next_ended"),  # the request that ended after it on its instance
    ]
)
INSTANCE = np.dtype(
    [
        # The current run of equal iterations: there is none if the count is 0.
        *integers("start", "each", "count", "stop"),
        *integers("first"),  # number of the run's first iteration
        *integers("busy_ns", "steps", "iterations", "tokens"),
        # Requests by state. Those with a key are heaps, but `waiting`, a ring.
        *integers("num_loading", "num_waiting", "waiting_head", "num_prefilling", "num_chunks", "num_decoding"),
        ("loading_ready", np.int64, MAX_QUEUE),
        ("loading", np.int64, MAX_QUEUE),
        ("waiting_joins", np.int64, MAX_QUEUE),  # the first iteration that each may join
        ("waiting", np.int64, MAX_QUEUE),
        ("prefilling", np.int64, MAX_RUNNING),  # in order of admission
        ("chunks", np.int64, MAX_RUNNING),  # requests with a chunk in the current iteration
        ("chunk_tokens", np.int64, MAX_RUNNING),
        ("decoding_last", np.int64, MAX_RUNNING),  # the last iteration of each
        ("decoding", np.int64, MAX_RUNNING),
        *integers("ended_head", "ended_tail"),  # requests that have ended since they were last taken; -1: none
        # Sums over requests.
        *integers("rank_sum", "rank_max", "decoding_rank_sum", "decoding_rank_max"),
        ("ranks", np.int64, MAX_RANKS),  # requests of each class
        ("decoding_ranks", np.int64, MAX_RANKS),
        *integers("queued_tokens", "queued_token_ranks", "kv_free", "kv_promised"),
        # Its adapters.
        *integers("host_bytes", "device_bytes", "load_free", "fetch_free"),
        *integers("host_adapters", "most_host_adapters", "additions", "fetches", "fetched_bytes", "loads", "evictions"),
        # The adapters that the plan makes it fetch: a range of the fleet's `moves`.
        *integers("moves_next", "moves_end"),
        ("credit_bytes", np.float64),
    ]
)


class Batches(NamedTuple):
    """What batching works on: one element of `machines` and of `instances` for each instance."""

    machines: Any
    instances: Any
    requests: Any
    ranks: Any  # the rank of each class, ascending


# --- heaps ---

# An array of keys and one of items, whose first `count` pairs are in use; each pair is in it once.


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

# An int32 array [items + 1, lists, 2] of the items before and after each item in each list. The row of item -1, which
# is the last one, has the last and the first item of each list, so the ends need no code of their own.


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

# An int64 array of slots. Its first element is the number of slots in use; those that follow so many are free. Slot 0
# is never used.


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
