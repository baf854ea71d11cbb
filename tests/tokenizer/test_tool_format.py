"""The texts of calls: which are found, in whatever pieces they come, and which their grammars allow."""

import json
from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve import demo
from caraserve.config import ModelConfig
from caraserve.core.grammar import Grammar
from caraserve.model.families import load_plan
from caraserve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from caraserve.tokenizer.tool_format import (
    HERMES,
    LLAMA3,
    MISTRAL,
    TOOL_FORMATS,
    CallStart,
    TextPart,
    ToolCallParser,
    ToolEvent,
    ToolFormat,
    calls_grammar,
    detect_format,
)
from tests.tokenizer.test_grammar import allowed, compiled, follows

WEATHER = '{"city": "Oslo", "why": "\\"}</tool_call>{"}'
HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>'
LLAMA_CALL = f'{{"name": "weather", "parameters": {WEATHER}}}'
LIST_CALL = f'{{"name": "weather", "arguments": {WEATHER}}}'
ONE = ("", [("weather", WEATHER)])
TWO = ("", [("weather", WEATHER), ("weather", WEATHER)])


def read(tool_format: ToolFormat, *pieces: str, most_calls: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Returns the text outside of calls, and the calls with their arguments."""
    parser = ToolCallParser(tool_format, most_calls)
    events: list[ToolEvent] = [event for piece in pieces for event in parser.push(piece)]
    text, calls = "", []
    for event in events + parser.finish():
        if isinstance(event, TextPart):
            text += event.text
        elif isinstance(event, CallStart):
            calls.append((event.name, ""))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    assert len(calls) == parser.calls
    return text, calls


CASES: list[tuple[ToolFormat, str, tuple[str, list[tuple[str, str]]]]] = [
    (HERMES, HERMES_CALL, ONE),
    (HERMES, f"{HERMES_CALL}\n{HERMES_CALL}", TWO),
    (HERMES, f"Let me see.\n\n{HERMES_CALL}\n", ("Let me see.", ONE[1])),
    (HERMES, f"{HERMES_CALL}\nDone. ", ("Done. ", ONE[1])),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call>', ("", [("f", "{}")])),
    (HERMES, '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>', ("", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": {"x": "}"}}</tool_call>',
        ("", [("f", '{"a": 1}')]),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!', ("!", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', ("", [("f", '{"a": 1')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "é', ("", [("f", '{"a": "é')])),
    (HERMES, "a < b <tool_cal l> <tool", ("a < b <tool_cal l> <tool", [])),
    (HERMES, "  plain \n", ("  plain \n", [])),
    (HERMES, "<tool_call>\nf(x)</tool_call>", ("<tool_call>\nf(x)</tool_call>", [])),
    (HERMES, '<tool_call>{"name": 3}</tool_call>', ('<tool_call>{"name": 3}</tool_call>', [])),
    (HERMES, '<tool_call>{"name": "f", "arg', ('<tool_call>{"name": "f", "arg', [])),
    (HERMES, f"<tool_call>{HERMES_CALL}", ("<tool_call>", ONE[1])),
    (LLAMA3, LLAMA_CALL, ONE),
    (LLAMA3, f"\n<|python_tag|>{LLAMA_CALL}", ONE),
    (LLAMA3, f"{LLAMA_CALL}; {LLAMA_CALL}", TWO),
    (LLAMA3, f"So: {LLAMA_CALL}", (f"So: {LLAMA_CALL}", [])),
    (LLAMA3, '{"type": "function", "name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    (LLAMA3, '{"name": "Ann", "age": 3} and more', ('{"name": "Ann", "age": 3} and more', [])),
    (MISTRAL, f"[TOOL_CALLS][{LIST_CALL}]", ONE),
    (MISTRAL, f"[TOOL_CALLS] [{LIST_CALL}, {LIST_CALL}]", TWO),
    (MISTRAL, f"[TOOL_CALLS]weather{WEATHER}[TOOL_CALLS]weather[ARGS]{WEATHER}", TWO),
    (MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]a1[ARGS] {WEATHER}", ONE),
    (MISTRAL, "a[0] [TOOL_CALLS] nothing", ("a[0] [TOOL_CALLS] nothing", [])),
    (MISTRAL, "[TOOL_CALLS]not a name{}", ("[TOOL_CALLS]not a name{}", [])),
]


def test_the_option_names_every_format() -> None:
    parser = ArgumentParser()
    ModelConfig.add_arguments(parser)
    choices = {action.dest: action.choices for action in parser._actions}
    assert set(choices["tool_call_parser"] or ()) == set(TOOL_FORMATS)


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES)
def test_calls_and_text_are_told_apart(
    tool_format: ToolFormat, text: str, expected: tuple[str, list[tuple[str, str]]]
) -> None:
    assert read(tool_format, text) == expected
    assert read(tool_format, *text) == expected


@given(st.data())
def test_any_pieces_give_the_same_result(data: st.DataObject) -> None:
    tool_format, whole, _ = data.draw(st.sampled_from(CASES))
    bits = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", *'{}[]"\\,\nf']
    bits += ['{"name": "f", "arguments": {', whole]
    text = "".join(data.draw(st.lists(st.sampled_from(bits), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(tool_format, *pieces) == read(tool_format, text)


def test_one_call_is_kept_without_parallel_calls() -> None:
    assert read(HERMES, f"Hm. {HERMES_CALL}\n{HERMES_CALL} Bye", most_calls=1) == ("Hm.", ONE[1])


def test_the_name_comes_before_the_arguments_are_complete() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push("Hi <tool_c") == [TextPart("Hi")]
    assert parser.push('all>{"name": "f", "arguments": ') == []
    start, arguments = parser.push('{"a": "')
    assert start == CallStart("f")
    assert arguments.text == '{"a": "'  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("template", "parser", "expected"),
    [
        ("... <tool_call> ...", None, HERMES),
        ("<tool_call>\n<function=", None, None),
        ("<|python_tag|>", None, LLAMA3),
        ('{"name": function name, "parameters": ...}', None, LLAMA3),
        ("[TOOL_CALLS]", None, MISTRAL),
        ("plain", None, None),
        ("plain", "hermes", HERMES),
    ],
)
def test_the_format_is_that_of_the_template(template: str, parser: str | None, expected: ToolFormat | None) -> None:
    assert detect_format(template, parser) == expected


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo.model_folder(), load_plan(demo.model_folder()), None)


SCHEMA = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"]}
TOOLS = [
    ("weather", json.dumps(SCHEMA | {"additionalProperties": False, "$defs": {"City": {"enum": ["Oslo", "Rome"]}}})),
    ("time", '{"type": "object"}'),
]
ANSWER = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
RIGHT, WRONG = '{"city": "Oslo"}', '{"city": "Bern"}'


@pytest.mark.parametrize(
    ("tool_format", "call", "two"),
    [
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>', "%s\n%s"),
        (LLAMA3, '{"name": "weather", "parameters": %s}', None),
        (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": %s}]', None),
        (detect_format("[TOOL_CALLS][ARGS]"), "[TOOL_CALLS]weather[ARGS]%s", "%s%s"),
    ],
    ids=["hermes", "llama3", "mistral", "newer mistral"],
)
def test_a_grammar_allows_calls_with_right_arguments(
    tokenizer: Tokenizer, tool_format: ToolFormat, call: str, two: str | None
) -> None:
    grammars: dict[str, Grammar] = {}

    def accepts(text: str, **options: Any) -> bool:
        source = calls_grammar(
            TOOLS, tool_format, tokenizer.special_id, **{"several": True, "with_text": False} | options
        )
        if source not in grammars:
            grammars[source] = compiled(tokenizer, "lark", source)
        return follows(tokenizer, grammars[source], text)

    right, wrong = call % RIGHT, call % WRONG
    assert accepts(right)
    assert accepts(right, several=False)
    assert not accepts(wrong)
    assert not accepts(f"Well. {right}")
    assert not accepts("")
    for text in ("", "Hello, world.", right):
        assert accepts(text, with_text=True), text
    assert not accepts(wrong, with_text=True)
    triggered = f"{LLAMA3.trigger}{right}" if tool_format is LLAMA3 else right
    for text in (triggered, '{"n": 7}'):
        assert accepts(text, answer_schema=ANSWER), text
    for text in (wrong, '{"n": "7"}', "Hello.", f'{{"n": 7}}{triggered}'):
        assert not accepts(text, answer_schema=ANSWER), text
    if two is not None:
        assert accepts(two % (right, right))
        assert not accepts(two % (right, right), several=False)
    if tool_format is not LLAMA3:
        assert accepts(f"Well. {right}", with_text=True)


def test_a_special_token_of_calls_is_kept_in_the_text_and_in_the_grammar(tokenizer: Tokenizer) -> None:
    special, other = tokenizer.special_id("<|end|>"), tokenizer.special_id("<|user|>")
    assert special is not None
    assert other is not None
    assert tokenizer.special_id("sea") is None
    options: dict[str, Any] = {"stop": (), "include_stop": False, "skip_special_tokens": True}
    detokenizer = tokenizer.detokenizer([], **options, kept_special_ids=frozenset({special}))
    ids = [other, special, *tokenizer.encode("sea ", add_special_tokens=False), other]
    assert "".join(detokenizer.push(token_id)[0] for token_id in ids) == "<|end|>sea "
    tool_format = replace(MISTRAL, trigger="<|user|>")
    for with_text in (False, True):
        source = calls_grammar(TOOLS, tool_format, tokenizer.special_id, several=True, with_text=with_text)
        grammar = compiled(tokenizer, "lark", source)
        assert other in allowed(tokenizer, grammar, "")
        assert follows(tokenizer, grammar, f'<|user|>[{{"name": "weather", "arguments": {RIGHT}}}]')
        assert not follows(tokenizer, grammar, f'<|user|>[{{"name": "weather", "arguments": {WRONG}}}]')
