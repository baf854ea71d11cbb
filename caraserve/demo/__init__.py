"""The demos: base models with one LoRA adapter for each voice or task.

The bundled one, served when no model is named, is small enough to ship; `scripts/train_demo.py` makes its files.
`smollm2`, which `--demo` names, is a real model.
"""

import contextlib
from dataclasses import replace
from pathlib import Path

from caraserve.config import LoraConfig, ModelConfig
from caraserve.demo import smollm2
from caraserve.errors import ConfigError
from caraserve.util.cache_folder import data_folder, why_unwritable
from caraserve.util.option_values import LoraModule

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


def is_bundled(folder: Path) -> bool:
    """Returns whether a folder is one of the demos' adapters, which is a part of the installed package."""
    return folder in (adapters_folder(), smollm2.adapters_folder())


def with_demo(model: ModelConfig, lora: LoraConfig) -> tuple[ModelConfig, LoraConfig]:
    """Returns the configuration, with a demo's model and its adapters if it names no model. Downloads a model that is
    not bundled, the first time. Raises ConfigError or ModelLoadError."""
    if model.model is not None:
        if model.demo is not None:
            raise ConfigError(f"--demo {model.demo} brings its own model: leave out {str(model.model)!r}, or --demo")
        return model, lora
    if model.demo is None:
        path, base_name, uploads = model_folder(), BASE_NAME, "adapters"
        bundled = {name: adapters_folder() / name for name in ADAPTER_NAMES}
    else:
        path, base_name, uploads = smollm2.model_file(), smollm2.NAME, f"adapters-{smollm2.NAME}"
        bundled = {name: smollm2.adapters_folder() / name for name in smollm2.ADAPTER_NAMES}
        if model.chat_template is None and model.tool_call_parser is None:
            model = replace(model, tool_call_parser=smollm2.TOOL_CALL_PARSER)
    model = replace(model, model=path, served_model_name=model.served_model_name or (base_name,))
    return model, lora if lora.adapters_dir is not None else _with_adapters(lora, bundled, uploads)


def _with_adapters(lora: LoraConfig, bundled: dict[str, Path], uploads: str) -> LoraConfig:
    """Returns the configuration with a demo's adapters. Uploads go to this folder of the user's data, if there is one:
    the demo's own is a part of the installed package."""
    given = {module.name for module in lora.lora_modules}
    modules = [LoraModule(name, path) for name, path in bundled.items() if name not in given]
    adapters_dir = None
    if lora.takes_uploads:
        with contextlib.suppress(RuntimeError):  # no home
            folder = data_folder(uploads)
            adapters_dir = None if why_unwritable(folder) else folder
    roots = [*{path.parent: None for path in bundled.values()}, *lora.allow_adapter_path]
    modules += lora.lora_modules
    return replace(lora, lora_modules=modules, adapters_dir=adapters_dir, allow_adapter_path=roots)
