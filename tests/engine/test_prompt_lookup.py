"""Guesses follow the text that an answer repeats, and how often they are right is measured."""

import random

from caraserve.engine.prompt_lookup import PromptLookup


def lookup(prompt: list[int], *answer: int) -> PromptLookup:
    made = PromptLookup(prompt)
    made.add(answer)
    return made


def test_the_guess_is_what_followed_the_same_tokens_in_the_prompt() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 7], 2, 3).guess(3) == (4, 5, 6)


def test_the_answer_is_looked_up_as_well() -> None:
    assert lookup([9], 1, 2, 3, 4, 5, 1, 2).guess(2) == (3, 4)


def test_one_token_alone_is_no_match() -> None:
    made = lookup([1, 2, 3], 2)
    assert (made.guess(3), made.chance) == ((), 0.0)


def test_the_longest_match_counts() -> None:
    assert lookup([1, 2, 3, 10, 0, 2, 3, 20, 0], 1, 2, 3).guess(1) == (10,)


def test_of_equal_matches_the_one_after_the_place_that_was_copied_counts() -> None:
    """As after a change in a copied text, of which the same tokens follow elsewhere, too."""
    text = [5, 6, 0, 1, 2, 3, 8, 5, 6, 7, 9, 9, 9, 9, 9, 5, 6, 4]
    assert lookup(text, 1, 2, 3, 11, 5, 6).guess(1) == (7,)


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    assert lookup([9], 1, 2, 3, 1, 2, 3, 1, 2).guess(7) == (3, 1, 2, 3, 1, 2, 3)


def test_no_vector_of_a_prompt_is_guessed() -> None:
    assert lookup([1, 2, 3, -1, -2, 4], 1, 2).guess(3) == (3,)


def test_the_chance_follows_the_guesses_that_were_right() -> None:
    """It rises where the answer copies the prompt, and falls where it only begins so."""
    rng = random.Random(0)
    text = [rng.randrange(1000) for _ in range(400)]
    copying = PromptLookup(text)
    copying.add(text[:60])
    assert copying.chance > 0.95
    misled = PromptLookup(text)
    before = lookup(text, *text[:2]).chance
    for start in range(0, 300, 10):
        misled.add((*text[start : start + 2], 1000 + start))
    misled.add(text[300:302])
    assert misled.chance < before / 2


def test_many_tokens_added_at_once_leave_the_same_guess() -> None:
    rng = random.Random(1)
    text = [rng.randrange(1000) for _ in range(300)]
    made = PromptLookup(text[:5])
    made.add([*text[5:], *text[20:30]])
    assert made.guess(4) == tuple(text[30:34])
    assert made.num_added == 305
