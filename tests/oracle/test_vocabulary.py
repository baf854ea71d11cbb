"""LoRA of the embedding and the head, and replaced rows of both, change tokens as in peft: with tied and untied bases,
and scaled embeddings, in one batch with other adapters."""

import asyncio
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.oracle.models import ALL_TARGETS, Kinds, make_adapters, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.serving import engine_config, lora_config, model_config, running, submit

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")

TOKENS = [5, 340, 7, 64, 128, 129]
KINDS: Kinds = {
    "plain": {"rank": 8, "targets": ALL_TARGETS},
    "head": {"rank": 5, "targets": ("q_proj", "lm_head"), "rank_pattern": {"lm_head": 12}},
    "embedding": {"rank": 4, "targets": ("v_proj", "embed_tokens"), "dtype": "bfloat16"},
    "both": {"rank": 16, "targets": ("embed_tokens", "lm_head"), "rslora": True, "dtype": "float16"},
    "rows": {"rank": 4, "targets": ("q_proj",), "tokens": TOKENS},
}
UNTIED: Kinds = {
    "head-rows": {"rank": 4, "targets": ("q_proj", "embed_tokens"), "tokens": {"lm_head": TOKENS[:3]}},
    "two-tables": {"rank": 4, "targets": ("q_proj",), "tokens": {"lm_head": TOKENS[:3], "embed_tokens": TOKENS}},
}
BASES = {"llama3": {**KINDS, **UNTIED}, "qwen2": KINDS, "gemma3": KINDS}


class Subject(NamedTuple):
    """A model with adapters, and an oracle for each of them and none: peft cannot wrap an embedding twice."""

    model: Path
    adapters: dict[str, Path]
    oracles: dict[str | None, Oracle]


@pytest.fixture(scope="module", params=BASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """An untied base, a tied one, and a tied one whose embedding is scaled."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model", request.param)
    adapters = make_adapters(folder, model, BASES[request.param])
    oracles = {name: Oracle(model, {name: path}) for name, path in adapters.items()}
    return Subject(model, adapters, {None: Oracle(model), **oracles})


def prompts_with_changed_tokens(count: int) -> list[list[int]]:
    """Returns prompts in which every fifth token is one whose row some adapters replace."""
    rng = random.Random(3)
    return [
        [rng.choice(TOKENS) if place % 5 == 2 else token for place, token in enumerate(prompt_of(rng, 37))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("mode", ["overlapped", "assisted", "merged"])
async def test_tokens_are_those_of_peft(subject: Subject, mode: str) -> None:
    """All adapters and none, in the same batches, in chunks; with two threads, which share the panels of the head."""
    asked = [(prompt, name) for prompt in prompts_with_changed_tokens(3) for name in subject.oracles]
    lora, settings = lora_config(subject.adapters, mode=mode), engine_config(step_tokens=100, threads=2)
    async with running(model_config(subject.model), lora, settings) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=12) for each in asked))
    for (prompt, name), answer in zip(asked, answers, strict=True):
        subject.oracles[name].check_greedy(prompt, name, answer.token_ids)


async def test_scores_of_prompts_are_those_of_peft(subject: Subject) -> None:
    """Each adapter moves the scores by far more than the tolerance, so that the tests can fail."""
    (prompt,) = prompts_with_changed_tokens(1)
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        tasks = {name: submit(engine, prompt, name, prompt_logprobs=3, max_tokens=1) for name in subject.adapters}
        answers = {name: await task for name, task in tasks.items()}
    base = subject.oracles[None].logits(prompt, None)
    for name, answer in answers.items():
        _, *scores = answer.prompt_logprobs
        subject.oracles[name].check_scores(prompt, name, [score for score in scores if score is not None], 3)
        assert (subject.oracles[name].logits(prompt, name) - base).abs().max() > 0.5
