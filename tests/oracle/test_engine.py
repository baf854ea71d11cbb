"""Served tokens equal those of transformers + peft, for any batch, chunks, preemptions and evictions."""

import asyncio
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from caraserve.core.request import MAX_PROMPT_LOGPROBS
from caraserve.errors import NonFiniteLogits
from caraserve.model.families import load_plan
from tests.oracle.models import FAMILIES, SOME_KINDS, Kinds, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.oracle.subject import Subject, make_subject
from tests.serving import MIB, engine_config, lora_config, model_config, running, submit

PROMPT_TOKENS = (1, 2, 15, 16, 17, 33, 64, 150, 300)
KINDS: Kinds = {
    **SOME_KINDS,
    "mixed": {
        "rank": 4,
        "targets": ("k_proj", "o_proj", "down_proj"),
        "rank_pattern": {"o_proj": 24},
        "alpha_pattern": {"layers.0.mlp.down_proj": 3},
    },
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return {family: make_subject(tmp_path_factory.mktemp(family), KINDS, family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
async def test_every_family_answers_like_peft(families: dict[str, Subject], family: str) -> None:
    """Prompts of 1 to 300 tokens, for the base model and every adapter, in one batch."""
    subject, rng = families[family], random.Random(1)
    names = [None, *subject.adapters]
    asked = [(prompt_of(rng, tokens), rng.choice(names)) for tokens in PROMPT_TOKENS for _ in range(2)]
    asked += [(prompt_of(rng, 20), name) for name in names]

    engine_settings = engine_config(threads=2)
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_settings) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=12) for each in asked))
        found = [answer.token_ids for answer in answers]
    for (prompt, adapter), output in zip(asked, found, strict=True):
        assert len(output) == 12
        subject.oracle.check_greedy(prompt, adapter, output)
    assert subject.oracle.forgiven_ties <= subject.oracle.checked_tokens // 100


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_are_those_of_peft(families: dict[str, Subject], family: str) -> None:
    subject, rng = families[family], random.Random(2)
    asked = [(prompt_of(rng, 30), name) for name in (None, "r8", "mixed")]
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=6, logprobs=5) for each in asked))
        assert all(
            (entry.top_ids[0], entry.top_logprobs[0]) == (entry.token_id, entry.logprob) and len(entry.top_ids) == 5
            for answer in answers
            for entry in answer.logprobs
        )
        found = [(answer.token_ids, [entry.logprob for entry in answer.logprobs]) for answer in answers]
    for (prompt, adapter), (output, logprobs) in zip(asked, found, strict=True):
        subject.oracle.check_logprobs(prompt, adapter, output, logprobs, atol=1e-3)


@pytest.mark.parametrize("family", ["llama3", "mistral"])
async def test_a_long_prompt_is_answered_like_peft(families: dict[str, Subject], family: str) -> None:
    """2,100 tokens: large rotary angles, the sliding window, and attention over more than 128 KV blocks."""
    subject, rng = families[family], random.Random(3)
    prompt = prompt_of(rng, 2100)

    model = model_config(subject.model, max_model_len=2200)
    async with running(model, lora_config(subject.adapters), engine_config(step_tokens=512, threads=2)) as engine:
        answer = await submit(engine, prompt, "r8", max_tokens=6, prompt_logprobs=0)
    subject.oracle.check_greedy(prompt, "r8", answer.token_ids)
    scores = [entry.logprob for entry in answer.prompt_logprobs if entry is not None]
    subject.oracle.check_logprobs(prompt[:1], "r8", prompt[1:], scores)


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[list[int], str | None, int, bool]]:
    """Draws requests (prompt, adapter, output tokens, whether to cancel); many prompts share prefixes."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    stems = [prompt_of(rng, 70) for _ in range(2)]
    names = [None, "r1", "r8", "r13", "r64", "mlp", "mixed"]
    requests = []
    for _ in range(draw(st.integers(2, 14))):
        stem = rng.choice(stems)[: rng.choice((0, 16, 40, 70))]
        prompt = stem + prompt_of(rng, rng.randrange(1, 40))
        requests.append((prompt, rng.choice(names), rng.randrange(1, 24), rng.random() < 0.15))
    return requests


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(
    requests=workloads(),
    family=st.sampled_from(FAMILIES),
    step_tokens=st.sampled_from([16, 24, 60, 256]),
    blocks=st.integers(13, 40),
    device_adapters=st.sampled_from([1, 2, 6]),
    mode=st.sampled_from(["overlapped", "ondemand"]),
    prefix_caching=st.booleans(),
    threads=st.sampled_from([1, 1, 1, 2]),
)
def test_no_interleaving_changes_a_token(
    families: dict[str, Subject],
    requests: list[tuple[list[int], str | None, int, bool]],
    family: str,
    step_tokens: int,
    blocks: int,
    device_adapters: int,
    mode: str,
    prefix_caching: bool,
    threads: int,
) -> None:
    """Chunks, preemption by a KV pool just larger than one request, prefix hits, evictions, cancellations."""
    subject = families[family]

    async def serve() -> list[list[int] | None]:
        kv_bytes = blocks * 16 * load_plan(subject.model).kv_bytes_per_token(4)
        lora = lora_config(
            subject.adapters, mode=mode, device_bytes=device_adapters * 600 * 1024, host_bytes=700 * 1024
        )
        engine_settings = engine_config(
            seqs=8, step_tokens=step_tokens, kv_bytes=kv_bytes, prefix_caching=prefix_caching, threads=threads
        )
        async with running(model_config(subject.model, max_model_len=180), lora, engine_settings) as engine:
            tasks = []
            for prompt, adapter, max_tokens, cancel in requests:
                task = submit(engine, prompt, adapter, max_tokens=max_tokens)
                tasks.append(None if cancel else task)
                await asyncio.sleep(0)
                if cancel:
                    asyncio.get_running_loop().call_later(0.002, task.cancel)
            return [(await task).token_ids if task else None for task in tasks]

    for (prompt, adapter, max_tokens, _), output in zip(requests, asyncio.run(serve()), strict=True):
        if output is not None:
            assert len(output) == max_tokens
            subject.oracle.check_greedy(prompt, adapter, output)


@pytest.mark.parametrize("alternatives", [0, MAX_PROMPT_LOGPROBS])
async def test_scores_of_the_prompt_are_those_of_peft(families: dict[str, Subject], alternatives: int) -> None:
    """Every prompt token but the first, over several chunks."""
    subject, rng = families["llama3"], random.Random(4)
    prompt = prompt_of(rng, 150)
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        other = submit(engine, prompt_of(rng, 90), "r64", max_tokens=30, logprobs=3)
        answer = await submit(engine, prompt, "r8", max_tokens=0, prompt_logprobs=alternatives)
        assert {len(entry.top_ids) for entry in (await other).logprobs} == {3}
        assert answer.token_ids == []
        first, *rest = answer.prompt_logprobs
    assert first is None
    subject.oracle.check_scores(prompt, "r8", [score for score in rest if score is not None], alternatives)


async def test_with_bfloat16_weights_inputs_of_modules_are_rounded(families: dict[str, Subject]) -> None:
    """Tokens equal those of the oracle with the same weights, whose base modules read inputs in bfloat16."""
    subject, rng = families["llama2"], random.Random(5)
    rounded = subject.model.parent / "rounded"
    make_model(rounded, "llama2", dtype="bfloat16")
    oracle = Oracle(rounded, {"r64": subject.adapters["r64"]}, rounds_inputs=True)
    asked = [(prompt_of(rng, 40), name) for name in (None, "r64")]

    lora = lora_config({"r64": subject.adapters["r64"]})
    async with running(model_config(rounded), lora, engine_config()) as engine:
        oracle.check_answers(asked, [await submit(engine, *each, max_tokens=16) for each in asked])


async def test_more_adapters_than_fit_are_all_served(families: dict[str, Subject]) -> None:
    """With device memory for one adapter at a time, every request gets its own adapter's answer."""
    subject, rng = families["qwen2"], random.Random(6)
    asked = [(prompt_of(rng, 12), name) for _ in range(4) for name in subject.adapters]

    lora = lora_config(subject.adapters, device_bytes=600 * 1024, host_bytes=600 * 1024)
    async with running(model_config(subject.model), lora, engine_config()) as engine:
        answers = await asyncio.gather(*(submit(engine, *each) for each in asked))
    subject.oracle.check_answers(asked, answers)


@pytest.mark.parametrize(("module", "weight"), [("", 3e38), ("mlp.down_proj", 1e12)])
async def test_an_adapter_whose_logits_are_not_finite_fails_alone(
    families: dict[str, Subject], tmp_path: Path, module: str, weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests run in the same iterations and later reuse its KV blocks. Finite hidden states whose squares
    overflow are covered, too."""
    monkeypatch.setattr("caraserve.lora.image_writer.LARGEST_UPDATE", math.inf)
    subject, rng = families["llama3"], random.Random(9)
    huge = shutil.copytree(subject.adapters["r8"], tmp_path / "huge")
    tensors = load_file(huge / "adapter_model.safetensors")
    save_file(
        {name: torch.full_like(values, weight if module in name else 0.0) for name, values in tensors.items()},
        huge / "adapter_model.safetensors",
    )
    asked = [(prompt_of(rng, tokens), rng.choice([None, *subject.adapters])) for tokens in PROMPT_TOKENS]
    bad = prompt_of(rng, 100)

    lora = lora_config(subject.adapters | {"huge": huge})
    # Few blocks, so that requests reuse each other's.
    model = model_config(subject.model, max_model_len=1024)
    async with running(model, lora, engine_config(kv_bytes=MIB, step_tokens=64)) as engine:
        outputs = []
        for params in ({}, {"logprobs": 2}, {"temperature": 1.0, "top_p": 0.9}, {"prompt_logprobs": 1}):
            failing = [submit(engine, bad, "huge", max_tokens=12, **params) for _ in range(3)]
            answers = await asyncio.gather(*(submit(engine, *each, max_tokens=12) for each in asked))
            subject.oracle.check_answers(asked, answers)
            outputs += [answer.token_ids for answer in answers]
            for answer in await asyncio.gather(*failing):
                assert (answer.finish.reason, answer.token_ids, answer.text) == ("error", [], "")
                assert isinstance(answer.finish.error, NonFiniteLogits)
                assert "'huge'" in answer.finish.error.message
                assert answer.finish.cached_tokens == 0
    assert outputs == 4 * outputs[: len(asked)]
