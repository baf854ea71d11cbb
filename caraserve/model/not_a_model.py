"""Says what a path is that was given as a base model and is none, and what to give instead."""

import re
from pathlib import Path

from caraserve.model.gguf.files import is_gguf

_FOLDER = "a folder that holds config.json, tokenizer.json and safetensors weights, or a GGUF file"


def why_no_model(path: Path) -> str:
    """Returns why a path is no model; "" if it is a folder with a config.json, or a GGUF file. Raises OSError."""
    shown = repr(str(path))
    if path.is_dir():
        return "" if (path / "config.json").exists() else f"{shown} {_lacks(path)}"
    if not path.exists():
        return f"model folder {shown} does not exist; {_instead_of(str(path))}"
    if is_gguf(path):
        return ""
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        return f"{shown} is a file of weights: give the folder that it is in, with config.json and tokenizer.json"
    return f"{shown} is a file, not a model: give {_FOLDER}"


def _lacks(folder: Path) -> str:
    """Returns what a folder without config.json has instead."""
    if (folder / "adapter_config.json").exists():
        return f"is an adapter, not a base model: serve its base model with --lora-modules {folder.name}={folder}"
    if found := sorted(folder.glob("*.gguf")):
        return f"has no config.json; give one of its GGUF files, as {str(found[0])!r}"
    return f"has no config.json; give {_FOLDER}"


def _instead_of(folder: str) -> str:
    """Returns advice for a model folder that does not exist."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", folder):
        return "give a folder that holds config.json"
    name = folder.partition("/")[2]
    return f"for a model of the Hugging Face Hub, run `hf download {folder} --local-dir {name}` and serve {name}"
