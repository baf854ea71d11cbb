"""What a folder holds, seen from outside: whether it has an adapter's files, and if not, why it is none."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from caraserve.lora.peft_config import CONFIG_NAME

TENSORS_NAME = "adapter_model.safetensors"
FILES = (CONFIG_NAME, TENSORS_NAME)
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
NO_ADAPTERS = ("lost+found",)  # folders that file systems have
_MOST_ENTRIES = 200  # of a folder, that are looked at
_DEEPEST = 2  # folders below it, in which adapters are looked for
_SHOWN = 3  # names in a message


def stamp(folder: Path) -> str:
    """Returns the sizes and times of an adapter's files, which change with the files; empty if one is missing."""
    try:
        stats = [(folder / name).stat() for name in FILES]
    except OSError:
        return ""
    return ",".join(f"{stat.st_size}:{stat.st_mtime_ns}" for stat in stats)


def changed_s(folder: Path) -> float:
    """Returns when an adapter's files were last written, in unix time. Raises OSError."""
    return max((folder / name).stat().st_mtime for name in FILES)


def why_no_adapter(folder: Path) -> str | None:
    """Returns what is missing in a folder; None if it has an adapter's files. Raises OSError."""
    missing = [name for name in FILES if not (folder / name).exists()]
    if not missing:
        return None
    if pickles := [name for name in _PICKLES if (folder / name).exists()]:
        return (
            f"the folder holds a pickle, {pickles[0]}; only {TENSORS_NAME} is read: save the adapter again with "
            "save_pretrained of a recent PEFT"
        )
    if len(missing) == 1:
        return f"the folder has no {missing[0]}"
    if nested := list(islice(_adapters_below(folder, _DEEPEST), _SHOWN)):
        return (
            f"the folder has no adapter itself, but {_listed(nested)}; only folders directly in --adapters-dir are "
            "loaded: move them there, or name them in --lora-modules"
        )
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in islice(entries, _MOST_ENTRIES))
    return f"the folder has no {' and no '.join(FILES)}, but {_listed(names)}" if names else "the folder is empty"


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
