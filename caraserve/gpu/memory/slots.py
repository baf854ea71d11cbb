"""What passes know of request slots, written in launch order: tokens so far, how to sample, KV blocks."""

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import Batch, BlockGrant, SlotStart
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.memory.request_state import DeviceState
from caraserve.gpu.memory.staging_ring import Ring


class RequestSlots:
    """The launching thread's alone. Writes go in the compute lane's order; who reads on another lane comes after it."""

    def __init__(self, state: DeviceState, ring: Ring) -> None:
        self._state, self._ring = state, ring
        self._sampling = np.zeros(state.sampling.shape[0], SLOT_SAMPLING)

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """By slot."""
        tokens: NDArray[np.int64] = self._sampling["prompt_tokens"]
        return tokens

    def apply(self, plan: Batch) -> None:
        """Takes note of requests that took slots and of blocks that they were granted."""
        for start in plan.starts:
            self._start(start)
        for grant in plan.grants:
            self._grant(grant)

    def _start(self, start: SlotStart) -> None:
        history, table = self._state.history, self._state.sampling
        tokens = np.array(start.token_ids, np.int32)
        self._ring.send(history[start.slot].data_ptr(), tokens, Lane.COMPUTE)
        write_sampling(self._sampling, start.slot, start.sampling)
        record = self._sampling[start.slot : start.slot + 1]
        self._ring.send(table[start.slot].data_ptr(), record, Lane.COMPUTE)

    def _grant(self, grant: BlockGrant) -> None:
        row = self._state.block_table[grant.slot]
        place = row.data_ptr() + row.element_size() * grant.first
        self._ring.send(place, np.array(grant.blocks, np.int32), Lane.COMPUTE)
