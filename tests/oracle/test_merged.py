"""Loading mode `merged`: weights change between adapters and the base model, and tokens equal those of peft."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from caraserve.core.backend import Backend
from caraserve.core.batch import Batch
from caraserve.cpu.backend import CpuBackend
from caraserve.loop import Engine
from caraserve.model.families import load_plan
from tests.oracle.models import SOME_KINDS, Kinds, make_adapter, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.oracle.subject import Subject, make_subject
from tests.serving import Answer, engine_config, lora_config, model_config, running, submit

Asked = tuple[list[int], str | None]

KINDS: Kinds = {
    **SOME_KINDS,
    "mixed": {"rank": 4, "targets": ("k_proj", "o_proj", "down_proj"), "rank_pattern": {"o_proj": 40}},
}


@pytest.fixture(scope="module", params=["llama3", "llama_bias", "qwen2"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Three families: shared KV heads; odd sizes and biases; a tied head."""
    return make_subject(tmp_path_factory.mktemp(request.param), KINDS, request.param)


class Watched:
    """Records a backend's batches: which were merged, and their number of rows."""

    def __init__(self, backend: Backend) -> None:
        assert isinstance(backend, CpuBackend)
        self.backend, self.plans, self._launch = backend, list[Batch](), backend.launch
        backend.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: Batch, done: Any) -> None:
        self.plans.append(plan)
        self._launch(plan, done)

    @property
    def merged(self) -> list[int | None]:
        """By batch: the adapter slot that was merged."""
        return [plan.merged for plan in self.plans]

    @property
    def switches(self) -> int:
        """Number of batches whose merged adapter differs from that of the batch before."""
        merged = [None, *self.merged]
        return sum(before != after for before, after in pairwise(merged))


@contextlib.asynccontextmanager
async def serving(
    model: Path, adapters: Mapping[str, Path], *, max_model_len: int | None = None, **engine: Any
) -> AsyncIterator[tuple[Engine, Watched]]:
    config = model_config(model, max_model_len=max_model_len)
    async with running(config, lora_config(adapters, mode="merged"), engine_config(**engine)) as started:
        yield started, Watched(started._backend)


def check(oracle: Oracle, asked: Sequence[Asked], answers: Sequence[Answer], tokens: int) -> None:
    for (prompt, adapter), answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids) == tokens
        oracle.check_greedy(prompt, adapter, answer.token_ids)


async def test_a_lone_adapter_runs_merged_from_its_first_token_to_its_last(subject: Subject) -> None:
    model, adapters, oracle = subject
    rng = random.Random(1)
    asked: list[Asked] = [(prompt_of(rng, tokens), name) for tokens in (1, 40) for name in (*adapters, None)]

    async with serving(model, adapters, step_tokens=16) as (engine, watched):
        answers = [await submit(engine, *each, max_tokens=6) for each in asked]
        rows = [(row.adapter_slot or None) for plan in watched.plans for row in plan.rows]
        assert rows == watched.merged
        assert watched.backend.adapters_merged == 2 * len(adapters)
    check(oracle, asked, answers, 6)


async def test_an_adapter_used_again_before_another_is_merged_is_not_merged_again(subject: Subject) -> None:
    model, adapters, oracle = subject
    rng = random.Random(2)
    asked: list[Asked] = [(prompt_of(rng, 20), name) for name in ("r8", None, "r8", None, "r8")]

    async with serving(model, adapters) as (engine, watched):
        answers = [await submit(engine, *each, max_tokens=4) for each in asked]
        assert watched.backend.adapters_merged == 1
        assert watched.switches == 5
    check(oracle, asked, answers, 4)


async def test_a_skewed_load_runs_merged_while_other_adapters_wait(subject: Subject) -> None:
    """Requests for one adapter keep coming; one for another and one for the base model arrive in between."""
    model, adapters, oracle = subject
    rng = random.Random(3)
    asked: list[Asked] = [(prompt_of(rng, 12), "r64") for _ in range(24)]
    asked[8], asked[16] = (asked[8][0], None), (asked[16][0], "r13")

    async with serving(model, adapters, seqs=8) as (engine, watched):
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=10) for each in asked))
        full = [plan for plan in watched.plans if plan.merged is not None and len(plan.rows) > 4]
        assert full, "no batch was merged"
        assert any(merged is None for merged in watched.merged)
    check(oracle, asked, answers, 10)


async def test_a_request_continues_across_merging_and_unmerging(subject: Subject) -> None:
    """Its keys and values come from both. Short requests for other adapters arrive while a long one runs."""
    model, adapters, oracle = subject
    rng = random.Random(4)
    long: Asked = (prompt_of(rng, 30), "r8")
    short: list[Asked] = [(prompt_of(rng, 9), rng.choice([None, "r13", "mixed"])) for _ in range(12)]

    async with serving(model, adapters) as (engine, watched):
        first = submit(engine, *long, max_tokens=160)
        others = []
        for one in short:
            others.append(await submit(engine, *one, max_tokens=3))
            plans = len(watched.plans)
            while len(watched.plans) < plans + 4 and not first.done():  # noqa: ASYNC110  # batches send no event
                await asyncio.sleep(0)
        answers = [await first]
        slots = {row.slot for plan in watched.plans[:1] for row in plan.rows}
        own = [plan.merged for plan in watched.plans if slots & {row.slot for row in plan.rows}]
        changes = sum(before != after for before, after in pairwise(own))
        assert changes >= 8
        answers, others = [answers, others]
    check(oracle, [long], answers, 160)
    check(oracle, short, others, 3)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
async def test_any_mix_over_a_small_pool_answers_like_peft(subject: Subject, seed: int) -> None:
    """Popular and rare adapters, preempted and cancelled requests, chunks, and prefixes computed merged or not."""
    model, adapters, oracle = subject
    rng = random.Random(seed)
    plan = load_plan(model)
    stems = [prompt_of(rng, 70) for _ in range(2)]
    popular = rng.choice([*adapters])
    asked: list[Asked] = []
    for _ in range(rng.randrange(6, 18)):
        stem = rng.choice(stems)[: rng.choice((0, 16, 40, 70))]
        name = popular if rng.random() < 0.7 else rng.choice([None, *adapters])
        asked.append((stem + prompt_of(rng, rng.randrange(1, 40)), name))
    wanted = [rng.randrange(1, 24) for _ in asked]
    left = [rng.random() < 0.15 for _ in asked]

    kv_bytes = rng.randrange(13, 40) * 16 * plan.kv_bytes_per_token(4)
    step_tokens = rng.choice((16, 24, 60, 256))
    limits = {
        "seqs": 8,
        "kv_bytes": kv_bytes,
        "step_tokens": step_tokens,
        "max_model_len": 180,
        "threads": 1 + seed % 2,
    }
    async with serving(model, adapters, **limits) as (engine, watched):
        tasks = []
        for each, max_tokens in zip(asked, wanted, strict=True):
            tasks.append(submit(engine, *each, max_tokens=max_tokens))
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
        for task, leaves in zip(tasks, left, strict=True):
            if leaves:
                task.cancel()
        answers = [None if leaves else await task for task, leaves in zip(tasks, left, strict=True)]
        assert any(merged is not None for merged in watched.merged), "nothing was merged"
    for (prompt, adapter), count, answer in zip(asked, wanted, answers, strict=True):
        if answer is not None:
            assert len(answer.token_ids) == count
            oracle.check_greedy(prompt, adapter, answer.token_ids)


async def test_merged_bfloat16_weights_equal_those_that_peft_merges_and_rounds(tmp_path: Path) -> None:
    """The oracle has the merged weights, rounded to bfloat16; afterwards the server's base weights are unchanged."""
    model = make_model(tmp_path / "model", "llama2", dtype="bfloat16")
    adapter = make_adapter(tmp_path / "r64", model, seed=0, rank=64, dtype="bfloat16")
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.to(torch.bfloat16).save_pretrained(tmp_path / "merged")
    prompt = prompt_of(random.Random(5), 40)

    async with serving(model, {"r64": adapter}) as (engine, _):
        before, tokens, after = [
            (await submit(engine, prompt, name, max_tokens=16)).token_ids for name in (None, "r64", None)
        ]
    Oracle(tmp_path / "merged", rounds_inputs=True).check_greedy(prompt, None, tokens)
    Oracle(model, rounds_inputs=True).check_greedy(prompt, None, before)
    assert after == before
