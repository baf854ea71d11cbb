"""An answer as a row of blocks, each a text or the call of a function, as Responses and Messages write it."""

import uuid
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from caraserve.http.reasoning import Reasoning
from caraserve.http.tool_calls import Tools, new_call_id
from caraserve.tokenizer.tool_format import CallStart, TextPart, ToolCallParser, ToolEvent


@dataclass(frozen=True, slots=True)
class Block:
    """A text, or the call of the function `name`, whose arguments are the text, as JSON."""

    index: int
    name: str | None = None
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
    """The blocks of one answer, whose text may come in pieces. There is one at least, an empty text if need be."""

    def __init__(self, tools: Tools | None, reasoning: Reasoning | None) -> None:
        self._tools = tools
        self._reasoning = None if reasoning is None else reasoning.parser()
        self._parser = None if tools is None else ToolCallParser(tools.tool_format, tools.most_calls)
        self._blocks: list[Block] = []

    @property
    def last(self) -> Block:
        """The block that the latest text belongs to."""
        return self._blocks[-1]

    def push(self, text: str, *, is_last: bool) -> list[BlockChange]:
        """Adds text; returns what it changes, in order. Reasoning before the answer is left out."""
        changes: list[BlockChange] = []
        if self._reasoning is not None:
            text = self._reasoning.push(text, is_last=is_last).answer
        for event in self._tool_events(text, is_last):
            if isinstance(event, CallStart):
                self._start(changes, event.name)
                continue
            if isinstance(event, TextPart) and (not self._blocks or self._blocks[-1].name is not None):
                self._start(changes, None)
            self._blocks[-1].parts.append(event.text)
            changes.append(BlockChange("add", self._blocks[-1], event.text))
        if is_last:
            if not self._blocks:
                self._start(changes, None)
            changes.append(BlockChange("end", self._blocks[-1]))
        return changes

    def _tool_events(self, text: str, is_last: bool) -> list[ToolEvent]:
        if self._parser is None:
            return [TextPart(text)] if text else []
        return self._parser.push(text) + (self._parser.finish() if is_last else [])

    def _start(self, changes: list[BlockChange], name: str | None) -> None:
        if self._blocks:
            changes.append(BlockChange("end", self._blocks[-1]))
        call_id = "" if name is None or self._tools is None else new_call_id(self._tools.tool_format)
        self._blocks.append(Block(len(self._blocks), name, call_id))
        changes.append(BlockChange("start", self._blocks[-1]))
