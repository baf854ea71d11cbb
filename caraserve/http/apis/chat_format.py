"""How a chat becomes a prompt, and how its answer writes reasoning and calls: as the template of its adapter has it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from caraserve.core.tenant import Tenant
from caraserve.errors import InvalidRequest
from caraserve.http.access.adapter_choice import ChosenAdapter
from caraserve.tokenizer.adapter_templates import AdapterTemplate
from caraserve.tokenizer.process_pool import JobOwner
from caraserve.tokenizer.reasoning import ReasoningFormat
from caraserve.tokenizer.tokenizer import ENCODED_IN_PLACE_CHARACTERS, Tokenizer
from caraserve.tokenizer.tool_format import ToolFormat

_PLAIN = {"role", "content", "name"}  # other keys may be large, and slow for a template to write
_SHORT_CHAT = 64  # messages


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The tokenizer with an adapter's chat template (None: the model's own). `owner`: whose request it is."""

    tokenizer: Tokenizer
    template: AdapterTemplate | None
    owner: JobOwner

    @classmethod
    async def of_adapter(cls, tokenizer: Tokenizer, adapter: ChosenAdapter, tenant: Tenant) -> Self:
        """Returns the format of an adapter, or of the base model. Raises InvalidRequest if its template does not
        compile, and Overloaded."""
        source, owner = adapter.defaults.chat_template, JobOwner(tenant, adapter.name or "")
        return cls(tokenizer, None if source is None else await tokenizer.adapter_templates.load(source, owner), owner)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the answer writes calls of tools; None if the template does not show it."""
        return self.tokenizer.tool_format if self.template is None else self.template.tool_format

    @property
    def renders_tools(self) -> bool:
        """Whether the prompt can show tools."""
        return self.tokenizer.renders_tools if self.template is None else self.template.renders_tools

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How the answer writes its reasoning; None if it has none."""
        return self.tokenizer.reasoning_format if self.template is None else self.template.reasoning_format

    async def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int,
    ) -> list[int]:
        """Returns the token ids of a conversation. Raises InvalidRequest, ContextLengthExceeded and Overloaded."""
        tokenizer, template = self.tokenizer, self.template
        if template is not None:
            text = await template.render(
                messages,
                self.owner,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=kwargs,
                tools=tools,
            )
            if len(text) <= ENCODED_IN_PLACE_CHARACTERS:
                return tokenizer.encode_chat(text, max_tokens=max_tokens)
            return await asyncio.to_thread(tokenizer.encode_chat, text, max_tokens=max_tokens)

        def render() -> list[int]:
            return tokenizer.chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=kwargs,
                tools=tools,
                max_tokens=max_tokens,
            )

        is_plain = tools is None and not kwargs and all(message.keys() <= _PLAIN for message in messages)
        short = len(messages) <= _SHORT_CHAT and is_plain
        characters = sum(len(message["content"]) for message in messages)
        in_place = short and characters <= ENCODED_IN_PLACE_CHARACTERS
        return render() if in_place else await asyncio.to_thread(render)


async def check_template(tokenizer: Tokenizer, source: str, tenant: Tenant, adapter: str) -> None:
    """Raises InvalidRequest for a template that does not compile, or that makes no prompt of a plain message, and
    Overloaded. `tenant`: who sets it, for which adapter."""
    owner = JobOwner(tenant, adapter)
    template = await tokenizer.adapter_templates.load(source, owner)
    try:
        text = await template.render([{"role": "user", "content": "Hello!"}], owner, add_generation_prompt=True)
    except InvalidRequest as error:
        message = f"chat_template fails on a user's message: {error.message}"
        raise InvalidRequest(message, param="chat_template") from None
    if not text:
        raise InvalidRequest("chat_template makes an empty prompt of a user's message.", param="chat_template")
