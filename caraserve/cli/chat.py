"""`caraserve chat`: a conversation with a server's adapters in the terminal.

Ctrl-C stops the answer under way, which stays in the conversation as far as it came. Ctrl-D leaves.
"""

import asyncio
import contextlib
import difflib
import re
import sys
import time
from collections.abc import Callable
from contextlib import aclosing

from rich.console import Console

from caraserve.cli.chat_client import AnswerPart, ChatClient, Models, Timing
from caraserve.errors import CaraServeError

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model's text must not control the terminal
_SHOWN_ADAPTERS = 50
_HELP = """\
/adapters [TEXT]  list the adapters whose names contain TEXT
/adapter NAME     let another adapter answer; the conversation continues
/clear            forget the conversation
/quit             leave, as does Ctrl-D; Ctrl-C stops an answer"""


class Chat:
    """One conversation. `model`: the adapter that answers, or the base model."""

    def __init__(self, client: ChatClient, console: Console, model: str) -> None:
        self.model = model
        self._client, self._console = client, console
        self._messages: list[dict[str, str]] = []
        self._commands = {"/adapter": self._switch, "/adapters": self._list, "/clear": self._clear, "/help": self._help}

    async def handle(self, line: str) -> bool:
        """Answers a line of the user, or runs its command. Returns False if the user leaves."""
        word, _, rest = line.strip().partition(" ")
        if word in ("/quit", "/exit"):
            return False
        try:
            if word.startswith("/") and "/" not in word[1:]:  # a path is a message
                await self._commands.get(word, self._unknown)(rest.strip())
            elif word:
                await self._answer(line.strip())
        except CaraServeError as error:
            self._say(error.message)
        return True

    async def _answer(self, text: str) -> None:
        """Prints the answer to `text` as it arrives, and dimmed the reasoning before it. What has arrived of the answer
        becomes part of the conversation; reasoning does not, as models are trained without that of earlier turns."""
        self._messages.append({"role": "user", "content": text})
        timing = Timing(time.monotonic())
        pieces: list[AnswerPart] = []
        try:
            async with aclosing(self._client.answer(self.model, self._messages, timing)) as answer:
                async for piece in answer:
                    if pieces and pieces[-1].is_reasoning and not piece.is_reasoning:
                        self._console.out("")
                    pieces.append(piece)
                    style = "dim" if piece.is_reasoning else None
                    self._console.out(_CONTROL.sub("", piece.text), end="", style=style, highlight=False)
        finally:
            if pieces:
                said = "".join(piece.text for piece in pieces if not piece.is_reasoning)
                self._messages.append({"role": "assistant", "content": said})
                self._console.out("")
            else:
                self._messages.pop()
        self._say(_summary(self.model, timing))

    async def _switch(self, name: str) -> None:
        self.model = chosen(await self._client.models(), name)
        self._say(f"{self.model} answers now")

    async def _list(self, part: str) -> None:
        models = await self._client.models()
        names = [name for name in (models.base, *models.adapters) if part.lower() in name.lower()]
        for name in names[:_SHOWN_ADAPTERS]:
            self._console.out(f"{'*' if name == self.model else ' '} {_CONTROL.sub('', name)}", highlight=False)
        if len(names) > _SHOWN_ADAPTERS:
            self._say(f"and {len(names) - _SHOWN_ADAPTERS} more: /adapters TEXT lists those whose names contain TEXT")

    async def _clear(self, _: str) -> None:
        self._messages.clear()
        self._say("the conversation is forgotten")

    async def _help(self, _: str) -> None:
        self._say(_HELP)

    async def _unknown(self, _: str) -> None:
        self._say(f"there is no such command\n{_HELP}")

    def _say(self, text: str) -> None:
        """Prints what is not part of the conversation."""
        self._console.out(_CONTROL.sub("", text), style="dim", highlight=False)


def chosen(models: Models, name: str | None) -> str:
    """Returns the model or adapter of that name; the base model for None. Raises CaraServeError."""
    names = (models.base, *models.adapters)
    if name is None:
        return models.base
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 3) or names[:3]
    raise CaraServeError(f"the server has no adapter {name!r}; it has for example {', '.join(near)}")


def chat(url: str, api_key: str | None, adapter: str | None) -> None:
    """Converses until the user leaves. Raises CaraServeError if there is no such server or adapter."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # importing it gives input() line editing and a history
    console = Console(soft_wrap=True)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            client = runner.run(stack.enter_async_context(ChatClient.open(url, api_key)))
            conversation = Chat(client, console, chosen(runner.run(client.models()), adapter))
            if is_terminal:
                console.out(f"{conversation.model} at {url}; /help lists the commands", style="dim", highlight=False)
            _converse(runner, conversation, console, lambda: input(f"{conversation.model}> " if is_terminal else ""))
        finally:
            runner.run(stack.aclose())


def _converse(runner: asyncio.Runner, conversation: Chat, console: Console, read: Callable[[], str]) -> None:
    """Handles lines until the user leaves. Ctrl-C, also while a line is edited, leads to the next line."""
    goes_on = True
    while goes_on:
        try:
            line = read()
            goes_on = runner.run(conversation.handle(line))
        except EOFError:
            console.out("")
            return
        except KeyboardInterrupt:
            console.out("stopped; /quit or Ctrl-D leaves", style="dim", highlight=False)


def _summary(model: str, timing: Timing) -> str:
    """`pirate: 42 tokens, first after 120 ms, then 55.0 tokens/s`."""
    parts = [] if timing.tokens is None else [f"{timing.tokens} token{'s' * (timing.tokens != 1)}"]
    if timing.ttft_ms is not None:
        parts.append(f"TTFT {timing.ttft_ms:.0f} ms")
    if timing.tokens_per_s is not None:
        parts.append(f"{timing.tokens_per_s:.1f} tokens/s")
    if timing.instance:
        parts.append(f"answered by {timing.instance}")
    if timing.is_cut:
        parts.append("cut off at the most tokens that it may have")
    return f"[{model}: {', '.join(parts) or 'an empty answer'}]"
