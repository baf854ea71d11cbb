"""The groups of layers in which an adapter is copied, compared with all other divisions."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.lora.copy_groups import MOST_GROUPS, group_ends, groups_in_time

GROUP_MS = 0.06  # that each group costs
TIMES_MS = st.integers(1, 1000).map(lambda count: count / 64)  # which compare exactly
AHEAD_MS = st.integers(-3000, 12000).map(lambda count: count / 64)


def delay_ms(ends: Sequence[int], ahead_ms: float, load_ms: float, layer_ms: float) -> float:
    """Returns by how much a prefill must start later, so that it waits for no layer of these groups."""
    return max(0.0, *(end * load_ms - ahead_ms - start * layer_ms for start, end in pairwise((0, *ends))))


def divisions(layers: int, most: int) -> Iterator[list[int]]:
    for cuts in range(most):
        yield from ([*ends, layers] for ends in combinations(range(1, layers), cuts))


@given(layers=st.integers(1, 8), ahead_ms=AHEAD_MS, load_ms=TIMES_MS, layer_ms=TIMES_MS, most=st.integers(1, 4))
def test_no_other_division_lets_a_prefill_start_earlier(
    layers: int, ahead_ms: float, load_ms: float, layer_ms: float, most: int
) -> None:
    def cost_ms(ends: Sequence[int]) -> float:
        return delay_ms(ends, ahead_ms, load_ms, layer_ms) + GROUP_MS * len(ends)

    found = group_ends(layers, ahead_ms, load_ms, layer_ms, most)
    assert len(found) <= most
    whole_ms = delay_ms([layers], ahead_ms, load_ms, layer_ms)
    assert cost_ms(found) <= min(map(cost_ms, divisions(layers, most))) + whole_ms / 1000 + 1e-9


@given(layers=st.integers(1, 8), ahead_ms=AHEAD_MS, load_ms=TIMES_MS, layer_ms=TIMES_MS, most=st.integers(1, 4))
def test_groups_in_time_are_the_fewest(
    layers: int, ahead_ms: float, load_ms: float, layer_ms: float, most: int
) -> None:
    found = groups_in_time(layers, ahead_ms, load_ms, layer_ms, most)
    able = [ends for ends in divisions(layers, most) if delay_ms(ends, ahead_ms, load_ms, layer_ms) <= 0]
    assert (found is None) == (not able)
    if found is not None:
        assert delay_ms(found, ahead_ms, load_ms, layer_ms) <= 1e-9
        assert len(found) == min(map(len, able))


@given(layers=st.integers(1, 80), load_ms=TIMES_MS, layer_ms=TIMES_MS)
def test_what_arrives_before_the_prefill_begins_is_one_group(layers: int, load_ms: float, layer_ms: float) -> None:
    assert group_ends(layers, layers * load_ms, load_ms, layer_ms) == [layers]


@pytest.mark.parametrize(("mbytes", "ahead_ms"), [(25, 0), (320, 0), (320, 5), (1279, 0), (1279, 20)])
def test_on_a_fast_link_a_prefill_is_hardly_delayed(mbytes: float, ahead_ms: float) -> None:
    """7B on an H200: 0.17 ms a layer, and 55 GB/s. No prefill can start before its last layer is loaded in time."""
    load_ms, layer_ms = mbytes / 32 / 55, 0.17
    ends = group_ends(32, ahead_ms, load_ms, layer_ms)
    assert len(ends) <= MOST_GROUPS
    assert ends[0] < 32
    least_ms = max(load_ms - ahead_ms, 32 * load_ms - ahead_ms - 31 * layer_ms)
    assert delay_ms(ends, ahead_ms, load_ms, layer_ms) < max(0.0, least_ms) + 1
