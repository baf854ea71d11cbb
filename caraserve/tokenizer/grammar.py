"""Compiles the grammars of structured output: JSON schemas, regular expressions, choices, and context-free grammars.

llguidance does the work and returns the allowed tokens as a bit mask: 10 µs per token of an answer with a small
vocabulary, 200 µs with 128,000 tokens. Clients choose the grammars, so a process that can be killed compiles each one
first (`grammar_check.py`), and this process only those that have passed, on a thread without the interpreter lock.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import llguidance
import numpy as np
from numpy.typing import NDArray

from caraserve.core.grammar import Grammar, TokenMatcher
from caraserve.core.tenant import NO_TENANT, Tenant
from caraserve.errors import GrammarDeadEnd, GrammarTooComplex, InvalidRequest, Overloaded
from caraserve.tokenizer.grammar_check import COMPILE_CPU_S, LIMITS
from caraserve.tokenizer.grammar_memory import GrammarBudget, Growth, counted_bytes
from caraserve.tokenizer.message_process import MessageProcess
from caraserve.tokenizer.process_pool import JobOwner, PoolLimits, ProcessPool
from caraserve.util.units import human_bytes

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark", "structural_tag"]

MAX_SOURCE_BYTES = 256 << 10
# A matcher of a shared grammar adds to its lexer's states, of which there is a limit: after so many answers it is
# compiled again, in some ms.
MAX_ANSWERS = 200
# Answers also make a grammar take more memory. Above the first limit they fail if its client has no memory left. Above
# the second it is compiled again for the next ones, whose masks then take longer. Above the third they fail.
FREE_GROWTH_BYTES, WORN_BYTES, MAX_GROWN_BYTES = 8 << 20, 32 << 20, 64 << 20
_ANSWER_S = 30.0  # until a grammar must have been compiled, on a machine that is busy
# A process takes 26 MB, or 130 MB with 128,000 tokens. A user's requests for one grammar wait as one.
POOL = PoolLimits(processes=3, waiting=256, of_client=64, of_user=32)
_CHECK = "caraserve.tokenizer.grammar_check"
_MAX_ERROR_CHARACTERS = 300
_RETRY_S = 1.0
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
        self._grammar.before_mask()
        began_s = time.perf_counter()
        # After the end of an answer comes the row that was launched before the end was known.
        if self._new_ids and not self._matcher.is_stopped():
            self._matcher.consume_tokens(self._new_ids)
        self._new_ids.clear()
        self._matcher.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], mask.nbytes)
        self._grammar.note_mask(time.perf_counter() - began_s)
        if not self._matcher.is_error():
            return
        reason = _first_line(self._matcher.get_error())
        if reason in _DEAD_ENDS:
            raise GrammarDeadEnd("at this point of the answer the grammar allows no token of the model's vocabulary")
        self._grammar.is_worn = True
        raise GrammarTooComplex(f"at this point of the answer the grammar is too complex: {reason}")


class _Grammar:
    """The `Grammar` of one source. All its matchers share one lexer, whose states add up."""

    def __init__(
        self,
        checked: "_CheckedSource",
        template: llguidance.LLMatcher,
        client: str,
        make_room: Callable[[str, int], bool],
    ) -> None:
        """`client`: for whom it was compiled. `make_room`: of `GrammarBudget`."""
        self.checked, self.client, self._template, self._make_room = checked, client, template, make_room
        self.is_worn = False  # whether it must be compiled again
        self._answers, self._growth = 0, Growth()

    @property
    def num_bytes(self) -> int:
        return self.checked.num_bytes + self._growth.num_bytes

    def before_mask(self) -> None:
        """Prepares for a mask, whose memory `note_mask` counts."""
        self._growth.before_mask()

    def note_mask(self, seconds: float) -> None:
        """Counts a mask that took so long to compute. Raises GrammarTooComplex if the grammar has grown too much."""
        if not self._growth.note_mask(seconds):
            return
        grown_bytes = self._growth.num_bytes
        self.is_worn |= grown_bytes > WORN_BYTES
        has_room = grown_bytes <= FREE_GROWTH_BYTES or self._make_room(self.client, 0)
        if grown_bytes > MAX_GROWN_BYTES or not has_room:
            raise GrammarTooComplex("the grammar is too complex: its answers have made it take too much memory")

    async def prepare(self, tenant: Tenant) -> None:
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

    async def prepare(self, tenant: Tenant) -> None:
        self._grammar = await self._compiler.compile(self._source, tenant)

    def matcher(self, output_ids: Sequence[int] = ()) -> TokenMatcher:
        assert self._grammar is not None, "prepare comes first"
        return self._grammar.matcher(output_ids)


class _CheckedSource(NamedTuple):
    """A source in llguidance's notation, and what counts for the memory that it takes when it is compiled."""

    text: str
    num_bytes: int


@dataclass(slots=True)
class _SharedTask:
    """The compilation for which a number of requests wait."""

    task: asyncio.Task[_Grammar]
    waiting: int = 0


class GrammarCompiler:
    """Compiles grammars for one tokenizer, in fair order between clients, and keeps them by digest."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, end_ids: Sequence[int]) -> None:
        """`vocab_size`: of the model's logits. `end_ids`: end an answer, allowed where the grammar is complete."""
        self._tokenizer_json, self._vocab_size, self._end_ids = tokenizer_json, vocab_size, list(end_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._first_message = b""  # for the checking processes
        self._checks: ProcessPool[MessageProcess] = ProcessPool(self._start_check, POOL, "their grammars")
        self._under_way: dict[tuple[str, str, bytes], _SharedTask] = {}
        self._compiled: GrammarBudget[_Grammar] = GrammarBudget()

    @property
    def num_waiting(self) -> int:
        """Returns the number of grammars that wait to be compiled."""
        return self._checks.num_waiting

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all compiled grammars."""
        return self._compiled.num_bytes

    def prepare(self) -> None:
        """Reads the tokenizer, which holds the interpreter lock: 1.2 s for 128,000 tokens. Call it before serving."""
        text = self._tokenizer_json()
        self._tokenizer = llguidance.LLTokenizer(text, self._vocab_size, self._end_ids or None)
        self._first_message = _message(tokenizer=text, vocab_size=self._vocab_size, end_ids=self._end_ids)

    def uncompiled(self, source: GrammarSource) -> Grammar:
        """Returns the grammar of a source; `prepare` compiles it, and raises as `compile`."""
        return _Uncompiled(source, self)

    async def compile(self, source: GrammarSource, tenant: Tenant = NO_TENANT) -> Grammar:
        """Returns the grammar; requests of a user for the same source share it while it is compiled, later ones of all
        users do. Raises InvalidRequest for a source that is wrong or too complex, and Overloaded if too many grammars
        wait or take the memory."""
        if (size := len(source.text)) > MAX_SOURCE_BYTES:
            raise InvalidRequest(
                f"{source.field} has {size} characters; {MAX_SOURCE_BYTES} are allowed.", param=source.field
            )
        digest = source.digest
        if (found := self._find(digest)) is not None:
            return found
        key = tenant.client, tenant.user, digest
        if (shared := self._under_way.get(key)) is None:
            compiling = self._checks.run(JobOwner(tenant), size, partial(self._compile, source, digest, tenant.client))
            shared = self._under_way[key] = _SharedTask(asyncio.create_task(compiling, name="caraserve-grammar"))
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiting -= 1
            if not shared.waiting:  # it has ended, or all clients have left
                del self._under_way[key]
                shared.task.cancel()
            del shared  # an error refers to this frame: they would be a cycle

    async def close(self) -> None:
        """Ends the checking processes."""
        await self._checks.close()

    def _find(self, digest: bytes) -> _Grammar | None:
        grammar = self._compiled.get(digest)
        return None if grammar is None or grammar.is_worn else grammar

    async def _start_check(self) -> MessageProcess:
        if self._tokenizer is None:
            await asyncio.to_thread(self.prepare)
        return await MessageProcess.start(_CHECK, self._first_message)

    async def _compile(self, source: GrammarSource, digest: bytes, client: str, process: MessageProcess) -> _Grammar:
        if (found := self._find(digest)) is not None:  # compiled for another user
            return found
        worn = self._compiled.get(digest)
        checked = await self._checked(source, process) if worn is None else worn.checked
        del worn  # so that its memory may be freed
        with self._compiled.reserve(client, checked.num_bytes) as reservation:
            if reservation is None:
                raise Overloaded(
                    f"the grammars in use take {human_bytes(self.num_bytes)}, which leaves no room for another one",
                    retry_after_s=_RETRY_S,
                )
            grammar = await asyncio.to_thread(self._build, checked, client)
            self._compiled.keep(digest, grammar, reservation)
        return grammar

    def _build(self, checked: _CheckedSource, client: str) -> _Grammar:
        assert self._tokenizer is not None
        matcher = llguidance.LLMatcher(self._tokenizer, checked.text, log_level=0, limits=LIMITS)
        return _Grammar(checked, matcher, client, self._compiled.make_room)

    async def _checked(self, source: GrammarSource, process: MessageProcess) -> _CheckedSource:
        """Returns a source in llguidance's notation once the other process has compiled it. Raises InvalidRequest."""
        try:
            answer = json.loads(await process.ask(_message(kind=source.kind, text=source.text), _ANSWER_S))
        except TimeoutError:
            reason = f"it takes longer than {COMPILE_CPU_S:g} s"
        except ConnectionError:
            reason = "it takes too much memory"
        else:
            if (grammar := answer.get("grammar")) is not None:
                return _CheckedSource(grammar, counted_bytes(answer["bytes"]))
            reason = _first_line(answer["error"])
        raise InvalidRequest(f"{source.field} cannot be compiled: {reason}", param=source.field)


def _message(**values: object) -> bytes:
    return json.dumps(values).encode()


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:_MAX_ERROR_CHARACTERS]
