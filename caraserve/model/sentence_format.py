"""How a model folder makes embeddings of texts, in the files of sentence-transformers: `modules.json`, the pooling
module's `config.json`, and `config_sentence_transformers.json`. A folder without them embeds by its last token."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from caraserve.errors import ModelLoadError
from caraserve.util.text import is_text

Pooling = Literal["last", "mean", "first"]
_MODES: dict[str, Pooling] = {
    "lasttoken": "last",
    **dict.fromkeys(("mean_tokens", "mean"), "mean"),
    **dict.fromkeys(("cls_token", "cls"), "first"),
}
_MODE = "pooling_mode_"  # before the name of each mode, as a field that is true or false
_MODULES, _PROMPTS = "modules.json", "config_sentence_transformers.json"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SentenceFormat:
    """The embedding of a text: its tokens' hidden states after the final norm, pooled, and scaled to length 1 if
    `normalizes`. `prompts`: texts to put before it, by name; `default_prompt`: where a request names none."""

    pooling: Pooling = "last"
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""


LAST_TOKEN = SentenceFormat()


def read_sentence_format(folder: Path) -> SentenceFormat:
    """Reads a model folder. Raises ModelLoadError for what would make other embeddings than these."""
    prompts, default = _prompts(folder)
    modules = _read(folder / _MODULES)
    if modules is None:
        return SentenceFormat(prompts=prompts, default_prompt=default)
    entries = modules if isinstance(modules, list) else []
    kinds = {str(one.get("type")).rpartition(".")[2]: one for one in entries if isinstance(one, dict)}
    if unknown := kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise ModelLoadError(
            f"{folder / _MODULES} has the module {min(unknown)[:80]!r}; Transformer, Pooling and Normalize are "
            "supported. Without this file, the model generates text and embeds it by its last token"
        )
    pooling: Pooling = "last"
    if (entry := kinds.get("Pooling")) is not None:
        path = folder / str(entry.get("path", "")) / "config.json"
        if "\0" in str(path) or not path.resolve().is_relative_to(folder.resolve()):
            raise ModelLoadError(f"{folder / _MODULES}: the path of Pooling leads outside of the folder")
        pooling = _pooling(path, has_prompts=any(prompts.values()))
    return SentenceFormat(pooling, "Normalize" in kinds, prompts, default)


def _pooling(path: Path, *, has_prompts: bool) -> Pooling:
    config = _read(path)
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is missing, and {_MODULES} names it")
    modes = [name.removeprefix(_MODE) for name, value in config.items() if name.startswith(_MODE) and value is True]
    if isinstance(named := config.get("pooling_mode"), str):
        modes.append(named)
    known = [_MODES[mode] for mode in modes if mode in _MODES]
    if len(modes) != 1 or not known:
        given = ", ".join(modes) or "nothing"
        raise ModelLoadError(f"{path} pools by {given[:200]}; one of lasttoken, mean or cls is supported")
    if known[0] == "mean" and has_prompts and config.get("include_prompt") is False:
        raise ModelLoadError(f"{path}: include_prompt is false; the mean is that of all tokens here")
    return known[0]


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    """Returns the prompts by name, and the default one."""
    path = folder / _PROMPTS
    config = _read(path) or {}
    prompts = config.get("prompts") if isinstance(config, dict) else None
    if not isinstance(config, dict) or not isinstance(prompts, dict | None):
        raise ModelLoadError(f"{path}: prompts must be texts by name")
    found = prompts or {}
    if not all(isinstance(text, str) and is_text(text) for text in found.values()):
        raise ModelLoadError(f"{path}: prompts must be texts by name")
    name = config.get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in found):
        raise ModelLoadError(f"{path}: default_prompt_name is {str(name)[:80]!r}, and prompts has none of that name")
    return found, found.get(name, "")


def _read(path: Path) -> Any:
    """Returns the value in a JSON file; None without the file. Raises ModelLoadError."""
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is too large")
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from None
