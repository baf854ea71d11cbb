"""Chat templates that adapters have of their own. Processes that can be killed render them (`template_process.py`)."""

import asyncio
import json
import marshal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from caraserve.core.reasoning_grammar import ReasoningTokens
from caraserve.errors import InvalidRequest
from caraserve.tokenizer.message_process import MessageProcess
from caraserve.tokenizer.process_pool import JobOwner, PoolLimits, ProcessPool
from caraserve.tokenizer.reasoning import ReasoningFormat, detect_reasoning
from caraserve.tokenizer.template_process import ERROR, MAX_PROCESS_BYTES, RENDER_CPU_S
from caraserve.tokenizer.tool_format import ToolFormat, detect_format, names_tools
from caraserve.util.units import human_bytes

MAX_TEXT_CHARACTERS = 4 << 20  # of the messages, which are copied in 4 ms
_ANSWER_S = 30.0  # until a template must have been compiled and rendered, on a machine that is busy
_MOST_TEMPLATES = 1024  # whose formats are known; the least recently used is dropped
# A process takes 23 MB, and renders an ordinary prompt in 0.2 ms: many requests may arrive at once.
_POOL = PoolLimits(processes=3, waiting=1024, of_client=512, of_user=512)
_PROCESS = "caraserve.tokenizer.template_process"
# Short chats are encoded at once, in 0.1 ms, and need not wait for a thread behind long ones.
_SHORT_CHAT = 64  # messages
_SHORT_CHARACTERS = 64 << 10
_PLAIN = {"role", "content"}  # other keys may be large


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
        owner: JobOwner,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt's text for the owner of a request. Raises InvalidRequest with the template's own message,
        or if it takes too much time or memory, and Overloaded."""
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
        is_plain = len(messages) <= _SHORT_CHAT and all(message.keys() <= _PLAIN for message in messages)
        is_short = is_plain and characters <= _SHORT_CHARACTERS and not tools and not kwargs
        encode = partial(_message, self.source, messages, options)
        message = encode() if is_short else await asyncio.to_thread(encode)
        answer = await self.templates.ask(message, "messages", owner)
        return str(answer, "utf-8")


class AdapterTemplates:
    """Compiles and renders templates, in fair order between clients and adapters."""

    def __init__(
        self, special_tokens: Mapping[str, str], tool_call_parser: str | None, marks: ReasoningTokens | None
    ) -> None:
        """`tool_call_parser`: of `TOOL_FORMATS`, else by the template. `marks`: of the model's reasoning; None if its
        tokens cannot write them."""
        self._first_message = marshal.dumps((dict(special_tokens), tool_call_parser))
        self._tool_call_parser, self._marks = tool_call_parser, marks
        self._processes: ProcessPool[MessageProcess] = ProcessPool(
            lambda: MessageProcess.start(_PROCESS, self._first_message), _POOL, "their prompts"
        )
        self._known: OrderedDict[str, AdapterTemplate] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that wait for their prompts."""
        return self._processes.num_waiting

    async def load(self, source: str, owner: JobOwner) -> AdapterTemplate:
        """Returns a template. Raises InvalidRequest if it does not compile, and Overloaded if too many of the owner's
        requests wait for their prompts: better now than when the messages have been read."""
        self._processes.check_room(owner)
        if (template := self._known.get(source)) is None:
            answer = await self.ask(marshal.dumps((source, None)), "chat_template", owner)
            arguments = frozenset(json.loads(bytes(answer)))
            tool_format = detect_format(source, self._tool_call_parser)
            reasoning_format = detect_reasoning(source, arguments, self._marks)
            renders_tools = names_tools(source) or self._tool_call_parser is not None
            template = AdapterTemplate(source, tool_format, reasoning_format, renders_tools, self)
            self._known[source] = template
        self._known.move_to_end(source)
        if len(self._known) > _MOST_TEMPLATES:
            self._known.popitem(last=False)
        return template

    async def ask(self, message: bytes, field: str, owner: JobOwner) -> memoryview:
        """Returns a process's answer. Raises Overloaded, and InvalidRequest with `field` or another field's name."""
        answer = memoryview(await self._processes.run(owner, len(message), partial(_answer, message)))
        if answer[0] == ERROR:
            reason, param = json.loads(bytes(answer[1:]))
            raise InvalidRequest(reason, param=param if field == "messages" else field)
        return answer[1:]

    async def close(self) -> None:
        """Ends the processes."""
        await self._processes.close()


async def _answer(message: bytes, process: MessageProcess) -> bytes:
    try:
        return await process.ask(message, _ANSWER_S)
    except (TimeoutError, ConnectionError):
        most = f"{RENDER_CPU_S:g} s or {human_bytes(MAX_PROCESS_BYTES)} of memory"
        return bytes([ERROR]) + json.dumps([f"the chat template takes more than {most}", "messages"]).encode()


def _message(source: str, messages: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    try:
        # One by one: encoding a value holds the interpreter lock.
        message: Any = source, ([marshal.dumps(one) for one in messages], options)
        return marshal.dumps(message)
    except ValueError:
        raise InvalidRequest("messages are nested too deeply.", param="messages") from None
