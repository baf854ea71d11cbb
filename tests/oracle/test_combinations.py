"""Several adapters with weights in one request give the tokens of peft's sum of them, wherever their weights are."""

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from caraserve.errors import AdapterBusy, AdapterRejected, NotFound
from caraserve.lora.adapter import AdapterTier, CombinedSource
from tests.oracle.models import SOME_KINDS, make_adapter, make_adapters, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.serving import engine_config, lora_config, model_config, running, submit

# Different ranks, modules, layers, scales and dtypes; one adapter alone, subtracted. PEFT takes the layers and the kind
# of scale from the first one, so that is one with all layers.
COMBINATIONS: Mapping[str, Mapping[str, float]] = {
    "r1*0.5+r8*0.25": {"r1": 0.5, "r8": 0.25},
    "mlp*0.7+r13*0.3+r64*0.4": {"r64": 0.4, "mlp": 0.7, "r13": 0.3},
    "r8*-0.5": {"r8": -0.5},
    "mlp+r8*-0.3": {"r8": -0.3, "mlp": 1.0},
}
NAMES = [None, *COMBINATIONS, "r8"]


class Subject:
    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.model = folder, make_model(folder / "model", family)
        self.adapters = make_adapters(folder, self.model, SOME_KINDS)
        self.oracle = Oracle(self.model, self.adapters)
        for name, weights in COMBINATIONS.items():
            self.oracle.combine(name, weights)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("combined"), "llama2")


@pytest.mark.parametrize("mode", ["overlapped", "assisted"])
async def test_combinations_beside_others_in_a_batch_answer_like_peft(subject: Subject, mode: str) -> None:
    """Over a slow link, so that CPU workers compute some of their layers."""
    rng = random.Random(mode)
    asked = [(prompt_of(rng, rng.choice((3, 17, 40))), name) for name in NAMES for _ in range(2)]
    loading = lora_config(subject.adapters, mode=mode, link_mb_per_s=8.0)
    async with running(model_config(subject.model), loading, engine_config(step_tokens=64, threads=2)) as engine:
        found = await asyncio.gather(*(submit(engine, *each, max_tokens=6) for each in asked))
    for (prompt, name), answer in zip(asked, found, strict=True):
        subject.oracle.check_greedy(prompt, name, answer.token_ids)
    assert subject.oracle.forgiven_ties <= subject.oracle.checked_tokens // 50


async def test_a_combination_is_an_adapter_of_its_own_to_the_caches(subject: Subject) -> None:
    name, prompt = "r1*0.5+r8*0.25", prompt_of(random.Random(1), 9)
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        first = await submit(engine, prompt, name)
        manager = engine.catalog.manager
        info = engine.adapter(name)
        adapter = manager.find(info.digest)
        assert adapter is not None
        assert adapter.tier is AdapterTier.DEVICE
        assert adapter.num_bytes >= sum(engine.adapter(one).num_bytes for one in ("r1", "r8"))
        assert manager.image(info.digest) is not None
        assert first.finish.served_by == f"{name}@{info.digest}"
        assert [one.name for one in engine.adapters()] == list(subject.adapters)  # it is not listed
        reads = manager.counters.disk_reads
        await submit(engine, prompt, "r8")
        again = await submit(engine, prompt, name)
        assert again.token_ids == first.token_ids
        assert manager.counters.disk_reads == reads + 1  # of r8 alone; its members' files were read for it, not kept
        assert engine.catalog.find("r8*0.25+r1*0.5") is None  # that is not its canonical name


async def test_a_member_that_is_replaced_or_unloaded_ends_its_combinations(subject: Subject) -> None:
    prompt = prompt_of(random.Random(2), 30)
    other = make_adapter(subject.folder / "other", subject.model, rank=4, seed=77)
    loading = lora_config(subject.adapters, adapter_roots=[subject.folder])
    async with running(model_config(subject.model), loading, engine_config()) as engine:
        before = await submit(engine, prompt, "r1+r8", max_tokens=12)
        digest = engine.adapter("r1+r8").digest
        await engine.load_adapter("r8", str(other), inplace=True)
        assert engine.catalog.manager.find(digest) is None
        after = await submit(engine, prompt, "r1+r8", max_tokens=12)
        assert engine.adapter("r1+r8").digest != digest
        assert after.token_ids != before.token_ids
        await engine.unload_adapter("r1")
        with pytest.raises(NotFound):
            submit(engine, prompt, "r1+r8")
        with pytest.raises(NotFound):
            engine.adapter("r1+r8")


async def test_a_combination_that_waits_while_a_member_is_unloaded_is_to_be_asked_for_again(subject: Subject) -> None:
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        adapter = engine.catalog.manager.find(engine.adapter("r1+r8").digest)
        assert adapter is not None
        source, ended = adapter.source, asyncio.get_running_loop().create_future()
        await engine.unload_adapter("r1")
        assert isinstance(source, CombinedSource)
        source.read(np.empty(adapter.num_bytes, np.uint8), ended.set_result, lambda image, layers: None)
        error = await asyncio.wait_for(ended, 5.0)
        assert isinstance(error, AdapterBusy)
        assert (error.param, error.retry_after_s) == ("model", 1.0)
        assert "send it again" in error.message


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"dora": True}, "scales or biases of outputs"),
        ({"invocation": [5, 6]}, "invocation tokens"),
        ({"tokens": [3, 4]}, "changes of the vocabulary"),
    ],
)
async def test_members_that_change_more_than_matrices_are_refused_by_name(
    subject: Subject, tmp_path: Path, kind: Mapping[str, object], says: str
) -> None:
    special = make_adapter(tmp_path / "special", subject.model, rank=4, seed=5, **kind)  # type: ignore[arg-type]
    adapters = {"r8": subject.adapters["r8"], "special": special}
    async with running(model_config(subject.model), lora_config(adapters), engine_config()) as engine:
        answer = await submit(engine, [5, 6, 7, 8], "r8*0.5+special*0.5")
        assert answer.finish.reason == "error"
        assert isinstance(answer.finish.error, AdapterRejected)
        assert answer.finish.error.message.startswith(f"special has {says}")
        assert (await submit(engine, [5, 6, 7, 8], "special")).finish.reason == "length"
        await engine.drain(5.0)
        engine.check()


async def test_a_weight_with_which_values_overflow_is_refused(subject: Subject) -> None:
    async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
        answer = await submit(engine, [5, 6], "r8*1e30")
        assert answer.finish.error is not None
        assert "with the weight 1e+30 the product of A and B may reach" in answer.finish.error.message
