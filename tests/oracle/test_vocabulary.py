"""LoRA of the embedding and the head, and replaced rows of both, change tokens as in peft: with tied and untied bases,
and scaled embeddings, in one batch with other adapters."""

import asyncio
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from caraserve.errors import AdapterRejected
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft import inspect_adapter
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.families import load_plan
from tests.oracle.vocabulary import BASES, VocabularySubject, make_vocabulary_subject, prompts_with_changed_tokens
from tests.serving import engine_config, lora_config, model_config, running, submit

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


@pytest.fixture(scope="module", params=BASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VocabularySubject:
    return make_vocabulary_subject(tmp_path_factory.mktemp(request.param), request.param)


def test_a_head_with_too_many_other_rows_is_refused(subject: VocabularySubject, tmp_path: Path) -> None:
    plan = load_plan(subject.model)
    folder = shutil.copytree(subject.adapters["saved-head"], tmp_path / "many")
    tensors = load_file(folder / TENSORS_NAME)
    (name,) = (name for name in tensors if name.endswith("lm_head.weight"))
    tensors[name][:300] += 1
    save_file(tensors, folder / TENSORS_NAME)
    with pytest.raises(AdapterRejected, match=r"lm_head.weight replaces 301 rows \(.*\) of the base; at most 256"):
        inspect_adapter(folder, plan, BaseTensors(subject.model, plan))


@pytest.mark.parametrize("mode", ["overlapped", "assisted", "merged"])
async def test_tokens_are_those_of_peft(subject: VocabularySubject, mode: str) -> None:
    """All adapters and none, in the same batches, in chunks; with two threads, which share the panels of the head."""
    asked = [(prompt, name) for prompt in prompts_with_changed_tokens(3) for name in subject.oracles]
    lora, settings = lora_config(subject.adapters, mode=mode), engine_config(step_tokens=100, threads=2)
    async with running(model_config(subject.model), lora, settings) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=12) for each in asked))
    for (prompt, name), answer in zip(asked, answers, strict=True):
        subject.oracles[name].check_greedy(prompt, name, answer.token_ids)


async def test_scores_of_prompts_are_those_of_peft(subject: VocabularySubject) -> None:
    """Each adapter moves the scores by far more than the tolerance, so that the tests can fail."""
    (prompt,) = prompts_with_changed_tokens(1)
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        tasks = {name: submit(engine, prompt, name, prompt_logprobs=3, max_tokens=1) for name in subject.adapters}
        answers = {name: await task for name, task in tasks.items()}
    base = subject.oracles[None].logits(prompt, None)
    for name, answer in answers.items():
        _, *scores = answer.prompt_logprobs
        subject.oracles[name].check_scores(prompt, name, [score for score in scores if score is not None], 3)
        assert (subject.oracles[name].logits(prompt, name) - base).abs().max() > 0.5
