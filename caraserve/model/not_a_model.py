"""Says what a path is that was given as a base model and is none, and what to give instead."""

import re
from pathlib import Path

_FOLDER = "a folder that holds config.json, tokenizer.json and safetensors weights"
_INSTEAD = (
    "give the Hugging Face folder of the model that it was made from, with config.json, tokenizer.json and safetensors "
    "weights; `hf download ORG/NAME --local-dir NAME` fetches one from the Hugging Face Hub"
)


def why_no_model(path: Path) -> str:
    """Returns why a path is no model folder; "" if it is a folder with a config.json. Raises OSError."""
    shown = repr(str(path))
    if path.is_dir():
        return "" if (path / "config.json").exists() else f"{shown} {_lacks(path)}"
    if not path.exists():
        return f"model folder {shown} does not exist; {_instead_of(str(path))}"
    if _is_gguf(path):
        return f"{shown} is a GGUF file, and GGUF is not read: {_INSTEAD}"
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
        return f"{shown} is a file of weights: give the folder that it is in, with config.json and tokenizer.json"
    return f"{shown} is a file, not a model: give {_FOLDER}"


def _lacks(folder: Path) -> str:
    """Returns what a folder without config.json has instead."""
    if (folder / "adapter_config.json").exists():
        return f"is an adapter, not a base model: serve its base model with --lora-modules {folder.name}={folder}"
    if any(folder.glob("*.gguf")):
        return f"has GGUF files and no config.json, and GGUF is not read: {_INSTEAD}"
    return f"has no config.json; give {_FOLDER}"


def _is_gguf(path: Path) -> bool:
    if not path.is_file():  # a pipe would block
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _instead_of(folder: str) -> str:
    """Returns advice for a model folder that does not exist."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", folder):
        return "give a folder that holds config.json"
    name = folder.partition("/")[2]
    return f"for a model of the Hugging Face Hub, run `hf download {folder} --local-dir {name}` and serve {name}"
