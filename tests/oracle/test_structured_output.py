"""Answers that must follow a grammar, in one batch with others, of several adapters: all valid, and no other answer
changes."""

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import pytest

from caraserve import demo
from caraserve.core.grammar import Grammar
from caraserve.cpu.thread_team import ThreadTeam
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.slot_allocator import SlotAllocator
from caraserve.errors import GrammarTooComplex
from caraserve.loop import Engine
from caraserve.tokenizer.grammar import GrammarSource
from caraserve.tokenizer.tool_format import (
    HERMES,
    LLAMA3,
    MISTRAL,
    ArgumentsPart,
    CallStart,
    ToolCallParser,
    ToolFormat,
    calls_grammar,
)
from tests.fake_grammar import FakeGrammar
from tests.serving import MIB, engine_config, lora_config, model_config, running, submit

PATIENCE_S = 60.0
ADAPTERS = {name: demo.adapters_folder() / name for name in demo.ADAPTER_NAMES}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 5},
    {"enum": ["sea", "wind", 7, None]},
]


async def grammar_of(engine: Engine, schema: dict[str, Any]) -> Grammar:
    compact = schema | {"x-guidance": {"whitespace_flexible": False}}
    return await engine.tokenizer.grammars.compile(GrammarSource("json_schema", json.dumps(compact), "schema"))


@pytest.mark.parametrize(("kv_bytes", "preempts"), [(64 * MIB, False), (5 * MIB // 8, True)])
async def test_constrained_answers_are_valid_and_change_no_other_answer(
    monkeypatch: pytest.MonkeyPatch, kv_bytes: int, preempts: bool
) -> None:
    preempted: list[ActiveRequest] = []
    preempt = SlotAllocator.preempt
    monkeypatch.setattr(
        SlotAllocator, "preempt", lambda slots, active, now_s: (preempted.append(active), preempt(slots, active, now_s))
    )
    rng = random.Random(5)
    names = [None, *ADAPTERS]
    prompts = [tuple(rng.randrange(5, 500) for _ in range(rng.randrange(4, 30))) for _ in range(24)]

    settings = engine_config(seqs=12, kv_bytes=kv_bytes, prefix_caching=False)
    async with running(model_config(demo.model_folder(), max_model_len=256), lora_config(ADAPTERS), settings) as engine:
        free = [(prompt, names[at % len(names)]) for at, prompt in enumerate(prompts[:8])]
        alone = [(await submit(engine, *asked, max_tokens=40)).token_ids for asked in free]
        grammars = [await grammar_of(engine, schema) for schema in SCHEMAS]
        constrained = [
            submit(
                engine,
                prompt,
                names[at % len(names)],
                grammar=grammars[at % len(grammars)],
                ignore_eos=False,
                max_tokens=120,
                temperature=1.0,
                seed=at,
                logprobs=2,
            )
            for at, prompt in enumerate(prompts)
        ]
        together = [submit(engine, *asked, max_tokens=40) for asked in free]
        for at, answer in enumerate(await asyncio.gather(*constrained)):
            assert answer.finish.reason == "stop"
            jsonschema.validate(json.loads(answer.text), SCHEMAS[at % len(SCHEMAS)])
        assert [answer.token_ids for answer in await asyncio.gather(*together)] == alone
    assert any(active.request.inputs.params.grammar for active in preempted) is preempts


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3, MISTRAL], ids=lambda one: one.name)
async def test_required_calls_of_several_adapters_always_parse(tool_format: ToolFormat) -> None:
    rng = random.Random(7)
    names = [None, *ADAPTERS]
    prompts = [tuple(rng.randrange(5, 500) for _ in range(rng.randrange(4, 30))) for _ in range(12)]
    compact = SCHEMAS[0] | {"x-guidance": {"whitespace_flexible": False}}
    count = {
        "x-guidance": {"whitespace_flexible": False},
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    schemas = {"add_person": compact, "count": count}

    settings = engine_config(seqs=12, kv_bytes=64 * MIB, prefix_caching=False)
    async with running(model_config(demo.model_folder()), lora_config(ADAPTERS), settings) as engine:
        tools = [(name, json.dumps(schema)) for name, schema in schemas.items()]
        text = calls_grammar(tools, tool_format, engine.tokenizer.special_id, several=False, with_text=False)
        grammar = await engine.tokenizer.grammars.compile(GrammarSource("lark", text, "tools"))
        options: dict[str, Any] = {"grammar": grammar, "ignore_eos": False, "max_tokens": 200, "temperature": 1.0}
        submitted = [
            submit(engine, prompt, names[at % len(names)], seed=at, **options) for at, prompt in enumerate(prompts)
        ]
        for answer in await asyncio.gather(*submitted):
            assert answer.finish.reason == "stop"
            parser = ToolCallParser(tool_format)
            start, *parts = parser.push(answer.text) + parser.finish()
            assert isinstance(start, CallStart)
            assert all(isinstance(part, ArgumentsPart) for part in parts)
            arguments = json.loads("".join(part.text for part in parts if isinstance(part, ArgumentsPart)))
            jsonschema.validate(arguments, schemas[start.name])


@asynccontextmanager
async def demo_engine() -> AsyncIterator[Engine]:
    """Yields an engine without adapters for at most a minute."""
    settings = engine_config(seqs=4, kv_bytes=4 * MIB)
    async with (
        asyncio.timeout(PATIENCE_S),
        running(model_config(demo.model_folder(), max_model_len=64), lora_config({}), settings) as engine,
    ):
        yield engine


async def test_masks_are_written_while_the_pass_that_needs_them_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, run = threading.Semaphore(0), ThreadTeam.run

    def counting(team: ThreadTeam, function: Callable[..., None], *arguments: Any) -> None:
        passes.release()
        run(team, function, *arguments)

    def when_it_has_begun(count: int) -> list[int]:
        assert passes.acquire(timeout=PATIENCE_S)
        return [5 + count]

    async with demo_engine() as engine:
        monkeypatch.setattr(ThreadTeam, "run", counting)
        answer = await submit(engine, [5, 6], max_tokens=8, grammar=FakeGrammar(when_it_has_begun))
        assert answer.token_ids == list(range(5, 13))


async def test_a_matcher_that_fails_ends_its_request_alone() -> None:
    def failing(count: int) -> list[int]:
        if count == 3:
            raise GrammarTooComplex("too many states")
        return [5 + count]

    async with demo_engine() as engine:
        refused = submit(engine, [5, 6], max_tokens=8, grammar=FakeGrammar(failing))
        right = submit(engine, [5, 6], max_tokens=8, grammar=FakeGrammar(lambda count: [5 + count]))
        assert (await right).token_ids == list(range(5, 13))
        assert (await refused).token_ids == [5, 6, 7]
        error = (await refused).finish.error
        assert error is not None
        assert error.code == "grammar_too_complex"


async def test_a_finished_requests_matcher_is_freed_at_once() -> None:
    loop, freed = asyncio.get_running_loop(), asyncio.Event()
    grammar = FakeGrammar(lambda count: [5 + count], lambda: loop.call_soon_threadsafe(freed.set))
    async with demo_engine() as engine:
        await submit(engine, [5, 6], max_tokens=20, grammar=grammar)
        await freed.wait()
