"""Grammars of structured output: what they allow, what is refused, and what is shared."""

import asyncio
import gc
import itertools
import json
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tokenizers

from caraserve import demo
from caraserve.core.grammar import Grammar, TokenMatcher, mask_words
from caraserve.core.tenant import Tenant
from caraserve.errors import GrammarDeadEnd, GrammarTooComplex, InvalidRequest, Overloaded
from caraserve.model.families import load_plan
from caraserve.tokenizer import grammar as grammar_module
from caraserve.tokenizer.grammar import (
    FREE_GROWTH_BYTES,
    MAX_ANSWERS,
    MAX_GROWN_BYTES,
    MAX_SOURCE_BYTES,
    POOL,
    WORN_BYTES,
    GrammarCompiler,
    GrammarKind,
    GrammarSource,
)
from caraserve.tokenizer.grammar_memory import Growth
from caraserve.tokenizer.tokenizer import Tokenizer, load_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo.model_folder(), load_plan(demo.model_folder()), None)


def source_of(kind: GrammarKind, text: Any) -> GrammarSource:
    return GrammarSource(kind, text if isinstance(text, str) else json.dumps(text), "the_field")


def compiled(tokenizer: Tokenizer, kind: GrammarKind, text: Any) -> Grammar:
    async def compile_and_close() -> Grammar:
        try:
            return await tokenizer.grammars.compile(source_of(kind, text))
        finally:
            await tokenizer.grammars.close()

    return asyncio.run(compile_and_close())


@dataclass(frozen=True)
class Shared:
    """A tokenizer whose checking process serves several tests."""

    tokenizer: Tokenizer
    runner: asyncio.Runner

    def compiled(self, kind: GrammarKind, text: Any) -> Grammar:
        return self.runner.run(self.tokenizer.grammars.compile(source_of(kind, text)))


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    found = load_tokenizer(demo.model_folder(), load_plan(demo.model_folder()), None)
    with asyncio.Runner() as runner:
        yield Shared(found, runner)
        runner.run(found.grammars.close())


def allowed(tokenizer: Tokenizer, grammar: Grammar, text: str) -> set[int]:
    """Returns the tokens that may follow a text."""
    return allowed_next(tokenizer, grammar.matcher(tokenizer.encode(text, add_special_tokens=False)))


def allowed_next(tokenizer: Tokenizer, matcher: TokenMatcher) -> set[int]:
    mask = np.zeros(mask_words(tokenizer.vocab_size), np.uint32)
    matcher.write_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: tokenizer.vocab_size]).tolist())


def follows(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Returns whether the grammar allows every token of a text, and the end after it."""
    matcher, ids = grammar.matcher(), tokenizer.encode(text, add_special_tokens=False)
    for token in (*ids, min(tokenizer.eos_ids)):
        if token not in allowed_next(tokenizer, matcher):
            return False
        matcher.append(token)
    return True


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        ("json_schema", SCHEMA, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": "3"}'),
        ("json_schema", {"type": "object"}, '{"a": [1, {}]}', "[1]"),
        ("json_schema", {"type": "integer"}, "-9223372036854774784", "9" * 19),
        ("json_schema", {"items": {"type": "integer", "minimum": 5}}, f"[5, {'9' * 18}]", f"[5, {'9' * 20}]"),
        ("json_schema", {"items": {"type": ["integer", "string"], "maxLength": 2}}, '[5, "ab"]', f"[{'9' * 20}]"),
        ("json_schema", {"properties": {f"p{at}": {"type": "integer"} for at in range(500)}}, '{"p7": 1}', "{1}"),
        ("lark", 'start: "call " %json {"items": {"type": "integer"}}', "call [12]", f"call [{'9' * 19}]"),
        ("json_schema", {"type": "object", "propertyNames": {"pattern": "^x"}}, '{"x": 1}', '{"y": 1}'),
        ("json_schema", {"$schema": "https://json-schema.org/draft-07/schema", "type": "integer"}, "3", '"3"'),
        ("json_schema", {"$schema": "http://json-schema.org/schema#", "type": "integer"}, "3", '"3"'),
        ("json_schema", {"$ref": "#/$defs/a b", "$defs": {"a b": {"type": "integer"}}}, "3", '"3"'),
        ("lark", 'start: "call " %json {"type": "string", "format": "a %json "}', 'call "x"', "call 3"),
        ("regex", "[a-c]+[0-9]{2}", "abc42", "abc4"),
        ("choice", ["yes", "no"], "no", "maybe"),
        ("grammar", 'root ::= "a" root | "b"', "aab", "aa"),  # as llama.cpp writes it
        ("grammar", 'start: "a" start | "b"', "aab", "aa"),  # as Lark does
    ],
)
def test_a_grammar_allows_what_it_describes(
    shared: Shared, kind: GrammarKind, source: Any, right: str, wrong: str
) -> None:
    grammar = shared.compiled(kind, source)
    assert follows(shared.tokenizer, grammar, right)
    assert not follows(shared.tokenizer, grammar, wrong)


def test_only_an_end_token_may_follow_a_complete_answer(tokenizer: Tokenizer) -> None:
    grammar = compiled(tokenizer, "choice", ["yes"])
    assert not allowed(tokenizer, grammar, "ye") & tokenizer.eos_ids
    assert allowed(tokenizer, grammar, "yes") == set(tokenizer.eos_ids)


def test_text_is_free_until_a_trigger_of_a_structural_tag(tokenizer: Tokenizer) -> None:
    tag = {"trigger": "<call:", "begin": "<call:add>", "schema": {"type": "integer"}, "end": "</call>"}
    grammar = compiled(tokenizer, "structural_tag", [tag])
    assert follows(tokenizer, grammar, "We add: <call:add>12</call> and more")
    assert not follows(tokenizer, grammar, "We add: <call:sub>12</call>")
    assert not follows(tokenizer, grammar, 'We add: <call:add>"12"</call>')


def test_answers_to_one_grammar_do_not_share_their_position(tokenizer: Tokenizer) -> None:
    grammar = compiled(tokenizer, "regex", "ab*")
    at_the_start, other = allowed(tokenizer, grammar, ""), grammar.matcher()
    assert allowed(tokenizer, grammar, "abbb") != at_the_start
    assert allowed_next(tokenizer, other) == at_the_start


@pytest.mark.parametrize("regex", ["ab", "ab*"])
def test_what_was_launched_before_the_end_was_known_does_not_fail(tokenizer: Tokenizer, regex: str) -> None:
    """The second answer needs no new compilation."""
    grammar = compiled(tokenizer, "regex", regex)
    for _ in range(2):
        matcher = grammar.matcher(tokenizer.encode("ab", add_special_tokens=False))
        assert tokenizer.eos_ids <= allowed_next(tokenizer, matcher)
        for _ in range(2):
            matcher.append(min(tokenizer.eos_ids))
            assert tokenizer.eos_ids & allowed_next(tokenizer, matcher)
    assert compiled(tokenizer, "regex", regex) is grammar


def test_a_number_with_bounds_that_cannot_be_enforced_is_refused_in_words_of_the_schema(tokenizer: Tokenizer) -> None:
    too_large = {"integer": "minimum 1180591620717411303424 allows no integer of 64 bits", "number": "below 1e18"}
    for kind, said in too_large.items():
        with pytest.raises(InvalidRequest, match=said):
            compiled(tokenizer, "json_schema", {"type": kind, "minimum": 2**70})


def test_a_type_of_another_language_is_refused_with_those_that_there_are(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"Invalid type: dict; .* array, boolean, .* object"):
        compiled(tokenizer, "json_schema", {"type": "dict"})


@asynccontextmanager
async def compiling(tokenizer: Tokenizer) -> AsyncIterator[GrammarCompiler]:
    try:
        yield tokenizer.grammars
    finally:
        await tokenizer.grammars.close()


def deep(levels: int) -> str:
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


def doubling(rules: int) -> str:
    """A Lark grammar of terminals, each of which is the one before it twice."""
    return "start: T0\n" + "".join(f"T{at}: T{at + 1} T{at + 1}\n" for at in range(rules)) + f'T{rules}: "a"\n'


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", '{"type": "thing"}'),
        ("json_schema", '{"$ref": "file:///etc/passwd"}'),
        ("json_schema", deep(3000)),
        ("json_schema", json.dumps({"properties": {f"k{index}": {"type": "string"} for index in range(4500)}})),
        ("json_schema", json.dumps({"properties": {f"k{index}": {"type": "string"} for index in range(1500)}})),
        ("json_schema", json.dumps({"type": "string", "pattern": "("})),
        ("json_schema", '{"type": "integer", "multipleOf": 9999991}'),
        ("regex", "("),
        ("regex", "x" * (MAX_SOURCE_BYTES + 1)),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("grammar", "start: missing"),
        ("grammar", "\n" * 100_000),
        ("grammar", doubling(18)),
        ("grammar", doubling(40)),
        ("grammar", "\x00\ud800"),
    ],
    ids=lambda value: value[:30],
)
def test_a_wrong_or_too_complex_source_is_refused_by_the_name_of_its_field(
    shared: Shared, kind: GrammarKind, text: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shared.compiled(kind, text)
    assert caught.value.param == "the_field"
    assert len(caught.value.message) < 400


async def test_a_source_that_takes_too_long_stops_neither_the_event_loop_nor_later_sources(
    tokenizer: Tokenizer,
) -> None:
    async with compiling(tokenizer) as grammars:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.001)
                turns += 1

        turning = asyncio.create_task(turn())
        endless = GrammarSource("json_schema", '{"type": "integer", "multipleOf": 9999991}', "f")
        hostile = asyncio.create_task(grammars.compile(endless))
        await asyncio.sleep(0)
        await grammars.compile(GrammarSource("regex", "[x-z]{7}", "f"))
        with pytest.raises(InvalidRequest, match="takes longer than 1 s"):
            await hostile
        turning.cancel()
        assert turns > 100


async def test_a_user_with_too_many_new_grammars_is_refused_and_another_one_need_not_wait_for_them(
    tokenizer: Tokenizer,
) -> None:
    async with compiling(tokenizer) as grammars:
        ended: list[str] = []

        async def compile_one(user: str, regex: str) -> None:
            await grammars.uncompiled(GrammarSource("regex", regex, "f")).prepare(Tenant("key", user))
            ended.append(user)

        greedy = [compile_one("greedy", f"[a-f]{{{count}}}g") for count in range(1, POOL.of_user + 7)]
        flood = asyncio.gather(*greedy, return_exceptions=True)
        await asyncio.sleep(0)
        await compile_one("modest", "ab?")
        assert len(ended) < POOL.of_user // 2
        results = await flood
        assert sum(isinstance(result, Overloaded) for result in results) == 6
        assert results.count(None) == POOL.of_user


def test_the_memory_of_grammars_and_what_waits_are_metrics(tokenizer: Tokenizer) -> None:
    compiled(tokenizer, "regex", "a+b")
    samples = [page.splitlines()[-1] for page in tokenizer.families('x="y"')]
    assert samples == [
        f'caraserve:compiled_grammar_bytes{{x="y"}} {tokenizer.grammars.num_bytes}',
        'caraserve:grammars_waiting{x="y"} 0',
        'caraserve:templates_waiting{x="y"} 0',
    ]
    assert 1 << 19 < tokenizer.grammars.num_bytes < 1 << 21


def test_a_grammar_counts_while_it_is_compiled(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to three are compiled at once: each must see what the others will take."""
    grammars = shared.tokenizer.grammars
    before_bytes, build, meanwhile_bytes = grammars.num_bytes, grammars._build, list[int]()

    def noted(checked: Any, client: str) -> Any:
        meanwhile_bytes.append(grammars.num_bytes)
        return build(checked, client)

    monkeypatch.setattr(grammars, "_build", noted)
    shared.compiled("regex", "counted{3}")
    assert meanwhile_bytes == [grammars.num_bytes]
    assert grammars.num_bytes > before_bytes


async def test_a_refusal_leaves_nothing_for_the_garbage_collector(tokenizer: Tokenizer) -> None:
    async def refused() -> weakref.ref[InvalidRequest]:
        try:
            await tokenizer.grammars.compile(GrammarSource("regex", "(", "f"))
        except InvalidRequest as error:
            return weakref.ref(error)
        raise AssertionError("it was compiled")

    async with compiling(tokenizer):
        gc.collect()
        gc.disable()
        try:
            errors = [await refused() for _ in range(3)]
            await asyncio.sleep(0.0)
            assert [error() for error in errors] == [None] * 3
        finally:
            gc.enable()


async def test_requests_of_a_user_for_one_new_grammar_wait_as_one_until_all_have_left(tokenizer: Tokenizer) -> None:
    async with compiling(tokenizer) as grammars:
        sources = [GrammarSource("regex", regex, "f") for regex in ("[a-f]{3}", "[a-f]{4}")]
        requests = [
            [asyncio.create_task(grammars.compile(source)) for _ in range(POOL.of_user + 1)] for source in sources
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert grammars.num_waiting == 2
        for one in requests[1]:
            one.cancel()
        await asyncio.wait(requests[1])
        await asyncio.sleep(0)
        assert grammars.num_waiting == 1
        assert len({await one for one in requests[0]}) == 1


def exhaust(tokenizer: Tokenizer, matcher: TokenMatcher) -> None:
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    for _ in range(40):
        allowed_next(tokenizer, matcher)
        matcher.append(token)


def test_a_grammar_that_failed_is_compiled_again(tokenizer: Tokenizer) -> None:
    regex = "(((a{1,100}){1,100}){1,100}){1,100}b"
    grammar = compiled(tokenizer, "regex", regex)
    with pytest.raises(GrammarTooComplex, match="lexer"):
        exhaust(tokenizer, grammar.matcher())
    assert allowed(tokenizer, compiled(tokenizer, "regex", regex), "aa")


async def test_a_grammar_whose_text_no_token_begins_says_so() -> None:
    vocabulary = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "<end>": 2}, merges=[]))
    vocabulary.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = tokenizers.decoders.ByteLevel()
    vocabulary.add_special_tokens(["<end>"])
    grammars = GrammarCompiler(vocabulary.to_str, 3, [2])
    try:
        grammar = await grammars.compile(GrammarSource("regex", "(a|b)c", "regex"))
    finally:
        await grammars.close()
    mask = np.zeros(1, np.uint32)
    grammar.matcher().write_mask(mask)
    assert mask[0] == 0b011
    with pytest.raises(GrammarDeadEnd, match="no token"):
        grammar.matcher([0]).write_mask(mask)


def test_a_grammar_is_compiled_again_after_many_answers(tokenizer: Tokenizer) -> None:
    grammar = compiled(tokenizer, "regex", "[0-3]{2}")
    for _ in range(MAX_ANSWERS - 1):
        grammar.matcher()
    assert compiled(tokenizer, "regex", "[0-3]{2}") is grammar
    grammar.matcher()
    assert compiled(tokenizer, "regex", "[0-3]{2}") is not grammar


def test_a_grammar_that_answers_have_made_grow_is_compiled_again_and_ends_them_above_a_limit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated = itertools.count(step=2 << 20)
    monkeypatch.setattr(grammar_module, "Growth", lambda: Growth(lambda: next(allocated), look_s=0.0, most_per_s=2**60))
    grammar = compiled(tokenizer, "regex", "[a-z]+[0-9]")
    compiled_bytes = tokenizer.grammars.num_bytes

    def grow(most_bytes: int) -> None:
        while tokenizer.grammars.num_bytes < compiled_bytes + most_bytes:
            allowed(tokenizer, grammar, "a")

    grow(WORN_BYTES)
    assert compiled(tokenizer, "regex", "[a-z]+[0-9]") is grammar
    grow(WORN_BYTES + 1)
    assert compiled(tokenizer, "regex", "[a-z]+[0-9]") is not grammar
    with pytest.raises(GrammarTooComplex, match="memory"):
        grow(2 * MAX_GROWN_BYTES)


def test_a_grammar_that_has_grown_fails_where_its_client_has_no_memory_left(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown_bytes, needed = [FREE_GROWTH_BYTES], list[str]()
    monkeypatch.setattr(Growth, "note_mask", lambda self, seconds: True)
    monkeypatch.setattr(
        Growth, "num_bytes", property(lambda self: grown_bytes[-1], lambda self, value: None), raising=False
    )
    grammar = compiled(tokenizer, "regex", "[a-c]+d")

    def no_room(client: str, num_bytes: int) -> bool:
        needed.append(client)
        return False

    monkeypatch.setattr(grammar, "_make_room", no_room)
    assert allowed(tokenizer, grammar, "a")
    grown_bytes.append(FREE_GROWTH_BYTES + 1)
    with pytest.raises(GrammarTooComplex, match="memory"):
        allowed(tokenizer, grammar, "a")
    assert needed == [""]


async def test_concurrent_and_later_requests_share_one_compilation(tokenizer: Tokenizer) -> None:
    async with compiling(tokenizer) as compiler:
        source = GrammarSource("regex", "[a-f]{3}", "regex")
        grammars = await asyncio.gather(*(compiler.compile(source) for _ in range(5)))
        assert {*grammars, await compiler.compile(source)} == {grammars[0]}
