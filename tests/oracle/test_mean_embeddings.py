"""Models whose folder has the files of sentence-transformers embed as those say: the mean of all tokens' hidden states,
whatever the chunks, the batches and the prefixes in the cache, and prompts before the texts."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from caraserve.config import LOADING_MODES, PRELOADED_MODES
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.slot_allocator import SlotAllocator
from caraserve.model.families import load_plan
from tests.oracle.models import SOME_KINDS, prompt_of
from tests.oracle.subject import Subject, make_subject
from tests.serving import MIB, embed, engine_config, lora_config, model_config, running, submit

CONTEXT = 180
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(tmp_path_factory.mktemp("means"), {"r8": SOME_KINDS["r8"], "mlp": SOME_KINDS["mlp"]})


@pytest.mark.parametrize("mode", LOADING_MODES)
async def test_means_equal_those_of_transformers_in_every_loading_mode(subject: Subject, mode: str) -> None:
    """Chunks of at most 24 tokens beside generation and embeddings of last tokens, whose blocks are in the cache."""
    rng = random.Random(mode)
    asked = [(prompt_of(rng, tokens), name) for tokens in (1, 16, 70, CONTEXT) for name in (None, *subject.adapters)]
    device_bytes = 64 * MIB if mode in PRELOADED_MODES else 600 * 1024
    lora = lora_config(subject.adapters, mode=mode, link_mb_per_s=4.0, device_bytes=device_bytes)
    settings = engine_config(seqs=8, step_tokens=24)
    async with running(model_config(subject.model, max_model_len=CONTEXT), lora, settings) as engine:
        generated = submit(engine, asked[3][0], "r8", max_tokens=12)
        last = await asyncio.gather(*(embed(engine, *each) for each in asked))
        means = await asyncio.gather(*(embed(engine, *each, averages=True) for each in asked))
        answer = await generated
    for (prompt, name), one, mean in zip(asked, last, means, strict=True):
        subject.oracle.check_embedding(prompt, name, one.embedding)
        subject.oracle.check_embedding(prompt, name, mean.embedding, averages=True)
        assert mean.finish.cached_tokens == 0
    subject.oracle.check_greedy(asked[3][0], "r8", answer.token_ids)


async def test_a_preempted_prompt_has_the_same_mean(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[ActiveRequest] = []
    preempt = SlotAllocator.preempt
    monkeypatch.setattr(
        SlotAllocator, "preempt", lambda slots, active, now_s: (preempted.append(active), preempt(slots, active, now_s))
    )
    rng = random.Random(5)
    generated, prompt = [prompt_of(rng, 15) for _ in range(7)], prompt_of(rng, 150)
    kv_bytes = 20 * BLOCK_TOKENS * load_plan(subject.model).kv_bytes_per_token(4)
    settings = engine_config(seqs=8, step_tokens=16, kv_bytes=kv_bytes)
    lora = lora_config(subject.adapters, mode="cached")
    async with running(model_config(subject.model, max_model_len=CONTEXT), lora, settings) as engine:
        answers = [submit(engine, each, max_tokens=30) for each in generated]
        mean = await embed(engine, prompt, "r8", averages=True)
        await asyncio.gather(*answers)
    subject.oracle.check_embedding(prompt, "r8", mean.embedding, averages=True)
    assert preempted[0].request.inputs.averages


async def test_a_model_saved_without_a_head_embeds_like_with_one(subject: Subject, tmp_path: Path) -> None:
    """Its tensors, and those of its adapters, have no `model.` before their names."""
    model, adapter = tmp_path / "model", tmp_path / "r8"
    AutoModel.from_pretrained(subject.model).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    assert config["architectures"] == ["LlamaModel"]
    assert "embed_tokens.weight" in load_file(model / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((subject.model / name).read_bytes())
    adapter.mkdir()
    tensors = load_file(subject.adapters["r8"] / "adapter_model.safetensors")
    renamed = {name.replace("base_model.model.model.", "base_model.model."): one for name, one in tensors.items()}
    save_file(renamed, adapter / "adapter_model.safetensors")
    settings = json.loads((subject.adapters["r8"] / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"task_type": "FEATURE_EXTRACTION"}))
    prompt = prompt_of(random.Random(7), 30)
    async with running(model_config(model), lora_config({"r8": adapter}), engine_config()) as engine:
        for name in (None, "r8"):
            subject.oracle.check_embedding(prompt, name, (await embed(engine, prompt, name)).embedding)
