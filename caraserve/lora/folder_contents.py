"""What a folder holds, seen from outside: whether it has an adapter's files, and if not, why it is none. Which folders
of --adapters-dir are not served is kept for the clients that ask for them, beside the log."""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from caraserve.lora.peft_fields import CONFIG_NAME

TENSORS_NAME = "adapter_model.safetensors"
TORCH_NAME = "adapter_model.bin"
MLX_NAME = "adapters.safetensors"
MISTRAL_NAMES = ("params.json", "lora.safetensors")
# The files of an adapter, by the programs that write them; the last one has the tensors.
_FILES = ((CONFIG_NAME, TENSORS_NAME), (CONFIG_NAME, TORCH_NAME), (CONFIG_NAME, MLX_NAME), MISTRAL_NAMES)
GGUF_SUFFIX = ".gguf"  # of a file with both
TEMPLATE_NAME, TOKENIZER_CONFIG_NAME = "chat_template.jinja", "tokenizer_config.json"
TOKENIZER_NAME, ADDED_TOKENS_NAME = "tokenizer.json", "added_tokens.json"
TEXTS = (TEMPLATE_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, ADDED_TOKENS_NAME)  # that are read if they are there
TEMPLATE_TEXTS = (TEMPLATE_NAME, TOKENIZER_CONFIG_NAME)  # on which answers may depend
_PICKLES = ("adapter_model.pt", "adapter_model.pth")
NO_ADAPTERS = ("lost+found",)  # folders that file systems have
_MOST_ENTRIES = 200  # of a folder, that are looked at
_DEEPEST = 2  # folders below it, in which adapters are looked for
_SHOWN = 3  # names in a message
_MOST_REFUSED = 1000
_MOST_CHARACTERS = 500  # of a reason


def files_of(folder: Path) -> tuple[str, ...]:
    """Returns the names of an adapter's files, the last of which has its tensors; empty if a folder has none."""
    for names in _FILES:
        if all(os.path.lexists(folder / name) for name in names):
            return names
    found = _gguf_files(folder)
    return tuple(found) if len(found) == 1 else ()


def _gguf_files(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in islice(entries, _MOST_ENTRIES) if entry.name.endswith(GGUF_SUFFIX))
    except OSError:
        return []


def stamp(folder: Path) -> str:
    """Returns the sizes and times of an adapter's files, which change with the files; empty if one is missing. Those of
    its chat template count too, if there is one."""
    where = os.fspath(folder)  # text: 20,000 folders are looked at by turns
    try:
        stats = [os.stat(f"{where}/{name}") for name in files_of(folder)]
    except OSError:
        return ""
    for name in TEMPLATE_TEXTS if stats else ():
        try:
            stats.append(os.stat(f"{where}/{name}"))
        except OSError:
            continue
    return ",".join(f"{stat.st_size}:{stat.st_mtime_ns}" for stat in stats)


def changed_s(folder: Path) -> float:
    """Returns when an adapter's files were last written, in unix time. Raises OSError."""
    return max((folder / name).stat().st_mtime for name in files_of(folder) or (CONFIG_NAME,))


def why_no_adapter(folder: Path) -> str | None:
    """Returns what is missing in a folder; None if it has an adapter's files. Raises OSError."""
    if files_of(folder):
        return None
    if pickles := [name for name in _PICKLES if (folder / name).exists()]:
        return (
            f"the folder holds a pickle, {pickles[0]}; only {TENSORS_NAME} and {TORCH_NAME} are read: save the adapter "
            "again with save_pretrained of PEFT"
        )
    if len(found := _gguf_files(folder)) > 1:
        return f"the folder has {len(found)} GGUF files, {_listed(found)}; an adapter is one"
    has_tensors = any((folder / names[-1]).exists() for names in _FILES)
    missing = [name for name in (CONFIG_NAME, TENSORS_NAME) if not (folder / name).exists()]
    missing = [CONFIG_NAME] if has_tensors else missing
    if len(missing) == 1:
        return f"the folder has no {missing[0]}"
    if nested := list(islice(_adapters_below(folder, _DEEPEST), _SHOWN)):
        return (
            f"the folder has no adapter itself, but {_listed(nested)}; only folders directly in --adapters-dir are "
            "loaded: move them there, or name them in --lora-modules"
        )
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in islice(entries, _MOST_ENTRIES))
    return f"the folder has no {' and no '.join(missing)}, but {_listed(names)}" if names else "the folder is empty"


def _adapters_below(folder: Path, depth: int, inside: str = "") -> Iterator[str]:
    """Yields the paths of folders below that have an adapter's configuration."""
    with os.scandir(folder) as entries:
        below = sorted(entry.name for entry in islice(entries, _MOST_ENTRIES) if entry.is_dir())
    for name in below:
        if (folder / name / CONFIG_NAME).exists():
            yield f"{inside}{name}"
        elif depth > 1:
            yield from _adapters_below(folder / name, depth - 1, f"{inside}{name}/")


def _listed(names: list[str]) -> str:
    shown = ", ".join(ascii(name)[:100] for name in names[:_SHOWN])
    return f"{shown} and others" if len(names) > _SHOWN else shown


@dataclass(frozen=True, slots=True)
class RefusedFolder:
    """A folder that is not served, by its name, which would be its adapter's."""

    name: str
    reason: str
    since_s: float  # unix time


class RefusedFolders:
    """The newest refusals by name. Runs on the event loop."""

    def __init__(self, roots: Sequence[Path] = (), now: Callable[[], float] = time.time) -> None:
        """`roots`: folders whose paths no client learns."""
        self._roots, self._now = _pattern(roots), now
        self._refusals: dict[str, RefusedFolder] = {}  # the oldest first

    def note(self, name: str, reason: str) -> bool:
        """Records why a folder is not served. Returns False if that is known already."""
        reason = self._roots.sub("--adapters-dir", reason)[:_MOST_CHARACTERS]
        old = self._refusals.get(name)
        if old is not None and old.reason == reason:
            return False
        self._refusals.pop(name, None)
        self._refusals[name] = RefusedFolder(name, reason, self._now())
        if len(self._refusals) > _MOST_REFUSED:
            del self._refusals[next(iter(self._refusals))]
        return True

    def forget(self, name: str) -> None:
        """Removes a name's refusal: its adapter is served, or its folder is gone."""
        self._refusals.pop(name, None)

    def get(self, name: str) -> RefusedFolder | None:
        """Returns a name's refusal, or None."""
        return self._refusals.get(name)

    def all(self) -> list[RefusedFolder]:
        """Returns all refusals by name."""
        return sorted(self._refusals.values(), key=lambda refusal: refusal.name)


def why_alias(name: str) -> str:
    """Returns why a folder is not served whose name is that of an alias."""
    return f"{name!r} is an alias; rename the folder, or delete the alias"


def _pattern(roots: Sequence[Path]) -> re.Pattern[str]:
    """Returns what matches the folders' paths in a text, alone or before a slash; `/` tells nothing and stays."""
    longest_first = sorted((re.escape(str(root)) for root in roots if root != Path("/")), key=len, reverse=True)
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(longest_first) or '(?!)'})(?![\w-]|\.\w)")
