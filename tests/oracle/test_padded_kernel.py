"""--lora-kernel bgmv-padded on the CPU: the tokens of peft, at the cost of the largest rank in the batch."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from caraserve.cpu.backend import CpuBackend
from caraserve.errors import NonFiniteLogits
from tests.oracle.models import prompt_of
from tests.oracle.subject import Subject, make_subject
from tests.serving import Answer, engine_config, lora_config, model_config, running, submit


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("padded"))


async def answers_of(
    subject: Subject, asked: Sequence[tuple[list[int], str | None]], *, poisoned: bool = False
) -> list[Answer]:
    """Answers of one engine to all requests together. `poisoned`: with NaN for the zeros that adapters are padded
    with, so that an answer fails if its rows compute any."""
    # All adapters are loaded at the start, so that requests run in the same iterations.
    lora = replace(lora_config(subject.adapters, mode="cached"), lora_kernel="bgmv-padded")
    async with running(model_config(subject.model), lora, engine_config(threads=2)) as engine:
        backend = engine._backend
        assert isinstance(backend, CpuBackend)
        if poisoned:
            backend._adapters._zeros[:] = np.uint8(0xFF)
        return await asyncio.gather(*(submit(engine, *each, max_tokens=12) for each in asked))


async def test_tokens_are_those_of_peft_in_batches_of_mixed_ranks_and_prefills_beside_them(subject: Subject) -> None:
    rng = random.Random(1)
    names = [None, *subject.adapters] * 2
    asked = [(prompt_of(rng, tokens), name) for tokens, name in zip([3, 40, 1, 150] * 4, names, strict=False)]
    for (prompt, adapter), answer in zip(asked, await answers_of(subject, asked), strict=True):
        assert len(answer.token_ids) == 12
        subject.oracle.check_greedy(prompt, adapter, answer.token_ids)


@pytest.mark.parametrize("name", ["r8", "r64"])
async def test_adapters_of_one_rank_are_not_padded(subject: Subject, name: str) -> None:
    prompt = prompt_of(random.Random(2), 20)
    answer, base = await answers_of(subject, [(prompt, name), (prompt, None)], poisoned=True)
    assert len(answer.token_ids) == len(base.token_ids) == 12
    subject.oracle.check_greedy(prompt, name, answer.token_ids)


async def test_a_smaller_rank_beside_a_larger_one_computes_padding_and_that_does_not(
    subject: Subject,
) -> None:
    prompt = prompt_of(random.Random(3), 20)
    small, large, base = await answers_of(subject, [(prompt, "r8"), (prompt, "r64"), (prompt, None)], poisoned=True)
    assert isinstance(small.finish.error, NonFiniteLogits)
    assert len(base.token_ids) == len(large.token_ids) == 12
    subject.oracle.check_greedy(prompt, "r64", large.token_ids)
