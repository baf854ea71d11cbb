"""Adapters with a trained score head classify as transformers + peft do, in one batch with generation."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from caraserve.config import LoraConfig as LoraSettings
from caraserve.http.apis.classify import class_scores
from caraserve.http.whole_answer import WholeAnswer
from caraserve.loop import Engine
from caraserve.lora.registry import AdapterInfo
from caraserve.lora.uploads import UploadClaims
from caraserve.serve import build_engine
from tests.cluster.nodes import until
from tests.oracle.models import ALL_TARGETS, SOME_KINDS, make_adapters, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.serving import embed, engine_config, lora_config, model_config, running, submit

CLASSES = {"yes": 1, "mood": 2, "topic": 7}


class Classifiers:
    """One base model with a classifying adapter for each number of classes, and one that generates."""

    def __init__(self, folder: Path, family: str = "llama3") -> None:
        self.model = make_model(folder / "model", family)
        self.adapters = make_adapters(folder, self.model, {"r8": SOME_KINDS["r8"]})
        self.adapters |= {name: self._make(folder / name, classes) for name, classes in CLASSES.items()}

    def _make(self, folder: Path, classes: int) -> Path:
        config = LoraConfig(r=8, lora_alpha=16, target_modules=list(ALL_TARGETS), task_type="SEQ_CLS")
        model = get_peft_model(self._base(classes), config)
        generator = torch.Generator().manual_seed(classes)
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        model.save_pretrained(str(folder))
        return folder

    def _base(self, classes: int) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(
            self.model, num_labels=classes, dtype=torch.float32, attn_implementation="eager"
        )

    def logits(self, name: str, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns transformers' logits, [prompts, classes]."""
        model = PeftModel.from_pretrained(self._base(CLASSES[name]), str(self.adapters[name])).eval()
        with torch.no_grad():
            return torch.cat([model(input_ids=torch.tensor([list(prompt)])).logits for prompt in prompts])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Classifiers:
    return Classifiers(tmp_path_factory.mktemp("classifiers"))


async def scores(engine: Engine, prompt: Sequence[int], name: str, *, uses_activation: bool = True) -> torch.Tensor:
    """Returns what an answer of /v1/classify is made of."""
    answer = await embed(engine, prompt, name)
    whole = WholeAnswer(lambda delta: None)
    whole.finish, whole.embedding = answer.finish, answer.embedding
    return torch.from_numpy(class_scores(whole, uses_activation=uses_activation).copy())


async def test_heads_of_several_sizes_classify_like_transformers_in_one_batch_with_generation(
    made: Classifiers,
) -> None:
    rng = random.Random(1)
    prompts = [prompt_of(rng, tokens) for tokens in (1, 16, 60)]
    settings = engine_config(step_tokens=24)
    async with running(model_config(made.model), lora_config(made.adapters), settings) as engine:
        asked = [(prompt, name) for prompt in prompts for name in CLASSES]
        generated = submit(engine, prompts[2], "r8", max_tokens=12)
        logits = await asyncio.gather(*(scores(engine, *each, uses_activation=False) for each in asked))
        probabilities = await asyncio.gather(*(scores(engine, *each) for each in asked))
        answer = await generated
    both = zip(asked, logits, probabilities, strict=True)
    found = {(len(prompt), name): values for (prompt, name), *values in both}
    for name in CLASSES:
        expected = made.logits(name, prompts)
        activated = expected.softmax(-1) if CLASSES[name] > 1 else expected.sigmoid()
        for at, prompt in enumerate(prompts):
            given, probability = found[len(prompt), name]
            torch.testing.assert_close(given, expected[at], rtol=0, atol=1e-4)
            torch.testing.assert_close(probability, activated[at], rtol=0, atol=1e-5)
    Oracle(made.model, {"r8": made.adapters["r8"]}).check_greedy(prompts[2], "r8", answer.token_ids)


async def test_a_head_in_half_precision_of_a_raw_dump_with_names_of_its_own(made: Classifiers, tmp_path: Path) -> None:
    folder = tmp_path / "named"
    folder.mkdir()
    tensors = load_file(made.adapters["mood"] / "adapter_model.safetensors")
    head = tensors.pop("base_model.model.score.weight").to(torch.bfloat16)
    dumped = {"score.modules_to_save.default.weight": head, "score.original_module.weight": torch.zeros_like(head)}
    save_file(
        tensors | {f"base_model.model.{name}": one for name, one in dumped.items()},
        folder / "adapter_model.safetensors",
    )
    config = json.loads((made.adapters["mood"] / "adapter_config.json").read_text())
    more = {"id2label": {"0": "bad", "1": "good"}, "problem_type": "multi_label_classification"}
    (folder / "adapter_config.json").write_text(json.dumps(config | more))
    prompt = prompt_of(random.Random(2), 20)
    async with running(model_config(made.model), lora_config({"named": folder}), engine_config()) as engine:
        found = await scores(engine, prompt, "named")
        assert (await embed(engine, prompt, "named")).finish.head.classes == ("bad", "good")  # type: ignore[union-attr]
        info: AdapterInfo = engine.adapter("named")
        assert info.facts.num_classes == 2
    torch.testing.assert_close(found, made.logits("mood", [prompt])[0].sigmoid(), rtol=0, atol=2e-2)


async def test_another_head_is_another_version_that_answers_when_it_is_loaded(
    made: Classifiers, tmp_path: Path
) -> None:
    """Its matrices, and so its image, are the same."""
    folder = tmp_path / "other"
    folder.mkdir()
    tensors = load_file(made.adapters["mood"] / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"] *= -1
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes((made.adapters["mood"] / "adapter_config.json").read_bytes())
    prompt = prompt_of(random.Random(3), 20)
    settings: LoraSettings = lora_config({"mood": made.adapters["mood"]}, adapter_roots=[tmp_path])
    async with running(model_config(made.model), settings, engine_config()) as engine:
        first = await scores(engine, prompt, "mood", uses_activation=False)
        digest = engine.adapter("mood").digest
        assert (await engine.load_adapter("mood", str(folder), inplace=True)).digest != digest
        second = await scores(engine, prompt, "mood", uses_activation=False)
    torch.testing.assert_close(first, -second)


async def test_a_classifier_answers_while_it_is_uploaded(made: Classifiers, tmp_path: Path) -> None:
    """Its head has no numbers until all of it has arrived."""
    prompt, folder = prompt_of(random.Random(5), 20), made.adapters["topic"]
    body = (folder / "adapter_model.safetensors").read_bytes()
    rest = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:-2000]
        await rest.wait()
        yield body[-2000:]

    async with AsyncExitStack() as stack:
        lora = lora_config({}, adapters_dir=tmp_path)
        served = await build_engine(stack, model_config(made.model), lora, engine_config())
        engine, claims = served.engine, UploadClaims(len(body), (folder / "adapter_config.json").read_text())
        upload = asyncio.create_task(served.management.uploads.put("topic", pieces(), claims))
        await until(lambda: engine.catalog.find("topic") is not None)
        assert engine.adapter("topic").facts.num_classes == CLASSES["topic"]
        waiting = asyncio.create_task(scores(engine, prompt, "topic", uses_activation=False))
        await until(lambda: (found := engine.snapshot()).running + found.waiting > 0)
        rest.set()
        found, info = await waiting, (await upload).info
        assert info.facts.num_classes == CLASSES["topic"]
    torch.testing.assert_close(found, made.logits("topic", [prompt])[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
async def test_other_families_classify_like_transformers(tmp_path_factory: pytest.TempPathFactory, family: str) -> None:
    made = Classifiers(tmp_path_factory.mktemp(family), family)
    prompt = prompt_of(random.Random(4), 30)
    async with running(model_config(made.model), lora_config(made.adapters), engine_config()) as engine:
        found = await scores(engine, prompt, "topic", uses_activation=False)
    torch.testing.assert_close(found, made.logits("topic", [prompt])[0], rtol=0, atol=2e-4)
