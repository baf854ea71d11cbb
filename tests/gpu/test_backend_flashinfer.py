"""The CUDA backend over an emulated device with a stand-in for FlashInfer: tokens stay those of transformers and peft,
also when iterations are launched before others have begun; and nothing is compiled after the warm-up."""

import asyncio
import random
import sys
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from caraserve.core.batch import Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.errors import ConfigError
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.forward.builder import GpuSizes
from tests.gpu import fake_flashinfer
from tests.gpu.fake_flashinfer import Used, install
from tests.gpu.host_backend import GRANULE_BYTES, PATIENCE_S, Host, alone, serving
from tests.gpu.torch_kernels import torch_kernels
from tests.oracle.models import prompt_of
from tests.oracle.subject import KINDS, Subject, make_subject
from tests.serving import MIB, Answer, engine_config, lora_config, model_config, submit

CONTEXT, BLOCKS_EACH = 200, 13
ROOMY: dict[str, Any] = {"max_step_tokens": 300, "max_context": CONTEXT, "pool_bytes": 64 * GRANULE_BYTES}


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with torch_kernels():
        yield


@pytest.fixture(scope="module", params=["llama3", "mistral"])  # the latter with windows; both with shared heads
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    kinds = {name: KINDS[name] for name in ("r8", "r13")}
    return make_subject(tmp_path_factory.mktemp(request.param), kinds, request.param)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    return install(monkeypatch)


def ask(subject: Subject, count: int, used: Used | None = None, **sizes: Any) -> int:
    """Checks the answers to prompts that arrive while others decode; returns how often FlashInfer has run for them."""
    rng = random.Random(count)
    names = [None, *subject.adapters]
    asked = [(prompt_of(rng, rng.choice((1, 20, 80, 150, 190))), rng.choice(names)) for _ in range(count)]
    pool_bytes, before = 64 * GRANULE_BYTES, 0
    lora = lora_config(subject.adapters, device_bytes=pool_bytes, host_bytes=4 * MIB)
    engine = engine_config(seqs=6, step_tokens=300, kv_bytes=pool_bytes)

    async def serve() -> list[Answer]:
        nonlocal before
        model = model_config(subject.model, max_model_len=CONTEXT + 8)
        async with serving(model, lora, engine, **sizes) as (served, _):
            compiled, before = (set(used.compiled), used.runs) if used else (set(), 0)
            tasks = []
            for prompt, name in asked:
                tasks.append(submit(served, prompt, name, max_tokens=5))
                await asyncio.sleep(0.02)
            answers = await asyncio.gather(*tasks)
            assert used is None or used.compiled == compiled, "a kernel was compiled while serving"
            return answers

    for (prompt, name), answer in zip(asked, asyncio.run(serve()), strict=True):
        subject.oracle.check_greedy(prompt, name, answer.token_ids)
    return used.runs - before if used else 0


@pytest.mark.parametrize("last", [None, Lane.COMPUTE])
def test_prompts_beside_decoding_rows_answer_like_peft(subject: Subject, used: Used, last: Lane | None) -> None:
    assert ask(subject, 9, used, last=last, seed=5, flashinfer=True) > 0


def test_what_a_graph_serves_is_left_to_our_kernels(subject: Subject, used: Used) -> None:
    assert ask(subject, 6, used, graph_bytes=1 << 30, flashinfer=True) == 0


def test_by_default_it_is_not_even_imported(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # an import would fail
    assert GpuSizes(4, 4, 64, 64, 0.9, 0).flashinfer is False
    ask(subject, 4)


def prompt_batch(slot: int, prompt: list[int], first_block: int) -> Batch:
    start = SlotStart(slot, tuple(prompt), SlotSampling.greedy(len(prompt)))
    grant = BlockGrant(slot, 0, tuple(range(first_block, first_block + BLOCKS_EACH)))
    return Batch((start,), (grant,), (ScheduledRow(slot, 0, len(prompt), 0, samples=True),))


def launched(host: Host, prompts: list[list[int]]) -> "list[SimpleQueue[StepResult | Exception]]":
    """Launches a batch for each prompt, in two slots and over the same blocks by turns, before any has begun."""
    host.driver.held = {Lane.COMPUTE}
    ended = [SimpleQueue[StepResult | Exception]() for _ in prompts]
    for number, (prompt, done) in enumerate(zip(prompts, ended, strict=True)):
        host.backend.launch(prompt_batch(number % 2, prompt, number % 2 * BLOCKS_EACH), done.put)
    host.on_launching_thread(lambda: None)  # it waits for none of them
    host.driver.held = set()
    return ended


@pytest.mark.usefixtures("used")
def test_iterations_are_planned_before_the_ones_before_have_begun(subject: Subject) -> None:
    rng = random.Random(3)
    with alone(subject.model, flashinfer=True, **ROOMY) as host:
        for _ in range(3):
            prompts = [prompt_of(rng, length) for length in (90, 71, 120)]
            for prompt, done in zip(prompts, launched(host, prompts), strict=True):
                outcome = done.get(timeout=PATIENCE_S)
                assert isinstance(outcome, StepResult), outcome
                token = outcome.rows[0].token_id
                assert token is not None
                subject.oracle.check_greedy(prompt, None, [token])


@pytest.mark.usefixtures("used")
def test_a_kernel_that_cannot_be_compiled_ends_the_start_in_one_line(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("Could not find nvcc\nand much more")

    monkeypatch.setattr(fake_flashinfer._Wrapper, "plan", refuse)
    said = r"flashinfer: its kernels cannot be compiled \(Could not find nvcc\); it needs nvcc"
    with pytest.raises(ConfigError, match=said), alone(subject.model, flashinfer=True, **ROOMY):
        pass


@pytest.mark.usefixtures("used")
def test_a_server_of_short_contexts_never_plans(subject: Subject, used: Used) -> None:
    with alone(subject.model, flashinfer=True, max_context=60):
        pass
    assert used.windows == []
