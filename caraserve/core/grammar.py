"""Structured output: the interface between a request's grammar and the device that samples its tokens.

The grammar allows some of the vocabulary's tokens after each token of the answer. A backend asks for them as a bit mask
just before it samples, when all tokens before are known.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.core.tenant import Tenant
from caraserve.util.units import ceil_div

_MASK_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Returns the uint32 words of a mask: one bit per token, the lowest bit of a word first."""
    return ceil_div(vocab_size, _MASK_BITS)


class TokenMatcher(Protocol):
    """The position of one answer in its grammar. For one thread at a time."""

    def append(self, token_id: int) -> None:
        """Adds the answer's next token."""

    def write_mask(self, mask: NDArray[np.uint32]) -> None:
        """Sets the bits of the tokens that may follow, and clears all others. `mask`: [mask_words(vocabulary)]. Raises
        GrammarFailed."""


class Grammar(Protocol):
    """The grammar of an answer, shared by any number of requests."""

    async def prepare(self, tenant: Tenant) -> None:
        """Compiles it, at the turn of `tenant`, whose request it is. To be called by the instance that answers, before
        a request with it is submitted. Raises InvalidRequest or Overloaded."""

    def matcher(self, output_ids: Sequence[int] = ()) -> TokenMatcher:
        """Returns a matcher after the first tokens of an answer; takes about 10 µs."""
