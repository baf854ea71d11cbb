"""Changes of the embedding and the head on an emulated device: tokens equal those of peft, in every mode."""

import asyncio
import random

import pytest

from tests.gpu.answers import CONTEXT
from tests.gpu.host_backend import GRANULE_BYTES, serving
from tests.oracle.vocabulary import VocabularySubject, make_vocabulary_subject, prompts_with_changed_tokens
from tests.serving import MIB, Answer, engine_config, lora_config, model_config, submit

pytestmark = [
    pytest.mark.usefixtures("torch_for_triton"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]


@pytest.fixture(scope="module", params=["llama3", "gemma3"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VocabularySubject:
    return make_vocabulary_subject(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("mode", ["pipelined", "merged"])
def test_tokens_and_scores_are_those_of_peft(subject: VocabularySubject, mode: str) -> None:
    """All adapters and none, in the same batches, in chunks; adapters are evicted and moved meanwhile."""
    (prompt,) = prompts_with_changed_tokens(1)
    asked = [(prompt, name) for name in subject.oracles]
    random.Random(5).shuffle(asked)
    pool_bytes = 24 * GRANULE_BYTES
    lora = lora_config(subject.adapters, mode=mode, device_bytes=pool_bytes, host_bytes=4 * MIB)

    async def serve() -> list[Answer]:
        settings = engine_config(seqs=6, step_tokens=48, kv_bytes=pool_bytes)
        async with serving(model_config(subject.model, max_model_len=CONTEXT), lora, settings) as (engine, _):
            tasks = [submit(engine, *each, max_tokens=7, prompt_logprobs=2) for each in asked]
            return [await task for task in tasks]

    for (prompt, name), answer in zip(asked, asyncio.run(serve()), strict=True):
        subject.oracles[name].check_greedy(prompt, name, answer.token_ids)
        _, *scores = answer.prompt_logprobs
        subject.oracles[name].check_scores(prompt, name, [score for score in scores if score is not None], 2)
