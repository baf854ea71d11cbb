"""Chat templates: a conversation → the prompt's text, in a sandbox with bounds. Level 2.

A template is a program that came with a model's files. It runs in Jinja's immutable sandbox, can neither reach
attributes nor loop or write without end, and its errors are the client's answer, never a trace.
"""

import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from caraserve.errors import InvalidRequest, ModelLoadError

_MAX_OUTPUT_CHARS = 8 << 20
_FINAL_MARK = "\x00caraserve-final-message\x00"


class _TemplateRefusal(jinja2.TemplateError):
    """`raise_exception(...)` in a template."""


class ChatTemplate:
    """One compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        """Raises ModelLoadError when the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"{where}: the chat template does not compile: {error}") from None

    @classmethod
    def load(
        cls, folder: Path, settings: Mapping[str, Any], given: Path | None, special_tokens: Mapping[str, str]
    ) -> "ChatTemplate | None":
        """The operator's template, else the model's own (a file, or in tokenizer_config.json), else None."""
        if given is not None:
            try:
                return cls(given.read_text(encoding="utf-8"), special_tokens, str(given))
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"--chat-template {given} cannot be read: {error}") from None
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), special_tokens, path.name)
        source = settings.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        return cls(source, special_tokens, "tokenizer_config.json") if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The prompt's text. Raises InvalidRequest with what the template said."""
        flat = [{**message, "content": _flat(message.get("content"))} for message in messages]
        if continue_final_message and flat:
            flat[-1]["content"] = str(flat[-1]["content"]).strip() + _FINAL_MARK
        values = {**self._special_tokens, **kwargs, "messages": flat, "add_generation_prompt": add_generation_prompt}
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(values):
                size += len(part)
                if size > _MAX_OUTPUT_CHARS:
                    raise _TemplateRefusal(f"the prompt is longer than {_MAX_OUTPUT_CHARS} characters")
                parts.append(part)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from None
        text = "".join(parts)
        return text[: text.rindex(_FINAL_MARK)] if continue_final_message and _FINAL_MARK in text else text


def _flat(content: Any) -> Any:
    """Text parts as one string: templates expect strings."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, Mapping) and "text" in part)
    return content


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
