"""A model with experts answers like peft, with adapters of attention and of shared experts, however they are loaded and
computed."""

import asyncio
import os
import random
from dataclasses import replace

import pytest

from caraserve.cpu.backend import CpuBackend
from tests.oracle.models import ALL_TARGETS, Kinds, prompt_of
from tests.oracle.subject import Subject, make_subject
from tests.serving import engine_config, lora_config, model_config, running, submit

KINDS: Kinds = {
    "r8": {"rank": 8, "targets": (*ALL_TARGETS, "shared_expert_gate")},
    "r24": {"rank": 24, "targets": ALL_TARGETS, "dtype": "float16"},
    "mlp": {"rank": 5, "targets": ("gate_proj", "up_proj", "down_proj", "shared_expert_gate"), "layers": [1]},
}
WORKER_CORES = tuple(sorted(os.sched_getaffinity(0)))


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("experts"), KINDS, "qwen2_moe")


@pytest.mark.parametrize("kernel", ["bgmv", "bgmv-padded"])
async def test_requests_in_one_batch_answer_like_peft(subject: Subject, kernel: str) -> None:
    rng = random.Random(kernel)
    asked = [(prompt_of(rng, tokens), name) for tokens in (1, 3, 40, 130) for name in (None, *subject.adapters)]
    lora = replace(lora_config(subject.adapters, mode="cached"), lora_kernel=kernel)
    async with running(model_config(subject.model), lora, engine_config(threads=2, step_tokens=64)) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=8) for each in asked))
    subject.oracle.check_answers(asked, answers)


async def test_workers_compute_adapters_of_shared_experts_while_they_arrive(subject: Subject) -> None:
    asked = [(prompt_of(random.Random(3), 60), name) for name in ("r8", "mlp")]
    lora = lora_config(subject.adapters, mode="assisted", link_mb_per_s=0.01, lora_cpus=WORKER_CORES)
    async with running(model_config(subject.model), lora, engine_config(step_tokens=64)) as engine:
        backend = engine._backend
        assert isinstance(backend, CpuBackend)
        assert backend.workers.await_all(timeout_s=30)
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=2) for each in asked))
        assert backend.slices_handed_off > 0
    subject.oracle.check_answers(asked, answers)


async def test_a_merged_adapter_of_a_shared_expert_answers_like_peft(subject: Subject) -> None:
    prompt = prompt_of(random.Random(5), 30)
    async with running(
        model_config(subject.model), lora_config(subject.adapters, mode="merged"), engine_config(threads=2)
    ) as engine:
        answer = await submit(engine, prompt, "r8", max_tokens=8)
        assert isinstance(engine._backend, CpuBackend)
        assert engine._backend.adapters_merged == 1
    subject.oracle.check_greedy(prompt, "r8", answer.token_ids)
