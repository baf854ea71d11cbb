"""Says what a path is that was given as a base model and is none, and what to give instead."""

import re
from pathlib import Path

from caraserve.model.gguf.files import is_gguf

# ORG/NAME, or ORG/NAME:Q4_K_M as llama.cpp takes it.
_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/(?P<name>[\w.-]+))(?::(?P<quantisation>[\w.-]+))?")
_LFS_POINTER = b"version https://git-lfs"
_BEFORE_GGUF = (b"lmgg", b"fmgg", b"tjgg")  # of llama.cpp until August 2023
_FOLDER = "a folder that holds config.json, tokenizer.json and safetensors weights, or a GGUF file"


def why_no_model(path: Path) -> str:
    """Returns why a path is no model; "" if it is a folder with a config.json, or a GGUF file. Raises OSError."""
    shown = repr(str(path))
    if path.is_dir():
        has_model = (path / "config.json").exists() and (any(path.glob("*.safetensors")) or not _gguf_files(path))
        return "" if has_model else f"{shown} {_lacks(path)}"
    if not path.exists():
        if path.suffix == ".gguf":
            return f"model file {shown} does not exist"
        return f"model folder {shown} does not exist; {_instead_of(str(path))}"
    if is_gguf(path):
        return ""
    if path.suffix == ".gguf":
        return f"{shown} does not begin as GGUF files do: {_begins_as(path)}"
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        return f"{shown} is a file of weights: give the folder that it is in, with config.json and tokenizer.json"
    return f"{shown} is a file, not a model: give {_FOLDER}"


def _lacks(folder: Path) -> str:
    """Returns what a folder without config.json has instead."""
    if (folder / "adapter_config.json").exists():
        return f"is an adapter, not a base model: serve its base model with --lora-modules {folder.name}={folder}"
    if found := _gguf_files(folder):
        lacking = "safetensors weights" if (folder / "config.json").exists() else "config.json"
        return f"has no {lacking}; give one of its GGUF files, as {str(found[0])!r}"
    return f"has no config.json; give {_FOLDER}"


def _gguf_files(folder: Path) -> list[Path]:
    """Returns the GGUF files of a folder; those with a part for images, as they are named, last."""
    return sorted(folder.glob("*.gguf"), key=lambda path: ("mmproj" in path.name, path))


def _begins_as(path: Path) -> str:
    """Returns what a file is that is named as a GGUF file and is none."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(_LFS_POINTER):
        return "it is a pointer of Git LFS; `git lfs pull` fetches the file"
    if start[:4] in _BEFORE_GGUF:
        return "it is of the formats before GGUF, which are not read"
    return "it is empty" if not start else f"its first bytes are {start[:16]!r}; is it a page of a failed download?"


def _instead_of(folder: str) -> str:
    """Returns advice for a model folder that does not exist."""
    match = _HUB_NAME.fullmatch(folder)
    if match is None:
        return f"give {_FOLDER}"
    name = match["name"]
    if match["quantisation"] is None and not name.lower().endswith("gguf"):
        return f"for a model of the Hugging Face Hub, run `hf download {folder} --local-dir {name}` and serve {name}"
    files = f"'*{match['quantisation'] or 'Q4_K_M'}*.gguf'"
    command = f"hf download {match['repository']} --include {files} --local-dir {name}"
    return f"for a model of the Hugging Face Hub, run `{command}` and serve the file in {name}"
