"""Figures of an iteration's time by rank: what is computed from the times, and batches that are really timed."""

import pytest

from caraserve.bench.synthetic import Shape
from scripts.laboratory.papers.kernels import Ranks, batch_times, fitted_lines, mixed_prefills, rank_values

TINY = Shape(hidden=64, layers=1, intermediate=64, vocab=64, heads=1, kv_heads=1)
MIXES: list[Ranks] = [(8,) * 4, (64,) * 4, (8, 8, 8, 64), (8, 16, 32, 64), (16,) * 8, (8,) * 7 + (32,), (64,) * 8]


def test_each_kernels_line_is_fitted_to_its_own_work() -> None:
    padded = {ranks: 5.0 + 0.02 * len(ranks) * max(ranks) for ranks in MIXES}
    unpadded = {ranks: 4.0 + 0.01 * sum(ranks) for ranks in MIXES}
    data = fitted_lines({"padded": padded, "unpadded": unpadded}, ())
    found = {value.what: value.value for value in data.values}
    assert found["padded: R²"] == found["unpadded: R²"] == pytest.approx(1.0)
    assert found["padded: time at a work of 1024 ÷ at none"] == pytest.approx(1 + 0.02 * 1024 / 5)
    for panel, (beta, alpha) in zip(data.panels, ((5.0, 0.02), (4.0, 0.01)), strict=True):
        points, line = panel.series
        assert line.y == pytest.approx([beta + alpha * x for x in line.x])
        assert max(line.x) == max(points.x)
    assert fitted_lines({"padded": unpadded}, ()).values[0].value < 0.99, "R² where the work does not explain the times"


def test_batches_of_the_largest_size_are_compared() -> None:
    same = {rank: (rank,) * 4 for rank in (8, 16, 32, 64)}
    one, mixed = (8, 8, 8, 64), (8, 16, 32, 64)
    times = {same[8]: 10.0, same[16]: 11.0, same[32]: 12.0, same[64]: 14.0, one: 13.0, mixed: 13.5}
    smaller = {(8, 8): 1.0, (64, 64): 50.0}
    values = {value.what: value.value for value in rank_values("padded", times | smaller)}
    assert values == {
        "padded: slowest ÷ fastest batch of equal size": pytest.approx(1.4),
        "padded: one of rank 64 among rank 8 ÷ rank 8 alone": pytest.approx(1.3),
    }


def test_every_batch_is_timed_with_both_kernels() -> None:
    times = batch_times(TINY, MIXES[:4], 1)
    assert {kernel: list(times_ms) for kernel, times_ms in times.items()} == {
        "padded": MIXES[:4],
        "unpadded": MIXES[:4],
    }
    assert min(ms for times_ms in times.values() for ms in times_ms.values()) > 0
    prefills = batch_times(TINY, [(8, 8), (8, 64)], 1, prompt_tokens=16)
    assert all(list(times_ms) == [(8, 8), (8, 64)] for times_ms in prefills.values())


def test_a_model_of_each_kernel_predicts_prompts_of_mixed_ranks() -> None:
    mixes: list[Ranks] = [(8, rank) for rank in (8, 16, 32, 64, 128)] + [(rank, rank) for rank in (16, 32, 64, 128)]
    padded = {ranks: 40.0 + 0.1 * 2 * max(ranks) for ranks in mixes}
    unpadded = {ranks: 40.0 + 0.1 * sum(ranks) for ranks in mixes}
    found = {value.what: value.value for value in mixed_prefills({"padded": padded, "unpadded": unpadded}, ()).values}
    assert found == {
        "padded: ranks 8 and 128 ÷ 8 and 8": pytest.approx(65.6 / 41.6),
        "padded: ranks 128 and 128 ÷ 8 and 8": pytest.approx(65.6 / 41.6),
        "padded: largest error of the model": pytest.approx(0.0, abs=1e-9),
        "unpadded: ranks 8 and 128 ÷ 8 and 8": pytest.approx(53.6 / 41.6),
        "unpadded: ranks 128 and 128 ÷ 8 and 8": pytest.approx(65.6 / 41.6),
        "unpadded: largest error of the model": pytest.approx(0.0, abs=1e-9),
    }
    swapped = {value.what: value.value for value in mixed_prefills({"padded": unpadded}, ()).values}
    assert swapped["padded: largest error of the model"] > 20
