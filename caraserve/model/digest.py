"""Identifies the base model of a folder within a few milliseconds. Instances of one cluster must serve the same one."""

import hashlib
from pathlib import Path

from caraserve.model.opened_file import TensorFileError
from caraserve.model.safetensors_reader import weight_files

_SAMPLES, _SAMPLE_BYTES = 32, 4096  # of each file: fine-tunes of one model differ throughout


def model_digest(folder: Path, *settings: str) -> str:
    """Returns a hex digest of the model's config, of samples of its weights, and of the settings it is served with.

    Without weight files (dummy weights) the config and the settings decide.
    """
    found = hashlib.sha256("\n".join(settings).encode())
    found.update((folder / "config.json").read_bytes())
    try:
        paths = sorted(set(weight_files(folder).values()))
    except TensorFileError:
        paths = []
    for path in paths:
        size = path.stat().st_size
        found.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()[:32]
