"""Compiles the grammars of structured output: JSON schemas, regular expressions, choices, and context-free grammars.

llguidance does the work and returns the allowed tokens as a bit mask: 10 µs per token of an answer with a small
vocabulary, 200 µs with 128,000 tokens. Clients choose the grammars, so a process that can be killed compiles each one
first (`grammar_check.py`), and this process only those that have passed, on a thread without the interpreter lock.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import llguidance
import numpy as np
from numpy.typing import NDArray

from caraserve.core.grammar import Grammar, TokenMatcher
from caraserve.errors import GrammarDeadEnd, GrammarTooComplex, InvalidRequest, Overloaded
from caraserve.tokenizer.grammar_limits import (
    COMPILE_S,
    LIMITS,
    MAX_ANSWERS,
    MAX_GRAMMARS,
    MAX_SOURCE_BYTES,
    MAX_WAITING,
)
from caraserve.tokenizer.message_process import MessageProcess

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark", "structural_tag"]

_CHECK = "caraserve.tokenizer.grammar_check"
_MAX_ERROR_CHARACTERS = 300
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")  # what llguidance reports where no token may follow


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as a client sent it. `field`: where it was, for error messages.

    `text`: a JSON schema, a regular expression, a JSON list of strings, a grammar as Lark or GBNF, one as Lark, or a
    JSON list of objects with `begin`, `schema`, `end` and `trigger`.
    """

    kind: GrammarKind
    text: str
    field: str

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(f"{self.kind}:{self.text}".encode(errors="surrogatepass")).digest()


class _Matcher:
    """The `TokenMatcher` of one answer."""

    def __init__(self, grammar: "_Grammar", matcher: llguidance.LLMatcher, output_ids: Sequence[int]) -> None:
        self._grammar, self._matcher = grammar, matcher
        self._new_ids = list(output_ids)  # tokens of the answer that the matcher has not consumed

    def append(self, token_id: int) -> None:
        self._new_ids.append(token_id)

    def write_mask(self, mask: NDArray[np.uint32]) -> None:
        # After the end of an answer comes the row that was launched before the end was known.
        if self._new_ids and not self._matcher.is_stopped():
            self._matcher.consume_tokens(self._new_ids)
        self._new_ids.clear()
        self._matcher.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], mask.nbytes)
        if not self._matcher.is_error():
            return
        reason = _first_line(self._matcher.get_error())
        if reason in _DEAD_ENDS:
            raise GrammarDeadEnd("at this point of the answer the grammar allows no token of the model's vocabulary")
        self._grammar.is_worn = True
        raise GrammarTooComplex(f"at this point of the answer the grammar is too complex: {reason}")


class _Grammar:
    """The `Grammar` of one source. All its matchers share one lexer, whose states add up."""

    def __init__(self, text: str, template: llguidance.LLMatcher) -> None:
        self.text, self._template = text, template
        self.is_worn = False  # whether it must be compiled again
        self._answers = 0

    async def prepare(self) -> None:
        """It is compiled."""

    def matcher(self, output_ids: Sequence[int] = ()) -> _Matcher:
        self._answers += 1
        self.is_worn |= self._answers >= MAX_ANSWERS
        return _Matcher(self, self._template.deep_copy(), output_ids)


class _Uncompiled:
    """The `Grammar` of a source that is compiled when it is needed."""

    def __init__(self, source: GrammarSource, compiler: "GrammarCompiler") -> None:
        self._source, self._compiler = source, compiler
        self._grammar: Grammar | None = None

    async def prepare(self) -> None:
        self._grammar = await self._compiler.compile(self._source)

    def matcher(self, output_ids: Sequence[int] = ()) -> TokenMatcher:
        assert self._grammar is not None, "prepare comes first"
        return self._grammar.matcher(output_ids)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, one after the other, and keeps them by digest."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, end_ids: Sequence[int]) -> None:
        """`vocab_size`: of the model's logits. `end_ids`: tokens that end an answer, allowed only where the grammar is
        complete."""
        self._tokenizer_json, self._vocab_size, self._end_ids = tokenizer_json, vocab_size, list(end_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._first_message = b""  # for the checking process
        self._check: MessageProcess | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._compiled: OrderedDict[bytes, _Grammar] = OrderedDict()

    def prepare(self) -> None:
        """Reads the tokenizer, which holds the interpreter lock: 1.2 s for 128,000 tokens. Call it before serving."""
        text = self._tokenizer_json()
        self._tokenizer = llguidance.LLTokenizer(text, self._vocab_size, self._end_ids or None)
        self._first_message = _message(tokenizer=text, vocab_size=self._vocab_size, end_ids=self._end_ids)

    def uncompiled(self, source: GrammarSource) -> Grammar:
        """Returns the grammar of a source; `prepare` compiles it, and raises as `compile`."""
        return _Uncompiled(source, self)

    async def compile(self, source: GrammarSource) -> Grammar:
        """Returns the grammar; requests for the same source share it. Raises InvalidRequest for a source that is wrong
        or too complex, and Overloaded if too many requests wait for their grammars."""
        if (size := len(source.text)) > MAX_SOURCE_BYTES:
            raise InvalidRequest(
                f"{source.field} has {size} characters; {MAX_SOURCE_BYTES} are allowed.", param=source.field
            )
        digest = source.digest
        if (found := self._find(digest)) is not None:
            return found
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} requests wait for their grammars", retry_after_s=COMPILE_S)
        self._waiting += 1
        try:
            async with self._turn:
                return self._find(digest) or await self._compile(source, digest)
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Ends the checking process."""
        if self._check is not None:
            await self._check.close()
            self._check = None

    def _find(self, digest: bytes) -> _Grammar | None:
        grammar = self._compiled.get(digest)
        if grammar is None or grammar.is_worn:
            return None
        self._compiled.move_to_end(digest)
        return grammar

    async def _compile(self, source: GrammarSource, digest: bytes) -> _Grammar:
        if self._tokenizer is None:
            await asyncio.to_thread(self.prepare)
        worn = self._compiled.get(digest)
        text = await self._checked(source) if worn is None else worn.text
        grammar = self._compiled[digest] = await asyncio.to_thread(self._build, text)
        self._compiled.move_to_end(digest)
        if len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return grammar

    def _build(self, text: str) -> _Grammar:
        assert self._tokenizer is not None
        return _Grammar(text, llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS))

    async def _checked(self, source: GrammarSource) -> str:
        """Returns a source in llguidance's notation once the other process has compiled it. Raises InvalidRequest."""
        if self._check is None or not self._check.is_usable:
            await self.close()
            self._check = await MessageProcess.start(_CHECK, self._first_message)
        try:
            answer = json.loads(await self._check.ask(_message(kind=source.kind, text=source.text), COMPILE_S))
        except TimeoutError:
            reason = f"it takes longer than {COMPILE_S:g} s"
        except ConnectionError:
            reason = "it takes too much memory"
        else:
            if (grammar := answer.get("grammar")) is not None:
                return str(grammar)
            reason = _first_line(answer["error"])
        raise InvalidRequest(f"{source.field} cannot be compiled: {reason}", param=source.field)


def _message(**values: object) -> bytes:
    return json.dumps(values).encode()


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:_MAX_ERROR_CHARACTERS]
