"""The sampler: which tokens can be drawn, how often, and that a draw depends only on seed and position."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.core.batch import SlotSampling
from caraserve.cpu import sampling
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from tests.cpu.as_python import callable_from_python

all_finite = callable_from_python(sampling.all_finite)
best_tokens = callable_from_python(sampling.best_tokens)
choose = callable_from_python(sampling.choose)
log_sum_exp = callable_from_python(sampling.log_sum_exp)
rank_of = callable_from_python(sampling.rank_of)

VOCAB = 50
_DEFAULTS: dict[str, Any] = {
    "prompt_tokens": 2,
    "seed": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "end_ids": (),
    "logit_bias": (),
}
_NO_MASK = np.zeros(0, np.uint32)
LOGITS = np.random.default_rng(3).standard_normal(VOCAB).astype(np.float32) * 2


def draw(
    position: int = 1, history: tuple[int, ...] = (4, 5), mask: NDArray[np.uint32] = _NO_MASK, **changed: Any
) -> int:
    table = np.zeros(2, SLOT_SAMPLING)
    write_sampling(table, 1, SlotSampling(**_DEFAULTS | changed))
    tokens = np.zeros(VOCAB, np.int64)
    tokens[: len(history)] = history
    logits, seen = LOGITS.copy(), np.zeros(VOCAB, np.uint8)
    chosen = int(choose(logits, position, tokens, table[1], np.zeros(VOCAB, np.float32), seen, mask))
    assert (logits == LOGITS).all()
    assert not seen.any()
    return chosen


def frequencies(**changed: Any) -> np.ndarray[Any, Any]:
    counts = np.bincount([draw(seed=seed, **changed) for seed in range(4000)], minlength=VOCAB)
    return counts / counts.sum()


def softmax(logits: Any) -> Any:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_temperature_0_chooses_the_best_token() -> None:
    assert draw(temperature=0.0) == LOGITS.argmax()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    np.testing.assert_allclose(frequencies(temperature=temperature), softmax(LOGITS / temperature), atol=0.03)


def test_top_k_keeps_the_k_best() -> None:
    kept = set(np.flatnonzero(frequencies(top_k=3)))
    assert kept == set(np.argsort(-LOGITS)[:3])


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    order = np.argsort(-LOGITS)
    needed = int(np.searchsorted(np.cumsum(softmax(LOGITS)[order]), 0.8)) + 1
    assert set(np.flatnonzero(frequencies(top_p=0.8))) <= set(order[:needed])
    assert set(np.flatnonzero(frequencies(top_p=0.8))) >= set(order[: needed - 2])


def test_min_p_keeps_tokens_near_the_best() -> None:
    probabilities = softmax(LOGITS)
    allowed = set(np.flatnonzero(probabilities >= 0.3 * probabilities.max()))
    assert set(np.flatnonzero(frequencies(min_p=0.3))) == allowed


def test_a_draw_depends_only_on_seed_and_position() -> None:
    assert draw(seed=9, position=1) == draw(seed=9, position=1)
    assert len({draw(seed=9, position=position, history=(4,) * 40) for position in range(1, 40)}) > 5
    assert len({draw(seed=seed) for seed in range(40)}) > 5


def test_a_bias_can_force_or_ban_a_token() -> None:
    assert draw(temperature=0.0, logit_bias=((7, 100.0),)) == 7
    best = int(LOGITS.argmax())
    assert draw(temperature=0.0, logit_bias=((best, -100.0),)) == np.argsort(-LOGITS)[1]


def test_end_tokens_are_banned_until_min_tokens() -> None:
    best = int(LOGITS.argmax())
    assert draw(temperature=0.0, min_tokens=1, end_ids=(best,)) != best
    assert draw(temperature=0.0, min_tokens=1, end_ids=(best,), position=2, history=(4, 5, 6)) == best


def test_penalties_match_openai_and_hugging_face() -> None:
    """Presence applies once and frequency each time, over the output; repetition applies over the prompt, too."""
    history, prompt = (3, 8, 8, 8, 9), 1
    expected = LOGITS.astype(np.float64).copy()
    for token in (3, 8, 9):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[8] -= 3 * 0.7 + 0.4
    expected[9] -= 0.7 + 0.4
    settings = {"presence_penalty": 0.4, "frequency_penalty": 0.7, "repetition_penalty": 1.5, "prompt_tokens": prompt}

    def best_when(token: int, rival: float) -> int:
        """Returns the chosen token when biases lift `token` to exactly 60 and token 2, never seen before, to
        `rival`."""
        bias = ((token, 60.0 - float(expected[token])), (2, rival - float(LOGITS[2])))
        return draw(4, history, temperature=0.0, logit_bias=bias, **settings)

    assert [best_when(token, 59.99) for token in (3, 8, 9)] == [3, 8, 9]
    assert [best_when(token, 60.01) for token in (3, 8, 9)] == [2, 2, 2]


def test_best_tokens_are_in_order_and_log_sum_exp_is_exact() -> None:
    ids, values = np.zeros(20, np.int64), np.zeros(20, np.float32)
    best_tokens(LOGITS, 5, ids, values)
    assert list(ids[:5]) == list(np.argsort(-LOGITS)[:5])
    assert log_sum_exp(LOGITS) == pytest.approx(float(np.log(np.exp(LOGITS.astype(np.float64)).sum())))


def test_the_rank_of_a_token_is_its_place_in_a_stable_sort() -> None:
    logits = np.random.default_rng(0).integers(-4, 4, 200).astype(np.float32)  # many are equal
    order = np.argsort(-logits, kind="stable").tolist()
    assert [rank_of(logits, token) for token in range(200)] == [order.index(token) + 1 for token in range(200)]


@pytest.mark.parametrize("size", [1, 7, 16, 50, 1000])
def test_a_non_finite_value_is_found_at_any_place(size: int) -> None:
    largest = np.float32(np.finfo(np.float32).max)
    logits = np.resize(np.array([largest, -largest, 0.0, 1e-45], np.float32), size)
    assert all_finite(logits)
    for place in range(size):
        for value in (np.inf, -np.inf, np.nan):
            broken = logits.copy()
            broken[place] = value
            assert not all_finite(broken)
