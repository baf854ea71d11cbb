"""An answer as a row of blocks, which all chat APIs write: reasoning, texts, and calls of functions."""

import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from aiohttp import web

from caraserve.core.reasoning_progress import ReasoningProgress
from caraserve.core.request import Finish, TokenDelta
from caraserve.http.api_request import AnswerWriter, ResponseTotals, TextEvents, TokenCounts
from caraserve.http.apis.reasoning import Reasoning, add_tokens
from caraserve.http.apis.tool_calls import CallableTools, new_call_id
from caraserve.http.whole_answer import WholeAnswer
from caraserve.tokenizer.tool_format import CallStart, TextPart, ToolCallParser, pieces
from caraserve.util.tasks import in_turns

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of an answer. The text of a call of the function `name` is its arguments, as JSON."""

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    parts: list[str] = field(default_factory=list)  # of the text so far

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockChange(NamedTuple):
    """What new text does to a block: starts it, adds to it, or ends it."""

    kind: Literal["start", "add", "end"]
    block: Block
    text: str = ""


class AnswerBlocks:
    """The blocks of one answer, whose text may come in pieces. There is one at least, an empty text if need be.
    `keeps_text`: whether a block's text is needed after the change that adds it."""

    def __init__(self, tools: CallableTools | None, reasoning: Reasoning | None, *, keeps_text: bool = True) -> None:
        self._tools = tools
        self._reasoning = None if reasoning is None else reasoning.parser()
        self._shows_reasoning = reasoning is not None and reasoning.is_shown
        self._parser = None if tools is None else ToolCallParser(tools.tool_format, tools.most_calls)
        self._keeps_text = keeps_text
        self._blocks: list[Block] = []

    @property
    def last(self) -> Block:
        """The block that the latest text belongs to."""
        return self._blocks[-1]

    @property
    def is_in_text(self) -> bool:
        """Whether all further text belongs to the last block, which is one of text."""
        over = self._reasoning is None or self._reasoning.is_over
        return over and self._parser is None and bool(self._blocks) and self.last.kind == "text"

    def push(self, text: str, *, is_last: bool) -> list[BlockChange]:
        """Adds text; returns what it changes, in order."""
        changes: list[BlockChange] = []
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text, is_last=is_last)
            if reasoning and self._shows_reasoning:
                self._add(changes, "reasoning", reasoning)
        if self._parser is None:
            if text:
                self._add(changes, "text", text)
        else:
            for event in self._parser.push(text) + (self._parser.finish() if is_last else []):
                if isinstance(event, CallStart):
                    self._start(changes, "call", event.name)
                else:
                    self._add(changes, "text" if isinstance(event, TextPart) else "call", event.text)
        if is_last:
            if not self._blocks:
                self._start(changes, "text")
            changes.append(BlockChange("end", self._blocks[-1]))
        return changes

    async def read(self, text: str) -> list[Block]:
        """Reads a whole answer, in turns of the event loop; returns its blocks."""
        async for piece in in_turns(pieces(text)):
            self.push(piece, is_last=False)
        self.push("", is_last=True)
        return self._blocks

    def _add(self, changes: list[BlockChange], kind: BlockKind, text: str) -> None:
        if not self._blocks or self._blocks[-1].kind != kind:
            self._start(changes, kind)
        block = self._blocks[-1]
        if self._keeps_text:
            block.parts.append(text)
        changes.append(BlockChange("add", block, text))

    def _start(self, changes: list[BlockChange], kind: BlockKind, name: str = "") -> None:
        if self._blocks:
            changes.append(BlockChange("end", self._blocks[-1]))
        call_id = new_call_id(self._tools.tool_format) if kind == "call" and self._tools is not None else ""
        self._blocks.append(Block(len(self._blocks), kind, name, call_id))
        changes.append(BlockChange("start", self._blocks[-1]))


class BlocksWriter(AnswerWriter):
    """What the writers of Responses and Messages share. `reasoning`: None for a model that does not reason."""

    def __init__(self, blocks: AnswerBlocks, reasoning: ReasoningProgress | None) -> None:
        self._blocks, self._reasoning = blocks, reasoning
        self._has_started = False
        self._finish: Finish | None = None

    def events(self, index: int, delta: TokenDelta, counts: TokenCounts) -> bytes:
        written = [] if self._has_started else self._first_events(counts)
        self._has_started, self._finish = True, delta.finish
        if self._reasoning is not None:
            self._reasoning.add(delta.token_ids)
        for change in self._blocks.push(delta.text, is_last=delta.finish is not None):
            written += self._events_of(change)
        return b"".join(written)

    def text_events(self, index: int) -> TextEvents | None:
        is_over = self._reasoning is None or self._reasoning.is_over
        return self._add_text if is_over and self._blocks.is_in_text else None

    def _add_text(self, text: str) -> bytes:
        (change,) = self._blocks.push(text, is_last=False)
        return b"".join(self._events_of(change))

    async def whole(self, answers: Sequence[WholeAnswer], totals: ResponseTotals) -> web.Response:
        answer = answers[0].joined()
        self._finish = answer.finish
        await add_tokens(self._reasoning, answer)
        return await self._response(await self._blocks.read(answer.text), totals)

    @abstractmethod
    def _first_events(self, counts: TokenCounts) -> list[bytes]:
        """The events before those of the first delta."""

    @abstractmethod
    def _events_of(self, change: BlockChange) -> list[bytes]:
        """The events that a change of a block becomes."""

    @abstractmethod
    async def _response(self, blocks: Sequence[Block], totals: ResponseTotals) -> web.Response:
        """The whole answer with these blocks."""
