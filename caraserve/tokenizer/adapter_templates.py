"""Chat templates that adapters have of their own. A process that can be killed renders them (`template_process.py`)."""

import asyncio
import json
import marshal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caraserve.core.reasoning_grammar import ReasoningTokens
from caraserve.errors import InvalidRequest, Overloaded
from caraserve.tokenizer.message_process import MessageProcess
from caraserve.tokenizer.reasoning import ReasoningFormat, detect_reasoning
from caraserve.tokenizer.template_limits import (
    ANSWER_S,
    MAX_PROCESS_BYTES,
    MAX_TEMPLATES,
    MAX_TEXT_CHARACTERS,
    MAX_WAITING,
    RENDER_CPU_S,
)
from caraserve.tokenizer.template_process import ERROR
from caraserve.tokenizer.tool_format import ToolFormat, detect_format, names_tools
from caraserve.util.units import human_bytes

_PROCESS = "caraserve.tokenizer.template_process"
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class AdapterTemplate:
    """A chat template that compiles, and what it shows of the model's answers."""

    source: str
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    renders_tools: bool
    templates: "AdapterTemplates"

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt's text. Raises InvalidRequest with the template's own message, or if it takes too much
        time or memory, and Overloaded."""
        if (characters := sum(len(message["content"]) for message in messages)) > MAX_TEXT_CHARACTERS:
            raise InvalidRequest(
                f"messages have {characters} characters; {MAX_TEXT_CHARACTERS} are allowed.", param="messages"
            )
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "kwargs": kwargs or {},
            "tools": tools,
        }
        message = await asyncio.to_thread(_message, self.source, messages, options)
        answer = await self.templates.ask(message, "messages")
        return str(answer, "utf-8")


class AdapterTemplates:
    """Compiles and renders templates, one after the other."""

    def __init__(
        self,
        special_tokens: Mapping[str, str],
        tool_call_parser: str | None,
        marks: ReasoningTokens | None,
    ) -> None:
        """`tool_call_parser`: of `TOOL_FORMATS`, else by the template. `marks`: of the model's reasoning; None if its
        tokens cannot write them."""
        self._first_message = marshal.dumps((dict(special_tokens), tool_call_parser))
        self._tool_call_parser, self._marks = tool_call_parser, marks
        self._process: MessageProcess | None = None
        self._turn = asyncio.Lock()
        self._waiting: set[asyncio.Task[bytes]] = set()
        self._known: OrderedDict[str, AdapterTemplate] = OrderedDict()

    async def load(self, source: str) -> AdapterTemplate:
        """Returns a template. Raises InvalidRequest if it does not compile, and Overloaded."""
        if (template := self._known.get(source)) is None:
            answer = await self.ask(marshal.dumps((source, None)), "chat_template")
            arguments = frozenset(json.loads(bytes(answer)))
            tool_format = detect_format(source, self._tool_call_parser)
            reasoning_format = detect_reasoning(source, arguments, self._marks)
            renders_tools = names_tools(source) or self._tool_call_parser is not None
            template = AdapterTemplate(source, tool_format, reasoning_format, renders_tools, self)
            self._known[source] = template
        self._known.move_to_end(source)
        if len(self._known) > MAX_TEMPLATES:
            self._known.popitem(last=False)
        return template

    async def ask(self, message: bytes, field: str) -> memoryview:
        """Returns the answer of the process. Raises InvalidRequest that names `field`, or another field of a request,
        and Overloaded."""
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(f"{len(self._waiting)} requests wait for their prompts", retry_after_s=_RETRY_S)
        task = asyncio.create_task(self._answer(message), name="caraserve-chat-template")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        # Shielded, so that a client that leaves does not end the process in the middle of an answer.
        answer = memoryview(await asyncio.shield(task))
        if answer[0] == ERROR:
            reason, param = json.loads(bytes(answer[1:]))
            raise InvalidRequest(reason, param=param if field == "messages" else field)
        return answer[1:]

    async def close(self) -> None:
        """Ends the process."""
        for task in tuple(self._waiting):
            task.cancel()
        if self._process is not None:
            await self._process.close()
            self._process = None

    async def _answer(self, message: bytes) -> bytes:
        async with self._turn:
            if self._process is None or not self._process.is_usable:
                if self._process is not None:
                    await self._process.close()
                self._process = await MessageProcess.start(_PROCESS, self._first_message)
            try:
                return await self._process.ask(message, ANSWER_S)
            except (TimeoutError, ConnectionError):
                most = f"{RENDER_CPU_S:g} s or {human_bytes(MAX_PROCESS_BYTES)} of memory"
                reason = f"the chat template takes more than {most}"
                return bytes([ERROR]) + json.dumps([reason, "messages"]).encode()


def _message(source: str, messages: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    try:
        # One by one: encoding a value holds the interpreter lock.
        message: Any = source, ([marshal.dumps(one) for one in messages], options)
        return marshal.dumps(message)
    except ValueError:
        raise InvalidRequest("messages are nested too deeply.", param="messages") from None
