"""A process that compiles grammars of clients before the server does: `python -m caraserve.tokenizer.grammar_check`.

Some sources take minutes or gigabytes, and nothing can stop a compilation from within. This process is killed instead.
The first line of its input is the tokenizer as JSON; each later line is a source, which one line answers: the grammar
in llguidance's notation, or why it is refused.
"""

import json
import os
import resource
import signal
import sys
import time
from typing import Any

import llguidance

from caraserve.tokenizer.closed_schema import close_objects
from caraserve.tokenizer.grammar_limits import (
    COMPILE_S,
    FIRST_MASK_S,
    LIMITS,
    MAX_GRAMMAR_BYTES,
    MAX_PROCESS_BYTES,
    WHITESPACE,
)


def main() -> None:
    """Answers sources until the input ends."""
    start = json.loads(sys.stdin.buffer.readline())
    tokenizer = llguidance.LLTokenizer(start["tokenizer"], start["vocab_size"], start["end_ids"] or None)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MAX_PROCESS_BYTES,) * 2)
    _answer({"ready": True})
    for line in sys.stdin.buffer:
        source = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * COMPILE_S)  # ends this process, also when the server has died
        try:
            answer = {"grammar": _checked(source["kind"], source["text"], tokenizer)}
        except RecursionError:
            answer = {"error": "it is nested too deeply"}
        except ValueError as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(answer)


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n")
    sys.stdout.buffer.flush()


def _checked(kind: str, text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Compiles a source and its first masks. Returns the grammar. Raises ValueError."""
    grammar = _to_grammar(kind, text, tokenizer)
    before_bytes = _data_bytes()
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    for beginning in ("", "{"):  # a schema with too many properties fails where its object begins
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        matcher.try_consume_tokens(tokenizer.tokenize_str(beginning))
        started_s = time.perf_counter()
        matcher.compute_bitmask()
        if time.perf_counter() - started_s > FIRST_MASK_S:
            raise ValueError("it is too complex: its first token takes too long")
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if _data_bytes() - before_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError("it is too complex: it takes too much memory")
    return grammar


def _to_grammar(kind: str, text: str, tokenizer: llguidance.LLTokenizer) -> str:
    """Returns a source as llguidance's own notation. Raises ValueError."""
    if kind == "json_schema":
        closed = json.dumps(close_objects(json.loads(text)))
        return llguidance.LLMatcher.grammar_from_json_schema(closed, defaults={"whitespace_pattern": WHITESPACE})
    if kind != "structural_tag":
        return llguidance.grammar_from(kind, text)  # type: ignore[arg-type]
    tags = json.loads(text)
    special = {_is_special(tag["trigger"], tokenizer) for tag in tags}
    if len(special) > 1:
        raise ValueError("triggers are all special tokens of the model, or all text")
    parts = [
        llguidance.StructTag(
            trigger=tag["trigger"], begin=tag["begin"], grammar=json.dumps(tag["schema"]), end=tag["end"]
        )
        for tag in tags
    ]
    return llguidance.grammar_from("lark", llguidance.StructTag.to_grammar(parts, assume_special=special == {True}))


def _is_special(text: str, tokenizer: llguidance.LLTokenizer) -> bool:
    """Returns whether a trigger is one special token of the model rather than text."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return len(ids) == 1 and tokenizer.is_special_token(ids[0])


def _data_bytes() -> int:
    """Returns the size of this process's private memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
