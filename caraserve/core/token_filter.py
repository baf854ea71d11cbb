"""Tokens that an answer may not have: outside of a set, at the end of a banned sequence, or ends that come too early.

A filter is a `Grammar`: it is applied by the same masks, and to the mask of another grammar if there is one.
"""

import functools
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caraserve.core.grammar import Grammar, TokenMatcher, mask_words
from caraserve.core.tenant import Tenant
from caraserve.errors import GrammarDeadEnd

_Mask = NDArray[np.uint32]


def mask_of(token_ids: Sequence[int], vocab_size: int) -> _Mask:
    """Returns the mask with the bits of these tokens set: uint32 [mask_words(vocab_size)]."""
    mask = np.zeros(mask_words(vocab_size), np.uint32)
    allow_tokens(mask, token_ids)
    return mask


def allow_tokens(mask: _Mask, token_ids: Collection[int]) -> None:
    """Sets the bits of these tokens."""
    ids = np.fromiter(token_ids, np.uint32, len(token_ids))
    np.bitwise_or.at(mask, ids >> 5, np.uint32(1) << (ids & 31))


def ban_tokens(mask: _Mask, token_ids: Collection[int]) -> None:
    """Clears the bits of these tokens."""
    ids = np.fromiter(token_ids, np.uint32, len(token_ids))
    np.bitwise_and.at(mask, ids >> 5, ~(np.uint32(1) << (ids & 31)))


@functools.lru_cache(maxsize=4)
def every_token(vocab_size: int) -> _Mask:
    """Returns the mask of all tokens, which must not be written to."""
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[:vocab_size] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


@dataclass(slots=True)
class _BannedAfter:
    """A node of a trie of the banned sequences, read backwards from the token before the last: which tokens may not
    follow the tokens on the path to it, and the nodes with one more token before those."""

    tokens: set[int] = field(default_factory=set)
    longer: dict[int, "_BannedAfter"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TokenFilter:
    """What the answers to one request may not have. `allowed`: the mask of tokens that may be chosen. `banned`: the
    sequences of two tokens and more, of which the longest has `most_before` before its last. `ends`: the mask of the
    tokens that end an answer, which may not come before `min_tokens`."""

    allowed: _Mask
    banned: _BannedAfter
    most_before: int
    ends: _Mask
    min_tokens: int
    grammar: Grammar | None

    @classmethod
    def of(
        cls,
        vocab_size: int,
        allowed: Sequence[int] | None,
        banned: Iterable[Sequence[int]],
        *,
        end_ids: Sequence[int],
        min_tokens: int,
        grammar: Grammar | None,
    ) -> "TokenFilter":
        """`allowed`: None for all tokens. `banned`: sequences of token ids, none of them empty."""
        mask = every_token(vocab_size).copy() if allowed is None else mask_of(allowed, vocab_size)
        root, most_before = _BannedAfter(), 0
        for *before, last in banned:
            node = root
            for token_id in reversed(before):
                node = node.longer.setdefault(token_id, _BannedAfter())
            node.tokens.add(last)
            most_before = max(most_before, len(before))
        ban_tokens(mask, root.tokens)
        return cls(mask, root, most_before, mask_of(end_ids, vocab_size), min_tokens, grammar)

    async def prepare(self, tenant: Tenant) -> None:
        if self.grammar is not None:
            await self.grammar.prepare(tenant)

    def matcher(self, output_ids: Sequence[int] = ()) -> TokenMatcher:
        return _FilterMatcher(self, None if self.grammar is None else self.grammar.matcher(output_ids), output_ids)


class _FilterMatcher:
    """The `TokenMatcher` of one answer."""

    def __init__(self, token_filter: TokenFilter, inner: TokenMatcher | None, output_ids: Sequence[int]) -> None:
        self._filter, self._inner = token_filter, inner
        self._count = len(output_ids)  # tokens of the answer
        self._last_ids = deque(output_ids, maxlen=token_filter.most_before)

    def append(self, token_id: int) -> None:
        self._count += 1
        self._last_ids.append(token_id)
        if self._inner is not None:
            self._inner.append(token_id)

    def write_mask(self, mask: _Mask) -> None:
        if self._inner is None:
            mask[:] = self._filter.allowed
        else:
            self._inner.write_mask(mask)
            mask &= self._filter.allowed
        ban_tokens(mask, self._banned())
        if self._count < self._filter.min_tokens:
            mask &= ~self._filter.ends
        if not mask.any():
            raise GrammarDeadEnd("at this point of the answer the request's fields together ban all tokens")

    def _banned(self) -> set[int]:
        """The tokens with which the answer would end with a banned sequence."""
        node, found = self._filter.banned, set[int]()
        for token_id in reversed(self._last_ids):
            if (longer := node.longer.get(token_id)) is None:
                break
            node = longer
            found |= node.tokens
        return found
