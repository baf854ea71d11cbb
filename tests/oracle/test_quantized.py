"""A quantised checkpoint on the CPU answers like transformers + peft over its dequantised weights, token for token."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.oracle.models import make_adapters, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.oracle.quantized import KINDS, dequantize, quantize
from tests.oracle.subject import KINDS as ADAPTERS
from tests.serving import engine_config, lora_config, model_config, running, submit


@pytest.mark.parametrize(("kind", "family"), [("fp8-per-tensor", "qwen2"), ("int8-weights-partly", "llama3")])
async def test_quantised_checkpoints_answer_like_their_dequantised_weights(
    kind: str, family: str, tmp_path: Path
) -> None:
    folder = quantize(make_model(tmp_path / "source", family), tmp_path / "quantised", KINDS[kind])
    plain = dequantize(folder, tmp_path / "plain")
    adapters = make_adapters(tmp_path, plain, {name: ADAPTERS[name] for name in ("r8", "r13")})
    oracle, rng = Oracle(plain, adapters), random.Random(1)
    asked = [(prompt_of(rng, tokens), name) for tokens in (3, 40) for name in (None, *adapters)]
    async with running(model_config(folder), lora_config(adapters), engine_config()) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=10) for each in asked))
    oracle.check_answers(asked, answers)
