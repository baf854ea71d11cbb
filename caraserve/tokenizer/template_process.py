"""A process that renders the chat templates of adapters: `python -m caraserve.tokenizer.template_process`.

An admin of adapters need not run this machine, and the sandbox has no bound on time: loops within loops take hours,
and a string that is doubled again and again takes all memory. So a template that exceeds the limits ends this process.

The first message has the special tokens, and the format of calls that the operator chose. Each later one has a
template, and the arguments of a rendering, or None to ask for the names of the template's own arguments. An answer is
one of `KINDS`, and text.
"""

import json
import marshal
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from caraserve.errors import CaraServeError
from caraserve.tokenizer.chat_template import ChatTemplate
from caraserve.tokenizer.child_process import MAX_ANSWER_BYTES, Answer, answer_messages, limit_cpu

COMPILE_CPU_S = 2.0  # 64 KiB take up to 1 s
RENDER_CPU_S = 0.5  # 4,096 messages take a tenth of it
MAX_PROCESS_BYTES = 512 << 20  # that renderings may take
MAX_COMPILED_CHARACTERS = 2 << 20  # of templates that are kept compiled, at 80 bytes or so for each
PROMPT, ARGUMENTS, ERROR = KINDS = b"pae"  # text; a JSON list of names; a JSON list of the message and the field
_MAX_ERROR_CHARACTERS = 300


class _CompiledTemplates:
    """The templates that were used last, compiled."""

    def __init__(self, special_tokens: Mapping[str, str], tool_call_parser: str | None) -> None:
        self._special_tokens, self._tool_call_parser = special_tokens, tool_call_parser
        self._templates: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._characters = 0

    def answer(self, message: bytes) -> bytes:
        """Returns the answer to a message."""
        try:
            source, arguments = marshal.loads(message)
            limit_cpu(COMPILE_CPU_S)
            template = self._get(source)
            limit_cpu(RENDER_CPU_S)
            return _answered(template, arguments)
        except CaraServeError as error:
            return _error(error.message, error.param)
        except Exception as error:  # of a compiler for any text, or of text that is not UTF-8
            return _error(f"the chat template fails: {type(error).__name__}: {error}", "messages")

    def _get(self, source: str) -> ChatTemplate:
        """Raises ModelLoadError for a template that does not compile."""
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self._special_tokens, "the adapter", self._tool_call_parser)
            self._characters += len(source)
        self._templates.move_to_end(source)
        while self._characters > MAX_COMPILED_CHARACTERS:
            dropped, _ = self._templates.popitem(last=False)
            self._characters -= len(dropped)
        return self._templates[source]


def _answered(template: ChatTemplate, arguments: tuple[list[bytes], dict[str, Any]] | None) -> bytes:
    if arguments is None:
        return bytes([ARGUMENTS]) + json.dumps(sorted(template.arguments)).encode()
    conversation, options = arguments
    text = template.render([marshal.loads(one) for one in conversation], **options)
    prompt = bytes([PROMPT]) + text.encode()
    if len(prompt) > MAX_ANSWER_BYTES:
        return _error(f"the chat template makes a prompt of more than {MAX_ANSWER_BYTES} bytes", "messages")
    return prompt


def _error(message: str, param: str | None) -> bytes:
    return bytes([ERROR]) + json.dumps([message[:_MAX_ERROR_CHARACTERS], param]).encode()


def _begin(message: bytes) -> Answer:
    return _CompiledTemplates(*marshal.loads(message)).answer


if __name__ == "__main__":
    answer_messages(_begin, MAX_PROCESS_BYTES)
