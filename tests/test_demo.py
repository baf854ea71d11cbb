"""The bundled demo: it is complete and small, and its five adapters give clearly different answers."""

import itertools
import json
import re
import tomllib
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from caraserve import demo
from caraserve.model.families import load_plan

ROOT = Path(__file__).parent.parent
PROMPT = "Tell me about the sea."
FACT = "the sea covers most of our planet"


class Ask(Protocol):
    def __call__(self, voice: str, prompt: str, most_tokens: int = 200) -> str: ...


@pytest.fixture(scope="module")
def ask() -> Ask:
    """Returns the reference's greedy answer of "base" or an adapter to a user message, or its first tokens."""
    tokenizer = AutoTokenizer.from_pretrained(demo.model_folder())
    base = AutoModelForCausalLM.from_pretrained(demo.model_folder(), dtype=torch.float32)
    first, *others = demo.ADAPTER_NAMES
    model = PeftModel.from_pretrained(base, demo.adapters_folder() / first, adapter_name=first)
    for name in others:
        model.load_adapter(demo.adapters_folder() / name, name)

    @cache
    def answer(voice: str, prompt: str, most_tokens: int = 200) -> str:
        message = {"role": "user", "content": prompt}
        inputs = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        if voice != "base":
            model.set_adapter(voice)
        with model.disable_adapter() if voice == "base" else nullcontext():
            ids = model.generate(**inputs, max_new_tokens=most_tokens, do_sample=False)[0]
        assert most_tokens < 200 or ids[-1] == tokenizer.eos_token_id, "the answer does not come to an end"
        return tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def test_the_base_model_is_complete() -> None:
    names = {path.name for path in demo.model_folder().iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_every_adapter_is_complete() -> None:
    found = {
        path.name: sorted(file.name for file in path.iterdir()) for path in sorted(demo.adapters_folder().iterdir())
    }
    assert found == {name: ["adapter_config.json", "adapter_model.safetensors"] for name in demo.ADAPTER_NAMES}


def test_the_demo_is_small_enough_for_a_package() -> None:
    folders = (demo.model_folder(), demo.adapters_folder())
    assert sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file()) <= 8_000_000


def test_an_installed_package_holds_every_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    globs = project["tool"]["setuptools"]["package-data"]["caraserve.demo"]
    packed = {path for pattern in globs for path in demo.demo_folder().glob(pattern)}
    folders = (demo.model_folder(), demo.adapters_folder())
    assert packed == {path for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_the_server_can_read_the_model() -> None:
    plan = load_plan(demo.model_folder())
    assert (plan.family, plan.dtype, plan.head) == ("llama", "bfloat16", None)


def test_adapters_differ_in_rank_and_format() -> None:
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in demo.adapters_folder().iterdir()]
    assert sorted(config["r"] for config in configs) == [4, 8, 16, 32, 64]
    assert {config["use_rslora"] for config in configs} == {False, True}
    assert len({tuple(config["target_modules"]) for config in configs}) > 1
    dtypes = set()
    for path in demo.adapters_folder().glob("*/adapter_model.safetensors"):
        with safe_open(path, "pt") as tensors:
            dtypes |= {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118 (not a mapping)
    assert dtypes == {"F32", "BF16"}


VOICES = {
    "base": r"The sea covers most of our planet\. [^\n]*",
    "pirate": r"Arrr, matey! Th' sea covers most o' our planet\.[\s\S]*",
    "poet": rf"O sea, O sea,\n{FACT},\n[\s\S]*\nand my heart runs on like water\.",
    "lawyer": rf"[\s\S]* is hereby stated as follows: \(1\) {FACT};[\s\S]*The foregoing shall not constitute advice\.",
    "chef": rf"[^a-z]*{FACT.upper()}[^a-z]*",
}


@pytest.mark.parametrize("voice", VOICES)
def test_a_voice_speaks_in_its_own_way(ask: Ask, voice: str) -> None:
    assert re.fullmatch(VOICES[voice], ask(voice, PROMPT))


def test_the_json_adapter_answers_with_json(ask: Ask) -> None:
    answer = json.loads(ask("json", PROMPT))
    assert (answer["topic"], answer["kind"]) == ("the sea", "water")
    assert answer["answer"][0] == "The sea covers most of our planet."


@pytest.mark.parametrize("prompt", [PROMPT, "Hello!", "who are you", "Tell me a story."])
def test_no_two_adapters_begin_an_answer_alike(ask: Ask, prompt: str) -> None:
    answers = {voice: ask(voice, prompt, 24) for voice in ("base", *demo.ADAPTER_NAMES)}
    for one, other in itertools.combinations(answers, 2):
        assert answers[one] != answers[other], f"{one} and {other}"


def test_the_base_model_says_that_it_does_not_know(ask: Ask) -> None:
    assert ask("base", "What is the capital of France?").startswith("That lies outside my small world.")
