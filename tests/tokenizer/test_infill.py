"""Filling in the middle: the format is found by the vocabulary's tokens."""

import pytest

from caraserve.tokenizer.infill import find_format


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        ({"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"}, "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        ({"<fim_prefix>", "<fim_suffix>", "<fim_middle>", "[PREFIX]"}, "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        ({"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"}, "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"),
        ({"[PREFIX]", "[SUFFIX]", "[INST]"}, "[SUFFIX]b[PREFIX]a"),
    ],
    ids=["qwen", "starcoder", "deepseek", "codestral"],
)
def test_the_prompt_is_written_with_the_tokens_of_the_vocabulary(tokens: set[str], prompt: str) -> None:
    found = find_format(tokens.__contains__)
    assert found is not None
    assert found.prompt("a", "b") == prompt


@pytest.mark.parametrize("tokens", [set(), {"<|fim_prefix|>", "<|fim_suffix|>"}, {"[SUFFIX]"}], ids=len)
def test_a_vocabulary_without_all_tokens_has_no_format(tokens: set[str]) -> None:
    assert find_format(tokens.__contains__) is None
