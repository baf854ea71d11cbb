"""Prompts with vectors in place of tokens are answered as transformers + peft answer them."""

import asyncio
import random

import numpy as np
import pytest
import torch

from caraserve.model.families import load_plan
from tests.oracle.models import SOME_KINDS, prompt_of
from tests.oracle.subject import Subject, make_subject
from tests.oracle.vectors import are_freed_when_the_request_ends, embeds_of, vectors_of_tokens, with_vectors
from tests.serving import Answer, engine_config, lora_config, model_config, running, submit

KINDS = {"r8": SOME_KINDS["r8"], "r64": SOME_KINDS["r64"]}
BLOCK_TOKENS = 16
OUTPUT_TOKENS = 8


@pytest.fixture(scope="module", params=["llama3", "qwen2"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("embeds"), KINDS, request.param)


@pytest.mark.parametrize("mode", ["overlapped", "assisted", "merged"])
def test_the_vectors_of_tokens_answer_like_the_tokens(subject: Subject, mode: str) -> None:
    """Vectors at the beginning, between tokens, and everywhere; in chunks of 24 tokens beside prompts without vectors,
    with KV blocks for a part of the requests, so that some are preempted."""
    rng, vectors = random.Random(1), vectors_of_tokens(subject.model)
    prompts = [prompt_of(rng, tokens) for tokens in (1, 17, 40, 70)]
    places = [range(1), range(5, 12), range(40), [*range(20), *range(50, 70)]]
    asked = [
        (*with_vectors(*each, vectors), name) for each in zip(prompts, places, strict=True) for name in (None, *KINDS)
    ]

    async def serve() -> list[Answer]:
        kv_bytes = 12 * BLOCK_TOKENS * load_plan(subject.model).kv_bytes_per_token(4)
        settings = engine_config(seqs=6, step_tokens=24, kv_bytes=kv_bytes)
        async with running(
            model_config(subject.model, max_model_len=100), lora_config(subject.adapters, mode=mode), settings
        ) as engine:
            answers = [
                submit(engine, ids, name, prompt_embeds=embeds, max_tokens=OUTPUT_TOKENS) for ids, embeds, name in asked
            ]
            plain = submit(engine, prompts[2], "r8", max_tokens=OUTPUT_TOKENS)
            return [*await asyncio.gather(*answers), await plain]

    *answers, plain = asyncio.run(serve())
    for (_, _, name), prompt, answer in zip(asked, [one for one in prompts for _ in range(3)], answers, strict=True):
        assert answer.finish.prompt_tokens == len(prompt)
        subject.oracle.check_greedy(prompt, name, answer.token_ids)
    subject.oracle.check_greedy(prompts[2], "r8", plain.token_ids)


def test_other_vectors_answer_like_transformers(subject: Subject) -> None:
    """Vectors of no token, sampled with penalties, which count tokens alone."""
    rng, own = np.random.default_rng(2), vectors_of_tokens(subject.model)
    values = (own[rng.integers(2, len(own), 150)] + own[rng.integers(2, len(own), 150)]) / 2
    prompt = [5, *range(-1, -151, -1), 7, 9]
    embedded = np.concatenate([own[5:6], values, own[[7, 9]]])

    async def serve() -> tuple[Answer, Answer]:
        async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
            asked = {"prompt_embeds": embeds_of(values), "max_tokens": OUTPUT_TOKENS}
            return await submit(engine, prompt, "r64", **asked), await submit(
                engine, prompt, "r64", repetition_penalty=5.0, **asked
            )  # type: ignore[arg-type]

    plain, penalized = asyncio.run(serve())
    for answer, penalty in ((plain, 1.0), (penalized, 5.0)):
        seen, states = {5, 7, 9}, torch.from_numpy(embedded)
        for token in answer.token_ids:
            logits = subject.oracle.logits_of_embeds(states, "r64")[-1]
            at = torch.tensor(sorted(seen))
            logits[at] = torch.where(logits[at] > 0, logits[at] / penalty, logits[at] * penalty)
            assert float(logits.max() - logits[token]) < 1e-4
            seen.add(token)
            states = torch.cat([states, torch.from_numpy(own[token : token + 1])])


def test_prefixes_are_shared_by_equal_vectors_alone(subject: Subject) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((64, vectors_of_tokens(subject.model).shape[1])).astype(np.float32)
    others = values.copy()
    others[20] += 1  # in the second KV block
    prompt = [*range(-1, -65, -1), 5]

    async def serve() -> list[Answer]:
        async with running(model_config(subject.model), lora_config({}), engine_config()) as engine:
            return [
                await submit(engine, prompt, prompt_embeds=embeds_of(each)) for each in (values, values.copy(), others)
            ]

    first, again, other = asyncio.run(serve())
    assert [answer.finish.cached_tokens for answer in (first, again, other)] == [0, 64, 16]
    assert first.token_ids == again.token_ids


def test_vectors_are_freed_when_their_request_ends(subject: Subject) -> None:
    async def serve() -> bool:
        async with running(model_config(subject.model), lora_config({}), engine_config()) as engine:
            return await are_freed_when_the_request_ends(engine, vectors_of_tokens(subject.model)[:40])

    assert asyncio.run(serve())
