"""Reads what an adapter's folder has of its own tokenizer: a chat template, and tokens that were added. Nothing of it
is needed to serve the adapter, so files that are missing are no error."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caraserve.errors import AdapterRejected
from caraserve.lora.folder_bytes import read_bytes
from caraserve.lora.folder_contents import ADDED_TOKENS_NAME, TEMPLATE_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from caraserve.util.text import is_text

MAX_TEXT_BYTES = 4 << 20  # of a file; a tokenizer_config.json with 1,000 added tokens has 200 KiB
# Of tokenizer.json, whose added tokens come before its vocabulary, with 170 bytes each.
_TOKENIZER_START_BYTES = 1 << 20
_ADDED = '"added_tokens":'


def read_template(folder: Path) -> str | None:
    """Returns the chat template in a folder, or None. As for transformers, the file of its own comes first, then the
    one in the tokenizer's configuration, of several the one named `default`. Raises AdapterRejected."""
    if (text := _read(folder / TEMPLATE_NAME)) is not None:
        return text
    template = _read_object(folder / TOKENIZER_CONFIG_NAME).get("chat_template")
    if isinstance(template, list):
        named = [one.get("template") for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[-1] if named else None
    if not isinstance(template, str) or not template:
        return None
    if not is_text(template):
        raise AdapterRejected("the chat template has half a pair of surrogates, which is no text")
    return template


def read_added_tokens(folder: Path) -> set[str]:
    """Returns the tokens that a folder's tokenizer has beside its vocabulary, also those that the base model's has.
    Raises AdapterRejected."""
    decoder = _read_object(folder / TOKENIZER_CONFIG_NAME).get("added_tokens_decoder")
    tokens = set(_read_object(folder / ADDED_TOKENS_NAME))
    tokens.update(_contents(decoder.values() if isinstance(decoder, dict) else ()))
    tokens.update(_contents(_added_in(_read(folder / TOKENIZER_NAME, _TOKENIZER_START_BYTES, is_start=True) or "")))
    return set(filter(is_text, tokens))


def _contents(tokens: Any) -> Iterator[str]:
    for token in tokens:
        if isinstance(token, dict) and isinstance(content := token.get("content"), str):
            yield content


def _added_in(start: str) -> list[Any]:
    """Returns the list of added tokens in the first part of a tokenizer.json."""
    at = start.find(_ADDED)
    if at < 0:
        return []
    rest = start[at + len(_ADDED) :].lstrip()
    try:
        tokens, _ = json.JSONDecoder().raw_decode(rest)
    except (ValueError, RecursionError):
        return []
    return tokens if isinstance(tokens, list) else []


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; empty without the file. Raises AdapterRejected."""
    text = _read(path)
    try:
        value = json.loads(text) if text is not None else {}
    except (ValueError, RecursionError):
        raise AdapterRejected(f"{path.name} is not valid JSON") from None
    return value if isinstance(value, dict) else {}


def _read(path: Path, most: int = MAX_TEXT_BYTES, *, is_start: bool = False) -> str | None:
    """Returns a file's text, or with `is_start` its first `most` bytes; None without the file. Raises
    AdapterRejected."""
    if not os.path.lexists(path):
        return None
    try:
        return read_bytes(path, most, is_start=is_start).decode(errors="ignore" if is_start else "strict")
    except UnicodeDecodeError:
        raise AdapterRejected(f"{path.name} is not UTF-8") from None
