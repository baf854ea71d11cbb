"""Embeddings equal the last hidden states of transformers + peft, in one batch with generation."""

import asyncio
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from caraserve.config import LOADING_MODES, PRELOADED_MODES
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.slot_allocator import SlotAllocator
from caraserve.errors import NonFiniteLogits
from caraserve.model.families import load_plan
from tests.oracle.models import FAMILIES, SOME_KINDS, prompt_of
from tests.oracle.subject import Subject, make_subject
from tests.serving import MIB, embed, engine_config, lora_config, model_config, running, submit

CONTEXT = 180
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("embeddings"), SOME_KINDS)


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_embeds_like_peft(tmp_path_factory: pytest.TempPathFactory, family: str) -> None:
    model, adapters, oracle = make_subject(tmp_path_factory.mktemp(family), {"r8": SOME_KINDS["r8"]}, family)
    rng = random.Random(1)
    asked = [(prompt_of(rng, tokens), name) for tokens in (1, 16, 90) for name in (None, "r8")]
    async with running(model_config(model), lora_config(adapters), engine_config()) as engine:
        answers = await asyncio.gather(*(embed(engine, *each) for each in asked))
    for (prompt, adapter), answer in zip(asked, answers, strict=True):
        assert (answer.finish.reason, answer.finish.completion_tokens, answer.token_ids) == ("stop", 0, [])
        oracle.check_embedding(prompt, adapter, answer.embedding)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
async def test_neither_chunks_nor_other_requests_change_an_embedding(subject: Subject, prefix_caching: bool) -> None:
    """Chunks of at most 24 tokens, KV blocks for little more than one request, and generation in the same batches."""
    model, adapters, oracle = subject
    rng = random.Random(2)
    names = [None, *adapters]
    asked = [(prompt_of(rng, rng.choice((5, 16, 70, CONTEXT))), names[at % len(names)]) for at in range(18)]
    generated = [(prompt_of(rng, 20), name) for name in names]
    settings = engine_config(seqs=8, step_tokens=24, kv_bytes=kv_bytes(model, 20), prefix_caching=prefix_caching)
    async with running(model_config(model, max_model_len=CONTEXT), lora_config(adapters), settings) as engine:
        embeddings = [embed(engine, *each) for each in asked[:6]]
        answers = [submit(engine, *each, max_tokens=40) for each in generated]
        embeddings += [embed(engine, *each) for each in asked[6:]]
        embeddings, answers = await asyncio.gather(*embeddings), await asyncio.gather(*answers)
    for (prompt, adapter), answer in zip(asked, embeddings, strict=True):
        oracle.check_embedding(prompt, adapter, answer.embedding)
    oracle.check_answers(generated, answers)


async def test_a_preempted_prompt_is_embedded_all_the_same(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven answers take one more KV block each, of 20 in all, while the prompt is computed 9 tokens at a time."""
    model, adapters, oracle = subject
    preempted: list[ActiveRequest] = []
    preempt = SlotAllocator.preempt
    monkeypatch.setattr(
        SlotAllocator, "preempt", lambda slots, active, now_s: (preempted.append(active), preempt(slots, active, now_s))
    )
    rng = random.Random(5)
    generated = [prompt_of(rng, 15) for _ in range(7)]
    prompt = prompt_of(rng, 150)
    settings = engine_config(seqs=8, step_tokens=16, kv_bytes=kv_bytes(model, 20), prefix_caching=False)

    lora = lora_config(adapters, mode="cached")
    async with running(model_config(model, max_model_len=CONTEXT), lora, settings) as engine:
        answers = [submit(engine, each, max_tokens=30) for each in generated]
        embedding = await embed(engine, prompt, "r8")
        await asyncio.gather(*answers)
    oracle.check_embedding(prompt, "r8", embedding.embedding)
    assert preempted[0].request.inputs.embeds


async def test_an_embedding_that_is_not_finite_is_an_error(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of the base model in the same iteration is embedded."""
    monkeypatch.setattr("caraserve.lora.image_writer.LARGEST_UPDATE", math.inf)
    model, adapters, oracle = subject
    huge = shutil.copytree(adapters["r8"], tmp_path / "huge")
    tensors = load_file(huge / "adapter_model.safetensors")
    save_file(
        {name: torch.full_like(values, 3e38) for name, values in tensors.items()}, huge / "adapter_model.safetensors"
    )
    prompt = prompt_of(random.Random(6), 20)
    async with running(model_config(model), lora_config({"huge": huge}, mode="cached"), engine_config()) as engine:
        failed, embedded = await asyncio.gather(embed(engine, prompt, "huge"), embed(engine, prompt))
    assert isinstance(failed.finish.error, NonFiniteLogits)
    assert failed.embedding is None
    oracle.check_embedding(prompt, None, embedded.embedding)


def kv_bytes(model: Path, blocks: int) -> int:
    return blocks * BLOCK_TOKENS * load_plan(model).kv_bytes_per_token(4)


@pytest.mark.parametrize("tokens", [2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1])
async def test_a_prompt_whose_blocks_are_all_cached_is_embedded_all_the_same(subject: Subject, tokens: int) -> None:
    """The blocks come from a generation; its answer may in turn start from the blocks of an embedding."""
    model, adapters, oracle = subject
    prompt = prompt_of(random.Random(3), tokens)
    async with running(model_config(model), lora_config(adapters), engine_config()) as engine:
        await submit(engine, prompt, "r8", max_tokens=4)
        warm = [await embed(engine, prompt, name) for name in ("r8", "r13", None)]
        warm, answer = warm, await submit(engine, prompt, "r13", max_tokens=4)
    assert [one.finish.cached_tokens > 0 for one in warm] == [True, False, False]
    for name, one in zip(("r8", "r13", None), warm, strict=True):
        oracle.check_embedding(prompt, name, one.embedding)
    assert answer.finish.cached_tokens > 0
    oracle.check_greedy(prompt, "r13", answer.token_ids)


@pytest.mark.parametrize("mode", LOADING_MODES)
async def test_every_loading_mode_embeds_like_peft(subject: Subject, mode: str) -> None:
    """A slow link and a device cache for two or three adapters, so that nearly every request is a cold start."""
    model, adapters, oracle = subject
    rng = random.Random(mode)
    asked = [(prompt_of(rng, rng.choice((1, 17, 60))), name) for name in [None, *adapters] for _ in range(2)]
    rng.shuffle(asked)
    device_bytes = 64 * MIB if mode in PRELOADED_MODES else 600 * 1024
    lora = lora_config(adapters, mode=mode, link_mb_per_s=4.0, device_bytes=device_bytes)
    async with running(model_config(model), lora, engine_config(step_tokens=64)) as engine:
        answers = [embed(engine, *each) for each in asked]
        answers.append(submit(engine, *asked[0], max_tokens=6))
        *embeddings, answer = await asyncio.gather(*answers)
    for (prompt, adapter), found in zip(asked, embeddings, strict=True):
        oracle.check_embedding(prompt, adapter, found.embedding)
    oracle.check_greedy(*asked[0], answer.token_ids)


async def test_cancelled_embeddings_leave_nothing_behind(subject: Subject) -> None:
    model, adapters, oracle = subject
    rng = random.Random(4)
    asked = [(prompt_of(rng, 100), name) for name in (None, "r8", "mlp")]
    async with running(model_config(model), lora_config(adapters), engine_config(step_tokens=32)) as engine:
        left = [embed(engine, *each) for each in asked]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        answers = await asyncio.gather(*(embed(engine, *each) for each in asked))
    for (prompt, adapter), found in zip(asked, answers, strict=True):
        oracle.check_embedding(prompt, adapter, found.embedding)
