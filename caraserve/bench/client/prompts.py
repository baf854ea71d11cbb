"""Prompts of a stated length that no prefix cache has seen. Pure."""

import numpy as np

# Ids that every vocabulary has, above the special tokens that most begin with and no more than its bytes.
_FIRST_ID, _LAST_ID = 16, 240
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
_WORD_LETTERS = 3  # with the space before them, a token or two of most vocabularies


def token_ids(seed: int, index: int, count: int) -> list[int]:
    """Random ids; the same for the same seed and index."""
    rng = np.random.default_rng((seed, index))
    return rng.integers(_FIRST_ID, _LAST_ID, count).tolist()  # type: ignore[no-any-return]


def text(seed: int, index: int, count: int) -> str:
    """As many short random words, for endpoints that take only text; the server says how many tokens they are."""
    letters = np.random.default_rng((seed, index)).choice(_LETTERS, (count, _WORD_LETTERS))
    return " ".join(word.tobytes().decode("ascii") for word in letters)
