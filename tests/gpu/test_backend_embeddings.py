"""Embeddings of the CUDA backend, over an emulated device, equal the hidden states of transformers and peft, in one
batch with generation."""

import asyncio
import random

import pytest

from caraserve.config import PRELOADED_MODES
from caraserve.gpu.driver.streams import Lane
from tests.gpu.host_backend import GRANULE_BYTES, serving
from tests.oracle.models import prompt_of
from tests.oracle.subject import Subject
from tests.serving import MIB, Answer, embed, engine_config, lora_config, model_config, submit

CONTEXT = 200


pytestmark = pytest.mark.usefixtures("torch_for_triton")


@pytest.mark.parametrize(
    ("mode", "last", "graph_bytes"),
    [("pipelined", Lane.COPY, 0), ("pipelined", None, 1 << 30), ("merged", None, 0)],
    ids=["kernels", "graphs", "merged"],
)
def test_embeddings_equal_those_of_peft_beside_generation(
    subject: Subject, mode: str, last: Lane | None, graph_bytes: int
) -> None:
    """Prompts of one token, which decoding kernels compute, and of several chunks; memory for three adapters."""
    rng = random.Random(mode)
    names = [None, *subject.adapters]
    asked = [(prompt_of(rng, rng.choice((1, 2, 17, 60, CONTEXT))), names[at % len(names)]) for at in range(8)]
    pool_bytes = (64 if mode in PRELOADED_MODES else 24) * GRANULE_BYTES
    lora = lora_config(subject.adapters, mode=mode, device_bytes=pool_bytes, host_bytes=4 * MIB)
    settings = engine_config(seqs=6, step_tokens=48, kv_bytes=pool_bytes)
    model = model_config(subject.model, max_model_len=CONTEXT)

    async def serve() -> tuple[list[Answer], list[Answer]]:
        async with serving(model, lora, settings, seed=3, last=last, graph_bytes=graph_bytes) as (engine, _):
            answers, embeddings = [], []
            for prompt, name in asked:
                answers.append(submit(engine, prompt[:20], name, max_tokens=4))
                embeddings.append(embed(engine, prompt, name))
                await asyncio.sleep(0)
            return await asyncio.gather(*answers), await asyncio.gather(*embeddings)

    for (prompt, name), answer, embedding in zip(asked, *asyncio.run(serve()), strict=True):
        subject.oracle.check_greedy(prompt[:20], name, answer.token_ids)
        subject.oracle.check_embedding(prompt, name, embedding.embedding)


@pytest.mark.parametrize("mode", ["pipelined", "assisted"])
def test_means_of_all_tokens_equal_those_of_peft(subject: Subject, mode: str) -> None:
    """Prompts of several chunks, beside embeddings of last tokens; adapters arrive while their prompts are computed."""
    rng = random.Random(mode)
    names = [None, *subject.adapters]
    asked = [(prompt_of(rng, rng.choice((1, 17, 60, CONTEXT))), names[at % len(names)]) for at in range(6)]
    lora = lora_config(subject.adapters, mode=mode, device_bytes=24 * GRANULE_BYTES, host_bytes=4 * MIB)
    settings = engine_config(seqs=6, step_tokens=48, kv_bytes=24 * GRANULE_BYTES)
    model = model_config(subject.model, max_model_len=CONTEXT)

    async def serve() -> tuple[list[Answer], list[Answer]]:
        async with serving(model, lora, settings, seed=3, averages=True) as (engine, _):
            last = [embed(engine, prompt[:30], name) for prompt, name in asked]
            means = [embed(engine, *each, averages=True) for each in asked]
            return await asyncio.gather(*last), await asyncio.gather(*means)

    for (prompt, name), last, mean in zip(asked, *asyncio.run(serve()), strict=True):
        subject.oracle.check_embedding(prompt[:30], name, last.embedding)
        subject.oracle.check_embedding(prompt, name, mean.embedding, averages=True)
