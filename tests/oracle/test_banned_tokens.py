"""Answers without banned words and with allowed tokens only, token for token as transformers' processors have them."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor, NoBadWordsLogitsProcessor, SuppressTokensLogitsProcessor

from caraserve.core.token_filter import TokenFilter
from tests.oracle.models import SOME_KINDS, VOCAB_SIZE, make_adapters, make_model
from tests.oracle.oracle import Oracle
from tests.serving import engine_config, lora_config, model_config, running, submit

PROMPTS = [tuple((31 * at * at + 7 * row) % 340 + 2 for at in range(5 + 9 * row)) for row in range(6)]
TOKENS = 16


def filtered(oracle: Oracle, prompt: Sequence[int], adapter: str | None, processor: LogitsProcessor) -> list[int]:
    """Decodes greedily with a processor that sees the answer, as in vLLM, and not the prompt."""
    output: list[int] = []
    for _ in range(TOKENS):
        scores = oracle.logits([*prompt, *output], adapter)[-1:].clone()
        output.append(int(processor(torch.tensor([output], dtype=torch.long), scores)[0].argmax()))
    return output


def allowing(ids: Sequence[int]) -> LogitsProcessor:
    return SuppressTokensLogitsProcessor([one for one in range(VOCAB_SIZE) if one not in ids])


def banning(words: Sequence[Sequence[int]]) -> LogitsProcessor:
    return NoBadWordsLogitsProcessor([list(word) for word in words])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    folder = tmp_path_factory.mktemp("banned")
    model = make_model(folder / "model", "llama3")
    return model, make_adapters(folder, model, {name: SOME_KINDS[name] for name in ("r8", "r13")})


async def test_answers_are_those_of_transformers(folders: tuple[Path, dict[str, Path]]) -> None:
    model, adapters = folders
    oracle = Oracle(model, adapters)
    names = [None, *adapters]
    asked = [(prompt, names[at % len(names)]) for at, prompt in enumerate(PROMPTS)]
    free = [oracle.greedy(prompt, adapter, TOKENS) for prompt, adapter in asked]
    # Words of the free answers, so that each ban changes one: one token, two and three of them, and a prefix of those.
    banned = [[output[1:2], output[4:6], output[6:9], output[8:10]] for output in free]
    allowed = [sorted({*output[::3], 5, 17, 200, 351}) for output in free]

    async def serve(make: Callable[[int], TokenFilter]) -> list[list[int]]:
        settings = engine_config(seqs=4, prefix_caching=False)
        async with running(model_config(model), lora_config(adapters), settings) as engine:
            answers = [submit(engine, *one, grammar=make(at), max_tokens=TOKENS) for at, one in enumerate(asked)]
            return [answer.token_ids for answer in await asyncio.gather(*answers)]

    def without_words(at: int) -> TokenFilter:
        return TokenFilter.of(VOCAB_SIZE, None, banned[at], end_ids=(), min_tokens=0, grammar=None)

    def within(at: int) -> TokenFilter:
        return TokenFilter.of(VOCAB_SIZE, allowed[at], (), end_ids=(), min_tokens=0, grammar=None)

    for at, output in enumerate(await serve(without_words)):
        assert output == filtered(oracle, *asked[at], banning(banned[at]))
        assert output != free[at]
    for at, output in enumerate(await serve(within)):
        assert output == filtered(oracle, *asked[at], allowing(allowed[at]))
        assert set(output) <= set(allowed[at])
