"""A process that compiles grammars of clients before the server does: `python -m caraserve.tokenizer.grammar_check`.

Some sources take minutes or gigabytes, and nothing can stop a compilation from within. This process is killed instead.
The first message is the tokenizer as JSON; each later one is a source, and the answer is the grammar in llguidance's
notation with the bytes that it takes when it is compiled, or why it is refused.
"""

import json
import time
from functools import partial
from typing import Any

import llguidance

from caraserve.tokenizer.bounded_integers import bound_integers
from caraserve.tokenizer.child_process import Answer, allocated_bytes, answer_messages, limit_cpu
from caraserve.tokenizer.rewritten_schema import close_objects, rewrite_schema
from caraserve.tokenizer.schemas import JSON_TYPES

COMPILE_CPU_S = 1.0  # then this process ends
FIRST_MASK_CPU_S = 0.02  # for one of the first tokens: all requests of an iteration wait for it
MAX_GRAMMAR_BYTES = 24 << 20  # that a compiled grammar takes
MAX_PROCESS_BYTES = 256 << 20  # that compiling one may take
# Between the tokens of JSON: a space, or a line with its indentation. Without a bound, a weak model writes spaces until
# `max_tokens`: 40 of 1,000 answers of the demo model never ended.
WHITESPACE = r" ?(\n[ \t]{0,32})?"
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=50_000,
    max_grammar_size=10_000,
    verbose_errors=False,
)
_SCHEMA = "%json "


def _begin(message: bytes) -> Answer:
    start = json.loads(message)
    return partial(_answer, llguidance.LLTokenizer(start["tokenizer"], start["vocab_size"], start["end_ids"] or None))


def _answer(tokenizer: llguidance.LLTokenizer, message: bytes) -> bytes:
    source = json.loads(message)
    limit_cpu(COMPILE_CPU_S)
    found: dict[str, Any]
    try:
        grammar, num_bytes = _checked(source["kind"], source["text"], tokenizer)
        found = {"grammar": grammar, "bytes": num_bytes}
    except RecursionError:
        found = {"error": "it is nested too deeply"}
    except ValueError as error:
        found = {"error": _explained(str(error))}
    return json.dumps(found).encode()


def _explained(error: str) -> str:
    """Returns llguidance's error, with what is right instead of a type such as `dict`, and in our words for ranges."""
    if error.startswith("Failed to generate regex for"):
        return "a minimum or maximum of a number is too large to be enforced: below 1e18 it can be"
    if not error.startswith("Invalid type"):
        return error
    return f"{error.partition(chr(10))[0]}; the types of JSON Schema are {', '.join(JSON_TYPES)}"


def _checked(kind: str, text: str, tokenizer: llguidance.LLTokenizer) -> tuple[str, int]:
    """Compiles a source and its first masks. Returns the grammar and its bytes. Raises ValueError."""
    grammar = _to_grammar(kind, text, tokenizer)
    before_bytes = allocated_bytes()
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    for beginning in ("", "{"):  # a schema with too many properties fails where its object begins
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        matcher.try_consume_tokens(tokenizer.tokenize_str(beginning))
        started_s = time.process_time()
        matcher.compute_bitmask()
        if time.process_time() - started_s > FIRST_MASK_CPU_S:
            raise ValueError("it is too complex: its first token takes too long")
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if (num_bytes := allocated_bytes() - before_bytes) > MAX_GRAMMAR_BYTES:
        raise ValueError("it is too complex: it takes too much memory")
    return grammar, num_bytes


def _to_grammar(kind: str, text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Returns a source as llguidance's own notation. Raises ValueError."""
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(
            _enforced(json.loads(text)), defaults={"whitespace_pattern": WHITESPACE}
        )
    if kind == "lark":
        text = _with_enforced_schemas(text)
    if kind != "structural_tag":
        return llguidance.grammar_from(kind, text)  # type: ignore[arg-type]
    tags = json.loads(text)
    special = {_is_special(tag["trigger"], tokenizer) for tag in tags}
    if len(special) > 1:
        raise ValueError("triggers are all special tokens of the model, or all text")
    parts = [
        llguidance.StructTag(
            trigger=tag["trigger"], begin=tag["begin"], grammar=_enforced(tag["schema"]), end=tag["end"]
        )
        for tag in tags
    ]
    return llguidance.grammar_from("lark", llguidance.StructTag.to_grammar(parts, assume_special=special == {True}))


def _enforced(schema: Any) -> str:
    """Returns a schema in the keywords that llguidance enforces, whose answers follow `schema`."""
    return json.dumps(bound_integers(close_objects(rewrite_schema(schema))))


def _with_enforced_schemas(lark: str) -> str:
    """Returns a grammar of calls, in which `%json` is before each schema."""
    decoder, parts, at = json.JSONDecoder(), list[str](), 0
    while (found := lark.find(_SCHEMA, at)) >= 0:
        start = found + len(_SCHEMA)
        schema, end = decoder.raw_decode(lark, start)
        parts += lark[at:start], _enforced(schema)
        at = end
    return "".join([*parts, lark[at:]])


def _is_special(text: str, tokenizer: llguidance.LLTokenizer) -> bool:
    """Returns whether a trigger is one special token of the model rather than text."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(ids) == 1 and tokenizer.is_special_token(ids[0])


if __name__ == "__main__":
    answer_messages(_begin, MAX_PROCESS_BYTES)
