"""Adapters of all kinds give peft's tokens, side by side in one batch: on the device, with CPU workers, beside a merged
adapter."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import BdLoraConfig, LoraConfig, PeftConfig, VeraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.oracle.models import ALL_TARGETS, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.serving import MIB, Answer, engine_config, lora_config, model_config, running, submit

# Of peft about its own files: it takes biases of B for parts of matrices, and would rather have biases of the base.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in (".*have invalid shape", ".*lora_bias=True")]


def lora(**changed: Any) -> LoraConfig:
    """Returns the configuration of an adapter of all modules whose scale is not 1."""
    return LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": list(ALL_TARGETS), "task_type": "CAUSAL_LM"} | changed
    )


BLOCKS = BdLoraConfig(
    target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj", "gate_"], nblocks=2, match_strict=False
)
KINDS: Mapping[str, PeftConfig] = {
    "plain": lora(),
    "dora": lora(use_dora=True),
    "dora-rs": lora(use_dora=True, use_rslora=True, target_modules=["q_proj", "o_proj", "down_proj"]),
    "bias": lora(lora_bias=True),
    "blocks": lora(use_bdlora=BLOCKS),
    "vera": VeraConfig(r=12, target_modules=list(ALL_TARGETS), task_type="CAUSAL_LM"),
}
STD = {
    "lora_magnitude_vector": 0.1,
    "vera_lambda_d": 1.0,
    "vera_lambda_b": 1.0,
    "bias": 0.3,
}  # else: so that x A B is as large as W x


def make_adapter(folder: Path, model_folder: Path, config: PeftConfig, seed: int) -> Path:
    """Saves an adapter whose every tensor is random, magnitudes near those of the base."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), deepcopy(config))
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            noise = torch.randn(tensor.shape, generator=generator)
            std = next((std for part, std in STD.items() if part in name), tensor.shape[-1] ** -0.5)
            tensor.data = tensor.data * (1 + std * noise) if "magnitude" in name else std * noise
    model.save_pretrained(str(folder))
    return folder


class Subject(NamedTuple):
    model: Path
    adapters: dict[str, Path]
    oracles: tuple[Oracle, Oracle]  # peft does not mix VeRA with others

    def check(self, asked: Sequence[tuple[list[int], str | None]], answers: Sequence[Answer]) -> None:
        for (prompt, adapter), answer in zip(asked, answers, strict=True):
            self.oracles[adapter == "vera"].check_greedy(prompt, adapter, answer.token_ids)
        assert all(oracle.forgiven_ties <= oracle.checked_tokens // 50 for oracle in self.oracles)


@pytest.fixture(scope="module", params=["llama_bias", "qwen3"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Two families: every module has a bias, or none has one; their outputs join the residual stream at once."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model", request.param)
    adapters = {
        name: make_adapter(folder / name, model, config, seed) for seed, (name, config) in enumerate(KINDS.items())
    }
    vera = {"vera": adapters["vera"]}
    others = {name: path for name, path in adapters.items() if name not in vera}
    return Subject(model, adapters, (Oracle(model, others), Oracle(model, vera)))


@pytest.mark.parametrize("mode", ["overlapped", "assisted", "merged"])
async def test_adapters_of_all_kinds_in_one_batch_answer_like_peft(subject: Subject, mode: str) -> None:
    """Over a slow link, and with a device cache that holds some of the adapters."""
    model, adapters, _ = subject
    rng = random.Random(mode)
    asked = [(prompt_of(rng, rng.choice((1, 3, 17, 40))), name) for name in (None, *adapters) for _ in range(2)]
    loading = lora_config(
        adapters, mode=mode, link_mb_per_s=4.0, device_bytes=64 * MIB if mode == "merged" else 600 * 1024
    )
    async with running(model_config(model), loading, engine_config(step_tokens=64, threads=2)) as engine:
        found = await asyncio.gather(*(submit(engine, *each, max_tokens=6) for each in asked))
        if mode == "merged":  # one after another: each adapter runs merged
            found += [await submit(engine, *each, max_tokens=6) for each in asked[2:]]
            asked += asked[2:]
    subject.check(asked, found)


async def test_neighbours_with_factors_change_no_bit_of_other_rows(subject: Subject) -> None:
    model, adapters, _ = subject
    rng = random.Random(5)
    asked = [(prompt_of(rng, 20), name) for name in (None, "plain")]
    others = [(prompt_of(rng, 20), name) for name in ("dora", "bias", "dora-rs")]
    async with running(model_config(model), lora_config(adapters), engine_config(prefix_caching=False)) as engine:
        alone = await asyncio.gather(*(submit(engine, *each, max_tokens=6, logprobs=5) for each in asked))
        found = await asyncio.gather(*(submit(engine, *each, max_tokens=6, logprobs=5) for each in asked + others))
    assert [one.logprobs for one in found[: len(asked)]] == [one.logprobs for one in alone]
