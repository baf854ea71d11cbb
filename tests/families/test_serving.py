"""Served tokens of every family equal those of transformers and peft: in batches and pieces, after preemptions and
prefix hits, and by the command line."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers

from caraserve.model.families import load_plan
from tests.families.cases import CASES, resized
from tests.families.model import make
from tests.oracle.models import save_tokenizer
from tests.oracle.oracle import Oracle
from tests.processes import fleet, free_ports
from tests.serving import engine_config, lora_config, model_config, running, submit

CONTEXT = 100  # tokens of a request
LARGEST_TOKEN = 90  # those above stand for images
ALWAYS = ("gemma 3", "phi 4 mini, short", "cohere 2", "qwen 2.5 with images", "qwen 3.5")  # the others take two minutes


def cases() -> list[Any]:
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in CASES]


def prompts(rng: random.Random, count: int, model: Path) -> list[list[int]]:
    """Returns prompts of 1 to 60 tokens, some of which begin alike. If the server uses the frequencies for long
    requests, all are as long, because transformers chooses for each."""
    stems = [[rng.randrange(2, LARGEST_TOKEN) for _ in range(40)] for _ in range(2)]
    lengths = (rope.longest_short for rope in load_plan(model).ropes if rope.longest_short < CONTEXT)
    shortest = max(lengths, default=0)
    return [
        rng.choice(stems)[: max(shortest, rng.choice((0, 16, 33, 40)))]
        + [rng.randrange(2, LARGEST_TOKEN) for _ in range(length)]
        for length in (rng.randrange(1, 20) for _ in range(count))
    ]


@pytest.mark.parametrize("name", cases())
async def test_no_interleaving_changes_a_token(name: str, tmp_path: Path) -> None:
    """Chunks of 24 tokens, blocks for a little more than one request, adapters one after another on the device."""
    case = resized(CASES[name])
    made, rng = make(case, tmp_path), random.Random(name)
    save_tokenizer(made.folder, with_bos=False)
    adapters = {adapter: folder for adapter, (folder, _) in made.adapters.items()}
    oracle = Oracle(made.folder, adapters, getattr(transformers, case.model))
    asked = [(prompt, rng.choice((None, "all", "last"))) for prompt in prompts(rng, 8, made.folder)]
    blocks = 8 * 16 * load_plan(made.folder).kv_bytes_per_token(4)
    settings = engine_config(seqs=6, step_tokens=24, kv_bytes=blocks, threads=2)
    lora = lora_config(adapters, device_bytes=1 << 20, mode="ondemand")
    async with running(model_config(made.folder, max_model_len=CONTEXT), lora, settings) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=rng.randrange(4, 24)) for each in asked))
    for (prompt, adapter), answer in zip(asked, answers, strict=True):
        oracle.check_greedy(prompt, adapter, answer.token_ids)
    assert oracle.forgiven_ties <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_command_line_serves_a_family(name: str, tmp_path: Path) -> None:
    case = resized(CASES[name])
    made, rng = make(case, tmp_path), random.Random(name)
    save_tokenizer(made.folder, with_bos=False)
    adapters = {adapter: folder for adapter, (folder, _) in made.adapters.items()}
    oracle = Oracle(made.folder, adapters, getattr(transformers, case.model))
    asked = [(prompt, adapter) for prompt in prompts(rng, 3, made.folder) for adapter in (None, "all", "last")]
    modules = [f"{adapter}={folder}" for adapter, folder in adapters.items()]
    options = (
        "--model",
        str(made.folder),
        "--served-model-name",
        "base",
        "--max-model-len",
        str(CONTEXT),
        "--lora-modules",
        *modules,
    )
    with fleet(free_ports(1), tmp_path, lambda _: options) as servers, ThreadPoolExecutor(len(asked)) as pool:
        server = servers["a"]

        def answer(each: tuple[list[int], str | None]) -> list[int]:
            prompt, adapter = each
            body = {"model": adapter or "base", "prompt": prompt, "max_tokens": 12, "temperature": 0}
            told = server.ask("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})
            tokens: list[int] = told["choices"][0]["token_ids"]
            return tokens

        answers = list(pool.map(answer, asked))
    for (prompt, adapter), tokens in zip(asked, answers, strict=True):
        assert len(tokens) == 12
        oracle.check_greedy(prompt, adapter, tokens)


async def test_choices_of_one_prompt_and_those_after_cancelled_requests_have_states_of_their_own(
    tmp_path: Path,
) -> None:
    """With four slots, which later requests take over from cancelled ones; prompts in chunks of 16 tokens."""
    case, rng = resized(CASES["qwen 3.5"]), random.Random(7)
    made = make(case, tmp_path)
    save_tokenizer(made.folder, with_bos=False)
    adapters = {adapter: folder for adapter, (folder, _) in made.adapters.items()}
    oracle = Oracle(made.folder, adapters, getattr(transformers, case.model))
    prompt, *others = prompts(rng, 7, made.folder)
    settings = engine_config(seqs=4, step_tokens=16, kv_bytes=1 << 20, threads=2)
    async with running(model_config(made.folder, max_model_len=CONTEXT), lora_config(adapters), settings) as engine:
        left = [submit(engine, each, "all", max_tokens=30) for each in others]
        choices = [submit(engine, prompt, "last", max_tokens=12) for _ in range(3)]
        for index, task in enumerate(left):
            asyncio.get_running_loop().call_later(0.004 * index, task.cancel)
        for choice in await asyncio.gather(*choices):
            assert choice.finish.cached_tokens == 0
            oracle.check_greedy(prompt, "last", choice.token_ids)
