"""Names of combinations: hostile texts are refused in time that grows with their length alone."""

import time

import pytest

from caraserve.core.combined_names import members_of, read_combination


def test_a_long_number_is_refused_at_once() -> None:
    began_s = time.process_time()
    with pytest.raises(ValueError, match="is not NAME or"):
        read_combination(f"a*{'9' * 20_000}x")
    assert time.process_time() - began_s < 1.0  # 20 s if each of its digits were tried as the last


@pytest.mark.parametrize(
    "name", ["a*1e308+a*1e308", "a*inf", "a*nan", "a*0.50", "b+a", "a+a", "a*1.0", "a+", "", "../a"]
)
def test_a_text_that_is_no_canonical_name_has_no_members(name: str) -> None:
    assert members_of(name) == []
