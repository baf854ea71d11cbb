"""The budget of compiled grammars in bytes: what is dropped, what is refused, and what the answers add."""

import itertools
from dataclasses import dataclass

import pytest

from caraserve.tokenizer.grammar import FREE_GROWTH_BYTES
from caraserve.tokenizer.grammar_memory import GrammarBudget, Growth

MB = 1 << 20


@dataclass(eq=False)
class FakeGrammar:
    num_bytes: int
    client: str = "client"


def kept(budget: GrammarBudget[FakeGrammar]) -> str:
    return "".join(name for name in "abcdef" if name.encode() in budget._kept)


def keep(budget: GrammarBudget[FakeGrammar], name: str, num_bytes: int, client: str = "client") -> bool:
    with budget.reserve(client, num_bytes) as reservation:
        if reservation is not None:
            budget.keep(name.encode(), FakeGrammar(num_bytes, client), reservation)
    return reservation is not None


def test_the_least_recently_used_grammars_are_dropped_for_a_new_one() -> None:
    budget: GrammarBudget[FakeGrammar] = GrammarBudget(100, 100)
    for name in "abc":
        assert keep(budget, name, 30)
    assert budget.get(b"a") is not None
    assert keep(budget, "d", 45)
    assert (kept(budget), budget.num_bytes) == ("ad", 75)
    assert budget.get(b"b") is None


def test_a_client_drops_its_own_grammars_before_it_takes_more_than_its_share() -> None:
    budget: GrammarBudget[FakeGrammar] = GrammarBudget(100, 50)
    assert keep(budget, "a", 40, "modest")
    for name in "bcdef":
        assert keep(budget, name, 20, "greedy")
    assert kept(budget) == "aef"
    assert not budget.make_room("greedy", 51)


def test_grammars_in_use_count_until_the_last_use_ends() -> None:
    budget: GrammarBudget[FakeGrammar] = GrammarBudget(100, 100)
    assert keep(budget, "a", 60)
    in_use = budget.get(b"a")
    assert in_use is not None
    assert not keep(budget, "b", 50)
    assert (kept(budget), budget.num_bytes) == ("", 60)
    del in_use
    assert budget.num_bytes == 0
    assert keep(budget, "b", 50)


@pytest.mark.parametrize(("clients", "most_bytes"), [("ab", 100), ("aa", 50)])
def test_grammars_that_are_compiled_at_once_count_together(clients: str, most_bytes: int) -> None:
    budget: GrammarBudget[FakeGrammar] = GrammarBudget(100, most_bytes)
    size = most_bytes - 10
    assert keep(budget, "f", 10, clients[0])
    with budget.reserve(clients[0], size) as first:
        assert first is not None
        with budget.reserve(clients[1], 11) as second:
            assert second is None
        with budget.reserve(clients[1], 10) as second:
            assert second is not None
            assert budget.num_bytes == most_bytes
        budget.keep(b"a", FakeGrammar(size, clients[0]), first)
        assert budget.num_bytes == size
    assert (kept(budget), budget.num_bytes) == ("a", size)


def test_a_grammar_whose_compilation_fails_no_longer_counts() -> None:
    budget: GrammarBudget[FakeGrammar] = GrammarBudget(100, 100)
    with pytest.raises(ValueError, match="it fails"), budget.reserve("client", 60):
        raise ValueError("it fails")
    assert budget.num_bytes == 0


def test_a_grammar_in_use_is_dropped_in_vain_and_the_next_one_too() -> None:
    budget: GrammarBudget[FakeGrammar] = GrammarBudget(100, 100)
    assert keep(budget, "a", 60)
    assert keep(budget, "b", 30)
    assert keep(budget, "c", 10)
    in_use = budget.get(b"a")
    assert budget.get(b"b") is not None
    assert budget.get(b"c") is not None
    assert budget.make_room("another", 30)
    assert in_use is not None
    assert (kept(budget), budget.num_bytes) == ("c", 70)


def test_a_grammar_that_grew_counts_with_its_growth() -> None:
    budget: GrammarBudget[FakeGrammar] = GrammarBudget(100, 100)
    assert keep(budget, "a", 40)
    assert keep(budget, "b", 40)
    grown = budget.get(b"b")
    assert grown is not None
    grown.num_bytes = 70
    assert budget.make_room("client", 0)
    assert kept(budget) == "b"
    grown.num_bytes = 101
    assert not budget.make_room("client", 0)


def test_a_grammar_that_is_compiled_again_takes_the_place_of_the_former_one() -> None:
    budget: GrammarBudget[FakeGrammar] = GrammarBudget(100, 100)
    assert keep(budget, "a", 40)
    assert keep(budget, "a", 50)
    assert (kept(budget), budget.num_bytes) == ("a", 50)


def test_growth_is_what_the_process_allocates_during_masks_that_took_so_long() -> None:
    """Where looks are slow, there is one in 50 ms of masks."""
    allocated = [100 * MB]
    growth = Growth(lambda: allocated[-1], most_per_s=64 * MB, now=itertools.count().__next__)
    allocated.append(103 * MB)
    assert not growth.note_mask(0.04)
    assert growth.note_mask(0.04)
    assert growth.num_bytes == 3 * MB
    allocated.append(102 * MB)
    assert growth.note_mask(0.1)
    assert growth.num_bytes == 2 * MB
    for others, counted in ((900, 34), (50, 2), (0, 0)):  # in 0.5 s masks can add 32 MB
        allocated.append(others * MB)
        assert growth.note_mask(0.5)
        assert growth.num_bytes == counted * MB


def grown_by(of_masks: int, of_others: int) -> tuple[int, int]:
    """Returns the growth, and the looks, of 5,020 masks of 200 µs that add so much, and others so much between them."""
    allocated_bytes, looks = 0, 0

    def look() -> int:
        nonlocal looks
        looks += 1
        return allocated_bytes

    growth = Growth(look, now=lambda: 0.0)
    for _ in range(5020):
        allocated_bytes += of_others
        growth.before_mask()
        allocated_bytes += of_masks
        growth.note_mask(0.0002)
    return growth.num_bytes, looks


def test_what_others_allocate_between_masks_does_not_end_answers() -> None:
    grown_bytes, _ = grown_by(0, 16_000)
    assert grown_bytes <= FREE_GROWTH_BYTES // 2


def test_what_masks_allocate_counts_whatever_others_do() -> None:
    for of_others in (0, 10_000, 1_000_000):
        grown_bytes, _ = grown_by(10_000, of_others)
        assert grown_bytes == pytest.approx(5020 * 10_000, rel=0.1)


def test_a_grammar_that_does_not_grow_costs_a_look_in_50_ms_of_masks() -> None:
    _, looks = grown_by(0, 0)
    assert looks <= 1 + 5020 * 0.0002 / 0.05
