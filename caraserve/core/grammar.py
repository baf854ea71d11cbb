"""Structured output: the interface between a request's grammar and the device that samples its tokens.

The grammar allows some of the vocabulary's tokens after each token of the answer. A backend asks for them as a bit mask
just before it samples, when all tokens before are known.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.util.units import ceil_div

_MASK_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Returns the uint32 words of a mask: one bit per token, the lowest bit of a word first."""
    return ceil_div(vocab_size, _MASK_BITS)


class GrammarFailed(Exception):
    """The grammar has become too complex at this point of the answer; the message names the limit."""


class TokenMatcher(Protocol):
    """The position of one answer in its grammar. For one thread at a time."""

    def write_mask(self, output_ids: NDArray[np.int64], mask: NDArray[np.uint32]) -> None:
        """Sets the bits of the tokens that may follow `output_ids`, and clears all others. `output_ids`: all tokens of
        the answer so far, of which the tokens of earlier calls are the first. `mask`: [mask_words(vocabulary)]. Raises
        GrammarFailed."""


class Grammar(Protocol):
    """A compiled grammar, shared by any number of requests."""

    def matcher(self) -> TokenMatcher:
        """Returns a matcher at the start of an answer; takes about 10 µs."""
