"""Stage `demo`: which answers count as the CPU's."""

import pytest

from scripts.laboratory.gpu.demo import Choice, is_tie
from scripts.laboratory.gpu.results import WrongResult

RIGHT = (Choice("The", " sea", 5.0), Choice(" sea", " lake", 0.004), Choice(".", "!", 2.0))
TIE = 0.01


def test_the_same_tokens_are_right_whatever_else_was_likely() -> None:
    assert not is_tie("x", tuple(Choice(each.token, "other", 9.0) for each in RIGHT), RIGHT, TIE)


def test_an_answer_may_go_another_way_where_two_tokens_are_nearly_as_likely() -> None:
    assert is_tie("x", (RIGHT[0], Choice(" lake", " sea", 0.001), Choice("?", ".", 1.0)), RIGHT, TIE)


@pytest.mark.parametrize(
    ("got", "told"),
    [
        ((Choice(" sea", "The", 0.1),), "token 0 is ' sea', and the CPU's is 'The', by 5.000 before ' sea'"),
        ((RIGHT[0], Choice(" pond", " sea", 0.1)), "token 1 is ' pond', and the CPU's is ' sea'"),
        (RIGHT[:2], "token 2 is None, and the CPU's is '.'"),
        ((*RIGHT, Choice("!", ".", 0.0)), "token 3 is '!', and the CPU's is None"),
    ],
    ids=["clearly less likely", "neither of the two", "ends early", "ends late"],
)
def test_anything_else_is_wrong(got: tuple[Choice, ...], told: str) -> None:
    with pytest.raises(WrongResult, match=told.replace("?", r"\?").replace(".", r"\.")):
        is_tie("x", got, RIGHT, TIE)
