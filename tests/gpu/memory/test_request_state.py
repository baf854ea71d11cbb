"""Vectors in place of tokens reach their rows of the residual stream."""

import ctypes
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.batch import Batch, ScheduledRow, SlotSampling, SlotStart
from caraserve.cpu.sampling import SLOT_SAMPLING
from caraserve.gpu.memory.request_state import DeviceState, RequestSlots
from caraserve.gpu.memory.staging_ring import StagingRing

SLOTS, WIDTH = 3, 8
ELSEWHERE = 7.0  # what rows hold that are not written


class RingAtOnce:
    """A ring whose copies have run when they are sent."""

    def send(self, target: int, data: NDArray[np.generic]) -> None:
        ctypes.memmove(target, data.ctypes.data, data.nbytes)

    def flush(self) -> None: ...


RING = cast(StagingRing, RingAtOnce())


@pytest.fixture
def slots() -> RequestSlots:
    history = torch.zeros((SLOTS, 33), dtype=torch.int32)
    sampling = torch.zeros((SLOTS, SLOT_SAMPLING.itemsize), dtype=torch.uint8)
    state = DeviceState((), torch.zeros((SLOTS, 2), dtype=torch.int32), history, sampling)
    return RequestSlots(state, RING)


def start(slots: RequestSlots, slot: int, ids: list[int], vectors: NDArray[np.float32] | None = None) -> None:
    slots.apply(Batch((SlotStart(slot, tuple(ids), SlotSampling.greedy(len(ids)), vectors),), (), ()))


def sent(slots: RequestSlots, rows: list[tuple[int, int, int]], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the residual stream of a pass over rows (slot, first position, tokens)."""
    hidden = torch.full((sum(count for _, _, count in rows), WIDTH), ELSEWHERE, dtype=dtype)
    slots.send_vectors([ScheduledRow(*row, 0, samples=False) for row in rows], hidden, RING)
    return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
def test_each_row_of_a_chunk_has_its_vector_in_the_models_dtype(slots: RequestSlots, dtype: torch.dtype) -> None:
    vectors = np.random.default_rng(1).standard_normal((3, WIDTH)).astype(np.float32)
    start(slots, 0, [4, 5, 6])
    start(slots, 2, [9, -1, 9, -2, -3], vectors)
    hidden = sent(slots, [(0, 0, 2), (2, 1, 4)], dtype)
    assert torch.equal(hidden[[2, 4, 5]], torch.from_numpy(vectors).to(dtype))
    assert bool((hidden[:2] == ELSEWHERE).all())


def test_generated_tokens_and_a_slots_next_request_have_no_vectors(slots: RequestSlots) -> None:
    start(slots, 1, [-1, -2], np.zeros((2, WIDTH), np.float32))
    assert bool((sent(slots, [(1, 2, 1)]) == ELSEWHERE).all())
    start(slots, 1, [5, 6])
    assert bool((sent(slots, [(1, 0, 2)]) == ELSEWHERE).all())
