"""Prompts with vectors in place of tokens on the CUDA backend, over an emulated device, are answered as transformers
and peft answer them."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from caraserve.config import PRELOADED_MODES
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.queues import RequestQueues
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.memory import request_state
from tests.gpu.host_backend import GRANULE_BYTES, Host, serving
from tests.oracle.models import prompt_of
from tests.oracle.subject import Subject
from tests.oracle.vectors import are_freed_when_the_request_ends, embeds_of, vectors_of_tokens, with_vectors
from tests.serving import MIB, Answer, engine_config, lora_config, model_config, running, submit

CONTEXT = 100


pytestmark = pytest.mark.usefixtures("torch_for_triton")


@pytest.mark.parametrize(
    ("mode", "last", "graph_bytes"),
    [("pipelined", Lane.COPY, 0), ("overlapped", Lane.COMPUTE, 1 << 30), ("merged", None, 0)],
    ids=["kernels", "graphs", "merged"],
)
def test_the_vectors_of_tokens_answer_like_the_tokens(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, mode: str, last: Lane | None, graph_bytes: int
) -> None:
    """Vectors at the beginning, between tokens, and everywhere, sent seven at a time; in chunks beside prompts without
    vectors."""
    rng, vectors = random.Random(mode), vectors_of_tokens(subject.model)
    monkeypatch.setattr(request_state, "_STEP_BYTES", 7 * vectors[0].nbytes)
    prompts = [prompt_of(rng, tokens) for tokens in (1, 17, 40, 70)]
    places = [range(1), range(5, 12), range(40), [*range(0, 20, 3), *range(50, 70)]]
    asked = [
        (prompt, name, *with_vectors(prompt, held, vectors))
        for prompt, held in zip(prompts, places, strict=True)
        for name in (None, "r8", "r64")
    ]
    pool_bytes = (64 if mode in PRELOADED_MODES else 24) * GRANULE_BYTES
    lora = lora_config(subject.adapters, mode=mode, device_bytes=pool_bytes, host_bytes=4 * MIB)
    settings = engine_config(seqs=6, step_tokens=70, kv_bytes=pool_bytes)
    model = model_config(subject.model, max_model_len=CONTEXT)

    async def serve() -> tuple[list[Answer], list[Answer], Host]:
        async with serving(model, lora, settings, seed=4, last=last, graph_bytes=graph_bytes) as (engine, host):
            answers, plain = [], []
            for prompt, name, mixed, embeds in asked:
                answers.append(submit(engine, mixed, name, prompt_embeds=embeds, max_tokens=5))
                plain.append(submit(engine, prompt, name, max_tokens=5))
            return await asyncio.gather(*answers), await asyncio.gather(*plain), host

    answers, plain, host = asyncio.run(serve())
    assert bool(host.driver.replays) == bool(graph_bytes)
    for (prompt, name, _, _), *both in zip(asked, answers, plain, strict=True):
        for answer in both:
            subject.oracle.check_greedy(prompt, name, answer.token_ids)


def test_vectors_are_there_again_after_a_preemption(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[ActiveRequest] = []
    preempt = RequestQueues.preempt

    def counting(queues: RequestQueues, active: ActiveRequest) -> None:
        preempted.append(active)
        preempt(queues, active)

    monkeypatch.setattr(RequestQueues, "preempt", counting)
    rng, vectors = random.Random(7), vectors_of_tokens(subject.model)
    prompts = [prompt_of(rng, 60) for _ in range(3)]
    lora = lora_config({}, mode="cached", device_bytes=GRANULE_BYTES, host_bytes=MIB)
    settings = engine_config(seqs=3, step_tokens=48, kv_bytes=3 * GRANULE_BYTES)

    async def serve() -> list[Answer]:
        async with serving(model_config(subject.model, max_model_len=CONTEXT), lora, settings) as (engine, _):
            both = [with_vectors(prompt, range(1, 60), vectors) for prompt in prompts]
            answers = [submit(engine, mixed, prompt_embeds=embeds, max_tokens=30) for mixed, embeds in both]
            return await asyncio.gather(*answers)

    for prompt, answer in zip(prompts, asyncio.run(serve()), strict=True):
        subject.oracle.check_greedy(prompt, None, answer.token_ids)
    assert preempted


def test_vectors_are_freed_when_their_request_ends(subject: Subject) -> None:
    lora = lora_config({}, mode="cached", device_bytes=GRANULE_BYTES, host_bytes=MIB)
    settings = engine_config(seqs=3, step_tokens=48, kv_bytes=3 * GRANULE_BYTES)

    async def serve() -> bool:
        async with serving(model_config(subject.model, max_model_len=CONTEXT), lora, settings) as (engine, _):
            return await are_freed_when_the_request_ends(engine, vectors_of_tokens(subject.model)[:40])

    assert asyncio.run(serve())


def test_other_vectors_are_sampled_as_on_the_cpu_backend(subject: Subject) -> None:
    """Vectors of no token, with penalties, which count tokens alone."""
    rng, own = np.random.default_rng(2), vectors_of_tokens(subject.model)
    values = (own[rng.integers(2, len(own), 60)] + own[rng.integers(2, len(own), 60)]) / 2
    prompt = [5, *range(-1, -61, -1), 7, 9]
    params: dict[str, Any] = {"temperature": 0.9, "seed": 3, "repetition_penalty": 3.0, "presence_penalty": 0.5}
    model, lora = model_config(subject.model, max_model_len=CONTEXT), lora_config(subject.adapters)

    async def serve() -> tuple[Answer, Answer]:
        async with (
            serving(model, lora, engine_config(step_tokens=48, kv_bytes=24 * GRANULE_BYTES)) as (engine, _),
            running(model, lora, engine_config()) as on_the_cpu,
        ):
            both = [
                submit(each, prompt, "r64", prompt_embeds=embeds_of(values), max_tokens=12, **params)
                for each in (engine, on_the_cpu)
            ]
            return await both[0], await both[1]

    answer, wanted = asyncio.run(serve())
    assert answer.token_ids == wanted.token_ids
