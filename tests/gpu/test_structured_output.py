"""Structured output over the CUDA backend and an emulated device: the tokens of the CPU backend, whatever is launched
ahead, and waits that always end."""

import asyncio
import random
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from caraserve.errors import GrammarFailed, GrammarTooComplex
from caraserve.gpu.driver.streams import Lane
from caraserve.loop import Engine
from caraserve.tokenizer.grammar import GrammarSource
from tests.fake_grammar import FakeGrammar
from tests.gpu.host_backend import PATIENCE_S, on_a_loop, serving
from tests.oracle.models import prompt_of
from tests.oracle.subject import KINDS, Subject, make_subject
from tests.serving import MIB, Answer, engine_config, lora_config, model_config, running, submit

CONTEXT = 120
TEXTS = ["[a-z ]{3,12}!", "(yes|no|perhaps)", "[0-9]{1,9}(\\.[0-9]{1,4})?"]


pytestmark = pytest.mark.usefixtures("torch_for_triton")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    kinds = {name: KINDS[name] for name in ("r8", "mixed")}
    return make_subject(tmp_path_factory.mktemp("structured"), kinds)


def on_the_device(subject: Subject, *, kv_granules: int = 40, **device: Any) -> Any:
    lora = lora_config(subject.adapters, mode="pipelined", device_bytes=4 * MIB, host_bytes=4 * MIB)
    engine = engine_config(seqs=6, step_tokens=48, kv_bytes=kv_granules * 32 << 10)
    return serving(model_config(subject.model, max_model_len=CONTEXT), lora, engine, **device)


async def ask_all(engine: Engine, count: int) -> list[Answer]:
    """Returns answers to requests of which two of three are constrained, by different grammars."""
    rng, names = random.Random(count), [None, "r8", "mixed"]
    sources = [GrammarSource("regex", text, "regex") for text in TEXTS]
    grammars = [await engine.tokenizer.grammars.compile(source) for source in sources]
    tasks = []
    for at in range(count):
        params: dict[str, Any] = {"temperature": 0.9 * (at % 4 > 0), "top_p": 0.95, "seed": at, "logprobs": 2}
        if at % 3:
            params |= {"grammar": grammars[at % len(TEXTS)], "ignore_eos": False}
        if at % 5 == 0:
            params |= {"presence_penalty": 0.4, "logit_bias": ((7, 3.0),)}
        tasks.append(submit(engine, prompt_of(rng, rng.choice((1, 5, 60))), names[at % 3], max_tokens=30, **params))
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("graph_bytes", "kv_granules", "last"),
    [(0, 40, None), (1 << 30, 40, None), (1 << 30, 40, Lane.COMPUTE), (0, 14, Lane.COPY)],
    ids=["kernels", "graphs", "graphs-late", "preempted"],
)
def test_constrained_answers_are_those_of_the_cpu_backend(
    subject: Subject, graph_bytes: int, kv_granules: int, last: Lane | None
) -> None:
    async def on_the_cpu() -> list[Answer]:
        async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
            return await ask_all(engine, 12)

    async def on_the_gpu() -> list[Answer]:
        device = on_the_device(subject, kv_granules=kv_granules, graph_bytes=graph_bytes, last=last)
        async with asyncio.timeout(PATIENCE_S), device as (engine, _):
            return await ask_all(engine, 12)

    wanted, found = asyncio.run(on_the_cpu()), asyncio.run(on_the_gpu())
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in wanted]
    for at, (answer, other) in enumerate(zip(found, wanted, strict=True)):
        scores = [entry.logprob for entry in answer.logprobs]
        assert scores == pytest.approx([entry.logprob for entry in other.logprobs], abs=1e-3)
        if at % 3:
            assert answer.finish.reason == "stop"
            assert re.fullmatch(TEXTS[at % len(TEXTS)], answer.text)


class Failing(Exception):
    """An error that no matcher should raise."""


@pytest.mark.parametrize("graph_bytes", [0, 1 << 30])
@pytest.mark.parametrize(
    ("error", "code"),
    [(GrammarTooComplex("too many states"), "grammar_too_complex"), (Failing("a defect"), None)],
    ids=["refused", "defect"],
)
@on_a_loop
async def test_a_matcher_that_fails_ends_its_request_alone(
    subject: Subject, error: Exception, code: str | None, graph_bytes: int
) -> None:
    def failing(count: int) -> Sequence[int]:
        if count == 3:
            raise error
        return [5 + count]

    device = on_the_device(subject, graph_bytes=graph_bytes)
    async with asyncio.timeout(PATIENCE_S), device as (engine, _):
        other = submit(engine, [9, 8, 7], "r8", max_tokens=8)
        refused = submit(engine, [5, 6], max_tokens=8, grammar=FakeGrammar(failing))
        right = submit(engine, [5, 6], max_tokens=8, grammar=FakeGrammar(lambda count: [5 + count]))
        subject.oracle.check_greedy([9, 8, 7], "r8", (await other).token_ids)
        assert (await right).token_ids == list(range(5, 13))
        answer = await refused
        assert answer.token_ids == [5, 6, 7]
        assert isinstance(answer.finish.error, GrammarFailed)
        assert answer.finish.error.code == code


@on_a_loop
async def test_a_request_cancelled_while_its_mask_is_written_stops_no_other(subject: Subject) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(count: int) -> Sequence[int]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return [5]

    device = on_the_device(subject, graph_bytes=1 << 30)
    async with asyncio.timeout(PATIENCE_S), device as (engine, _):
        left = submit(engine, [5, 6], max_tokens=8, grammar=FakeGrammar(slow))
        other = submit(engine, [9, 8, 7], "r8", max_tokens=8)
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        left.cancel()
        go_on.set()
        subject.oracle.check_greedy([9, 8, 7], "r8", (await other).token_ids)


@on_a_loop
async def test_a_finished_requests_matcher_is_freed_at_once(subject: Subject) -> None:
    loop, freed = asyncio.get_running_loop(), asyncio.Event()
    grammar = FakeGrammar(lambda count: [5 + count], lambda: loop.call_soon_threadsafe(freed.set))
    async with asyncio.timeout(PATIENCE_S), on_the_device(subject) as (engine, _):
        await submit(engine, [5, 6], max_tokens=20, grammar=grammar)
        await freed.wait()
