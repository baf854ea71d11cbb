"""Answers with guessed tokens that are verified are bit for bit those without, on the CPU backend."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caraserve.engine.active_request import ActiveRequest
from caraserve.model.families import load_plan
from tests.guesses import drafting
from tests.oracle.models import ALL_TARGETS, Kinds, prompt_of
from tests.oracle.subject import Subject, make_subject
from tests.serving import Answer, engine_config, lora_config, model_config, running, submit

FAMILIES = ("llama3", "mistral", "qwen2_moe")
INVOCATION = [7, 8, 9]
KINDS: Kinds = {
    "r8": {"rank": 8, "targets": ALL_TARGETS},
    "r13": {"rank": 13, "targets": ("q_proj", "k_proj", "v_proj"), "rslora": True},
    "active": {"rank": 4, "targets": ("q_proj", "v_proj"), "invocation": INVOCATION},
}
SAMPLING: Sequence[dict[str, Any]] = (
    {},
    {"logprobs": 3},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 1.2, "seed": 4, "top_k": 30, "min_p": 0.02, "logprobs": 0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 0.7, "seed": 5, "logit_bias": ((5, 4.0), (9, -100.0)), "frequency_penalty": 1.5},
    {"ignore_eos": False, "stop_token_ids": tuple(range(200, 220)), "min_tokens": 9},
    {"stop": ("e", "th"), "temperature": 0.9, "seed": 6},
    {"stop": ("a",), "include_stop_str_in_output": True, "min_tokens": 5},
    {"prompt_logprobs": 1, "logprobs": 1},
)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return {family: make_subject(tmp_path_factory.mktemp(family), KINDS, family) for family in FAMILIES}


Asked = tuple[list[int], str | None, dict[str, Any]]


@st.composite
def requests(draw: st.DrawFn) -> list[Asked]:
    """Draws requests, of which many share prefixes."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    stem = prompt_of(rng, 40)
    asked = []
    for _ in range(draw(st.integers(3, 10))):
        prompt = stem[: rng.choice((0, 16, 40))] + prompt_of(rng, rng.randrange(1, 20))
        prompt += rng.choice(([], INVOCATION, prompt[-6:] * 3))
        params = rng.choice(SAMPLING) | {"max_tokens": rng.choice((1, 2, 7, 24, 40))}
        asked.append((prompt, rng.choice((None, *KINDS)), params))
    return asked


def without_times(answer: Answer) -> tuple[object, ...]:
    finish = answer.finish
    counts = finish.reason, finish.stop_reason, finish.prompt_tokens, finish.completion_tokens
    return answer.text, answer.token_ids, answer.logprobs, answer.prompt_logprobs, counts


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(
    asked=requests(),
    family=st.sampled_from(FAMILIES),
    mode=st.sampled_from(["overlapped", "overlapped", "merged"]),
    blocks=st.sampled_from([13, 16, 400]),
    step_tokens=st.sampled_from([16, 64]),
    seed=st.integers(0, 2**32),
    wrong=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_drafts_change_nothing_of_an_answer(
    subjects: dict[str, Subject],
    asked: list[Asked],
    family: str,
    mode: str,
    blocks: int,
    step_tokens: int,
    seed: int,
    wrong: float,
) -> None:
    """For right and wrong drafts, any sampling, stops, the base model and adapters, and preemptions."""
    subject = subjects[family]
    adapters = subject.adapters
    if mode == "merged":  # with several adapters the batches decide which is merged, and so how rounding goes
        adapters = {"r8": adapters["r8"]}
        asked = [(prompt, "r8", params) for prompt, _, params in asked]
    kv_bytes = blocks * 16 * load_plan(subject.model).kv_bytes_per_token(4)
    lora = lora_config(adapters, mode=mode)

    async def serve(context: AbstractContextManager[None], **fields: Any) -> list[Answer]:
        engine_settings = engine_config(seqs=8, step_tokens=step_tokens, kv_bytes=kv_bytes, **fields)
        with context:
            async with running(model_config(subject.model, max_model_len=120), lora, engine_settings) as engine:
                tasks = [submit(engine, prompt, name, **params) for prompt, name, params in asked]
                async with asyncio.timeout(60):  # a request whose counts are wrong has no work and never ends
                    return await asyncio.gather(*tasks)

    plain = asyncio.run(serve(nullcontext(), num_speculative_tokens=0))
    answers = {(tuple(prompt), name): one.token_ids for (prompt, name, _), one in zip(asked, plain, strict=True)}

    def answer_of(active: ActiveRequest) -> Sequence[int]:
        return answers[active.request.inputs.prompt_ids, active.request.inputs.adapter]

    drafted = asyncio.run(serve(drafting(answer_of, random.Random(seed), wrong=wrong)))
    assert [without_times(one) for one in drafted] == [without_times(one) for one in plain]
