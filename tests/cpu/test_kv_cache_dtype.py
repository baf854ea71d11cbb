"""--kv-cache-dtype: with a cache in bfloat16, attention is that over keys and values rounded to it, for any batch."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve import demo
from caraserve.backend_factory import check_options
from caraserve.config import EngineConfig
from caraserve.errors import ConfigError
from caraserve.model.dtype import Dtype
from caraserve.model.families import load_plan
from caraserve.model.plan import DecoderPlan
from tests.plans.cpu import backend_of
from tests.plans.driving import logprobs
from tests.plans.executor import Executor
from tests.plans.made_up import PLANS, VOCAB, Tensors
from tests.serving import engine_config, lora_config, model_config, running, submit

TOKENS = [(29 * index * index + 7) % VOCAB for index in range(75)]  # more than a span of four KV blocks
ADAPTERS = {path.name: path for path in sorted(demo.adapters_folder().iterdir()) if path.is_dir()}


def expected(plan: DecoderPlan, kv_dtype: Dtype) -> NDArray[np.float64]:
    logits = Executor(plan, Tensors(), kv_dtype=kv_dtype).logits(TOKENS)[:-1]
    top = logits.max(1, keepdims=True)
    found: NDArray[np.float64] = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    return found


def computed(plan: DecoderPlan, pieces: Sequence[int], threads: int = 1) -> NDArray[np.float64]:
    backend = backend_of(plan, Tensors(), kv_dtype=Dtype.BF16, threads=threads)
    try:
        return logprobs(backend, VOCAB, TOKENS, pieces, VOCAB)
    finally:
        backend.close()


@pytest.mark.parametrize("name", PLANS)
def test_probabilities_are_those_of_rounded_keys_and_values_in_any_pieces(name: str) -> None:
    """Sums in fp32 and in double may round a key to neighbours; the others are the same."""
    plan = PLANS[name]()
    whole, rounded, exact = computed(plan, (75,)), expected(plan, Dtype.BF16), expected(plan, Dtype.F32)
    assert whole.tobytes() == computed(plan, (3, 1, 30, 1, 40), threads=2).tobytes()
    error, effect = (np.sqrt(np.square(whole - other).mean()) for other in (rounded, exact))
    assert error < effect / 10
    assert effect < 0.05


def test_answers_do_not_depend_on_the_batch_preemption_shared_prefixes_or_guesses() -> None:
    rng = random.Random(0)
    stem = [rng.randrange(3, 250) for _ in range(40)]
    asked = [
        (stem[: rng.choice((16, 40))] + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 30))] * 2, name)
        for name in (None, *list(ADAPTERS)[:2]) * 3
    ]
    token_bytes = load_plan(demo.model_folder()).kv_bytes_per_token(2)

    async def serve(engine: EngineConfig, at_once: int) -> list[list[int]]:
        answers = []
        model = model_config(demo.model_folder(), max_model_len=160)
        async with running(model, lora_config(ADAPTERS), engine) as served:
            assert engine.kv_cache_bytes is not None
            assert served.snapshot().kv_total_blocks == engine.kv_cache_bytes // (16 * token_bytes)
            for first in range(0, len(asked), at_once):
                now = asked[first : first + at_once]
                tasks = [submit(served, prompt, name, max_tokens=24) for prompt, name in now]
                answers += [one.token_ids for one in await asyncio.gather(*tasks)]
        return answers

    plain = engine_config(prefix_caching=False, num_speculative_tokens=0, kv_cache_dtype="bfloat16")
    mixed = engine_config(seqs=9, step_tokens=32, kv_bytes=16 * 16 * token_bytes, threads=2, kv_cache_dtype="bfloat16")
    assert asyncio.run(serve(mixed, len(asked))) == asyncio.run(serve(plain, 1))


def test_a_cache_in_bfloat16_needs_half_the_bytes() -> None:
    folder = demo.model_folder()
    plan, model, lora = load_plan(folder), model_config(folder), lora_config({})
    least = plan.kv_bytes_per_token(2) * (plan.max_position + 16)
    check_options(plan, model, engine_config(kv_bytes=least, kv_cache_dtype="bfloat16"), lora, "cpu")
    with pytest.raises(ConfigError, match="is too small"):
        check_options(plan, model, engine_config(kv_bytes=least), lora, "cpu")


def test_a_gpu_takes_the_dtype_of_the_weights_alone() -> None:
    plan, lora, engine = load_plan(demo.model_folder()), lora_config({}), engine_config(kv_cache_dtype="bfloat16")
    check_options(plan, model_config(Path(), "bfloat16"), engine, lora, "cuda")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype bfloat16: .* weights, float16; .* --dtype bfloat16"):
        check_options(plan, model_config(Path(), "float16"), engine, lora, "cuda")
