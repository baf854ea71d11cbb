"""Activated LoRA on an emulated device: a prompt is computed by the base model first, while the adapter is copied."""

import asyncio
import random

import pytest

from tests.gpu.answers import CONTEXT, check
from tests.gpu.host_backend import GRANULE_BYTES, serving
from tests.oracle.models import ALL_TARGETS, prompt_of
from tests.oracle.subject import Subject, make_subject
from tests.serving import MIB, Answer, engine_config, lora_config, model_config, submit

pytestmark = pytest.mark.usefixtures("torch_for_triton")

INVOCATION = [7, 8, 9]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    active = {"rank": 8, "targets": ALL_TARGETS, "invocation": INVOCATION}
    kinds = {"plain": {"rank": 8, "targets": ALL_TARGETS}, "active": active}
    return make_subject(tmp_path_factory.mktemp("activated"), kinds, "llama3")


@pytest.mark.parametrize("mode", ["pipelined", "assisted", "merged"])
def test_tokens_are_those_of_peft(subject: Subject, mode: str) -> None:
    rng = random.Random(mode)
    prompts = [prompt_of(rng, before) + INVOCATION + prompt_of(rng, 12) for before in (0, 16, 41, 70)]
    asked = [(prompt, name) for prompt in [*prompts, prompt_of(rng, 30)] for name in ("active", "plain")]
    pool_bytes = 24 * GRANULE_BYTES
    lora = lora_config(subject.adapters, mode=mode, device_bytes=pool_bytes, host_bytes=4 * MIB)

    async def serve() -> list[Answer]:
        settings = engine_config(seqs=6, step_tokens=48, kv_bytes=pool_bytes)
        async with serving(model_config(subject.model, max_model_len=CONTEXT), lora, settings) as (engine, _):
            return await asyncio.gather(*(submit(engine, *each, max_tokens=5) for each in asked))

    check(subject, asked, asyncio.run(serve()), 5)
