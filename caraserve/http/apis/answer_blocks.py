"""An answer as a row of blocks, which all chat APIs write: reasoning, texts, and calls of functions."""

import uuid
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from caraserve.http.apis.reasoning import Reasoning
from caraserve.http.apis.tool_calls import CallableTools, new_call_id
from caraserve.tokenizer.tool_format import CallStart, TextPart, ToolCallParser, ToolEvent, pieces
from caraserve.util.tasks import in_turns

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of an answer. The text of a call of the function `name` is its arguments, as JSON."""

    index: int
    kind: BlockKind
    name: str = ""
    call_id: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
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

    def push(self, text: str, *, is_last: bool) -> list[BlockChange]:
        """Adds text; returns what it changes, in order."""
        changes: list[BlockChange] = []
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text, is_last=is_last)
            if reasoning and self._shows_reasoning:
                self._add(changes, "reasoning", reasoning)
        for event in self._tool_events(text, is_last):
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

    def _tool_events(self, text: str, is_last: bool) -> list[ToolEvent]:
        if self._parser is None:
            return [TextPart(text)] if text else []
        return self._parser.push(text) + (self._parser.finish() if is_last else [])

    def _add(self, changes: list[BlockChange], kind: BlockKind, text: str) -> None:
        if not self._blocks or self._blocks[-1].kind != kind:
            self._start(changes, kind)
        if self._keeps_text:
            self._blocks[-1].parts.append(text)
        changes.append(BlockChange("add", self._blocks[-1], text))

    def _start(self, changes: list[BlockChange], kind: BlockKind, name: str = "") -> None:
        if self._blocks:
            changes.append(BlockChange("end", self._blocks[-1]))
        call_id = new_call_id(self._tools.tool_format) if kind == "call" and self._tools is not None else ""
        self._blocks.append(Block(len(self._blocks), kind, name, call_id))
        changes.append(BlockChange("start", self._blocks[-1]))
