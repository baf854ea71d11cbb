"""An activated LoRA is active from the last occurrence of its invocation tokens, as in peft; before it, the base model
computes the prompt, whose KV blocks both share."""

import asyncio
import random

import pytest

from caraserve.core.lora_layout import NEVER, AdapterSpec
from caraserve.loop import Engine
from caraserve.model.dtype import Dtype
from tests.oracle.models import ALL_TARGETS, Kinds, prompt_of
from tests.oracle.subject import Subject, make_subject
from tests.serving import MIB, embed, engine_config, lora_config, model_config, running, submit

INVOCATION = [7, 8, 9]
KINDS: Kinds = {
    "plain": {"rank": 8, "targets": ALL_TARGETS},
    "active": {"rank": 8, "targets": ALL_TARGETS, "invocation": INVOCATION},
    "other": {"rank": 4, "targets": ("q_proj", "v_proj"), "invocation": INVOCATION},
}
BLOCK = 16


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("activated"), KINDS, "llama3")


def prompt_with(*places: int, tokens: int = 44, seed: int = 1) -> list[int]:
    """Returns a prompt with the invocation tokens at these places."""
    prompt = [token + 8 if token in INVOCATION else token for token in prompt_of(random.Random(seed), tokens)]
    for place in places:
        prompt[place : place + len(INVOCATION)] = INVOCATION
    return prompt


PROMPTS = {
    "twice": prompt_with(8, 20),
    "nowhere": prompt_with(),
    "at the start": prompt_with(0),
    "at the end": prompt_with(41),
    "at a block's start": prompt_with(2 * BLOCK),
    "over a block's end": prompt_with(2 * BLOCK - 1),
    "incomplete at the end": [*prompt_with(5), *INVOCATION[:2]],
}


async def cached_tokens(engine: Engine, subject: Subject, prompt: list[int], adapter: str | None) -> int:
    """Returns how many tokens of a prompt were found in the cache, after checking the answer."""
    answer = await submit(engine, prompt, adapter)
    subject.oracle.check_greedy(prompt, adapter, answer.token_ids)
    return answer.finish.cached_tokens


@pytest.mark.parametrize("step_tokens", [16, 24, 256])
@pytest.mark.parametrize("mode", ["overlapped", "assisted", "ondemand", "merged"])
async def test_every_place_answers_like_peft(subject: Subject, step_tokens: int, mode: str) -> None:
    """All prompts for all adapters in the same batches, in chunks that end before, at and after the activation."""
    asked = [(prompt, name) for prompt in PROMPTS.values() for name in (None, *subject.adapters)]
    settings = engine_config(step_tokens=step_tokens)
    async with running(model_config(subject.model), lora_config(subject.adapters, mode=mode), settings) as engine:
        answers = await asyncio.gather(*(submit(engine, *each) for each in asked))
    subject.oracle.check_answers(asked, answers)
    outputs = dict(zip(((tuple(prompt), name) for prompt, name in asked), answers, strict=True))
    nowhere, twice = tuple(PROMPTS["nowhere"]), tuple(PROMPTS["twice"])
    assert outputs[nowhere, "active"].token_ids == outputs[nowhere, None].token_ids
    assert outputs[twice, "active"].token_ids != outputs[twice, None].token_ids


async def test_blocks_before_the_activation_are_shared_with_the_base_model(subject: Subject) -> None:
    prompt = prompt_with(2 * BLOCK + 2, seed=2)
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        assert await cached_tokens(engine, subject, prompt, None) == 0
        assert await cached_tokens(engine, subject, prompt, "active") == 2 * BLOCK
        assert await cached_tokens(engine, subject, prompt, "other") == 2 * BLOCK
        assert await cached_tokens(engine, subject, prompt, "plain") == 0

        other = prompt_with(2 * BLOCK + 2, tokens=64, seed=3)
        assert await cached_tokens(engine, subject, other, "active") == 0
        assert await cached_tokens(engine, subject, other, None) == 2 * BLOCK
        assert await cached_tokens(engine, subject, other, "active") == 3 * BLOCK
        assert await cached_tokens(engine, subject, other, None) == 3 * BLOCK


async def test_a_block_after_another_activation_is_not_reused(subject: Subject) -> None:
    """Of two prompts with the same beginning, only one has the invocation tokens again after it."""
    first = prompt_with(4, tokens=56, seed=4)
    second = [*first[:50], *INVOCATION, 20]
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        assert await cached_tokens(engine, subject, first, "active") == 0
        assert await cached_tokens(engine, subject, second, "active") == 0
        assert await cached_tokens(engine, subject, first, "active") == 3 * BLOCK
        assert await cached_tokens(engine, subject, second, None) == 3 * BLOCK


async def test_preempted_requests_are_activated_at_the_same_place(subject: Subject) -> None:
    """A pool of 13 blocks for requests of 4 to 6 blocks."""
    asked = [(prompt_with(8, 20 + 3 * each, seed=each), "active") for each in range(8)]
    model = model_config(subject.model, max_model_len=200)
    settings = engine_config(kv_bytes=MIB // 8 + MIB // 16, step_tokens=24)
    async with running(model, lora_config(subject.adapters), settings) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=40) for each in asked))
    subject.oracle.check_answers(asked, answers)
    assert any(sum(part.name == "queued" for part in answer.finish.phases.history) > 1 for answer in answers)


async def test_scores_and_embeddings_of_prompts_are_those_of_peft(subject: Subject) -> None:
    prompt = PROMPTS["twice"]
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        answer = await submit(engine, prompt, "active", prompt_logprobs=3, max_tokens=1)
        embedded = await embed(engine, prompt, "active")
    _, *scores = answer.prompt_logprobs
    subject.oracle.check_scores(prompt, "active", [score for score in scores if score is not None], 3)
    subject.oracle.check_embedding(prompt, "active", embedded.embedding)


def test_the_last_occurrence_activates_whatever_the_tokens_around_it() -> None:
    """Tokens of all sizes, of which an occurrence within a token's bytes is none."""

    def active_from(invocation: list[int], prompt: list[int]) -> int:
        return AdapterSpec("", Dtype.F32, 1, (), (0,), (), invocation=tuple(invocation)).active_from(prompt)

    assert active_from([], [1, 2]) == 0
    assert active_from([1, 2], [1, 2, 1, 2, 1]) == 2
    assert active_from([1, 2], [2, 1]) == NEVER
    assert active_from([1, 2], []) == NEVER
    assert active_from([0, 1], [0, 0, 256, 0, 1 << 16, -1]) == NEVER
    assert active_from([0, 1], [0, 1, 0, 256, -3, 0, 1 << 24]) == 0
