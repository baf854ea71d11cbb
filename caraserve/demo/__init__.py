"""The bundled demo: a base model small enough to ship, and one LoRA adapter for each voice.

`scripts/train_demo.py` makes the files; `serve.py` serves them when no model is named.
"""

from pathlib import Path

BASE_NAME = "caraserve-demo"
ADAPTER_NAMES = ("chef", "json", "lawyer", "pirate", "poet")


def demo_folder() -> Path:
    """The folder that holds `model/` and `adapters/<name>/`."""
    return Path(__file__).parent


def model_folder() -> Path:
    """The base model, as Hugging Face lays it out."""
    return demo_folder() / "model"


def adapters_folder() -> Path:
    """The folder with one PEFT folder for each of `ADAPTER_NAMES`."""
    return demo_folder() / "adapters"
