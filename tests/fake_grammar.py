"""A grammar that a test writes as a function."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.tenant import Tenant

Allowed = Callable[[int], Sequence[int]]


class FakeMatcher:
    """Allows after n tokens those that `allowed(n)` returns."""

    def __init__(self, allowed: Allowed, count: int) -> None:
        self._allowed, self._count = allowed, count

    def append(self, token_id: int) -> None:
        self._count += 1

    def write_mask(self, mask: NDArray[np.uint32]) -> None:
        mask[:] = 0
        for token in self._allowed(self._count):
            mask[token >> 5] |= np.uint32(1 << (token & 31))


@dataclass(frozen=True)
class FakeGrammar:
    """Makes such matchers. `on_freed`: called when one is freed."""

    allowed: Allowed
    on_freed: Callable[[], object] = lambda: None

    async def prepare(self, tenant: Tenant) -> None:
        """There is nothing to compile."""

    def matcher(self, output_ids: Sequence[int] = ()) -> FakeMatcher:
        matcher = FakeMatcher(self.allowed, len(output_ids))
        weakref.finalize(matcher, self.on_freed)
        return matcher
