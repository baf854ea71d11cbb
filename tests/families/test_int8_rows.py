"""A whole model with --activations int8 gives the logits of one whose modules round their inputs, in any batch."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.model.checkpoint import open_tensors
from caraserve.model.families import load_plan
from caraserve.model.formats.grouped import GroupedFormat
from caraserve.model.linear_plan import LinearPlan
from tests.cpu.test_grouped_int8 import rounded_to_int8
from tests.oracle import packed_weights
from tests.oracle.models import make_model, prompt_of
from tests.oracle.test_packed_formats import Case, write
from tests.plans.executor import Executor
from tests.serving import Answer, engine_config, lora_config, model_config, running, submit

_CASE = Case(
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    {"": packed_weights.gptq(4, 32)},
    "float32",
)


class _Rounding(Executor):
    def _linear(self, linear: LinearPlan, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        if isinstance(linear.format, GroupedFormat):
            rows = rounded_to_int8(rows.astype(np.float32)).astype(np.float64)
        return super()._linear(linear, rows)


def logprobs_of(kind: type[Executor], folder: Path, tokens: list[int]) -> NDArray[np.float64]:
    """Returns the logarithms of the probabilities of all tokens but the first."""
    plan = load_plan(folder)
    with open_tensors(folder, plan.stored_names) as read:
        logits = kind(plan, read).logits(tokens)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.asarray(logits[np.arange(len(tokens) - 1), tokens[1:]])


def scores(answer: Answer) -> list[float]:
    return [score.logprob for score in answer.prompt_logprobs if score] + [score.logprob for score in answer.logprobs]


async def test_a_model_with_rounded_inputs(tmp_path: Path) -> None:
    source, rng = make_model(tmp_path / "source", "llama3"), random.Random(3)
    folder = write(source, tmp_path / "packed", _CASE)
    prompts = [prompt_of(rng, tokens) for tokens in (40, 9, 23)]
    model, found = replace(model_config(folder), activations="int8"), list[list[Answer]]()
    asked = {"max_tokens": 6, "logprobs": 0, "prompt_logprobs": 0}
    for step_tokens in (None, 16):
        async with running(model, lora_config({}), engine_config(step_tokens=step_tokens)) as engine:
            found.append([await submit(engine, prompts[0], **asked)])
            found.append(await asyncio.gather(*(submit(engine, prompt, **asked) for prompt in prompts)))
    alone = found[0][0]
    for answers in found[1:]:  # beside others, and in chunks of a prompt
        assert answers[0].token_ids == alone.token_ids
        assert scores(answers[0]) == scores(alone)
    tokens = [*prompts[0], *alone.token_ids]
    rounded, exact = (logprobs_of(kind, folder, tokens) for kind in (_Rounding, Executor))
    assert np.abs(scores(alone) - rounded).max() < np.abs(rounded - exact).max() / 10
