"""The loading mode `merged` in the engine, on the fake backend of hashes: its batches, and that every request ends."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, ScheduledRow
from tests.engine_harness import harness


def row(slot: int, adapter_slot: int) -> ScheduledRow:
    return ScheduledRow(slot, 0, 1, adapter_slot, samples=True)


def test_a_merged_batch_has_rows_of_one_adapter_only() -> None:
    Batch((), (), (row(0, 3), row(1, 3)), merged=3)
    for rows, merged in (((row(0, 3), row(1, 5)), 3), ((row(0, 3),), 5), ((row(0, 0),), BASE_ADAPTER_SLOT)):
        with pytest.raises(AssertionError, match="cannot be merged"):
            Batch((), (), rows, merged)


async def serve(
    names: Sequence[str | None], seed: int = 0, tokens: int = 9, mode: str = "merged", **kind: Any
) -> list[Batch]:
    """Serves requests for `names` to their ends. Returns the batches launched."""
    async with harness(random.Random(seed), mode=mode, **kind) as here:
        tasks = [here.ask([index, 3], name, max_tokens=tokens)[1] for index, name in enumerate(names)]
        await here.until_done(tasks)
        await here.settle()
        for task in tasks:
            task.result().check()
            assert task.result().finish.reason == "length"
        return here.backend.launched


async def test_one_adapter_alone_is_merged_throughout() -> None:
    plans = await serve(["a1"] * 12)
    assert {plan.merged for plan in plans} == {1}


async def test_the_base_model_alone_is_never_merged() -> None:
    assert {plan.merged for plan in await serve([None] * 12)} == {None}


async def test_without_the_mode_nothing_is_merged() -> None:
    assert {plan.merged for plan in await serve(["a1"] * 8, mode="overlapped")} == {None}


@pytest.mark.parametrize("device_adapters", [2, 4])
async def test_adapters_are_merged_and_unmerged_in_turn(device_adapters: int) -> None:
    """An adapter is merged also in a slot that others used before."""
    names = [*["a0"] * 7, None, *["a2"] * 7, "a1"] * 3
    merged = [plan.merged for plan in await serve(names, device_adapters=device_adapters)]
    assert {None, 1, 2} <= set(merged)
    assert sum(before != after for before, after in pairwise(merged)) > 6


@pytest.mark.parametrize("seed", range(20))
async def test_a_merged_batch_that_runs_out_of_blocks_never_deadlocks(seed: int) -> None:
    """The pool has blocks for one request of full length, some of which are held by requests that are passed over."""
    rng = random.Random(seed)
    names = [rng.choice(["a0", "a0", "a0", "a1", None]) for _ in range(10)]
    await serve(names, seed, tokens=40, blocks=13)
