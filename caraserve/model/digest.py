"""Identifies the base model of a folder within a few milliseconds. Instances of one cluster must serve the same one."""

import hashlib
from pathlib import Path

from caraserve.model.gguf.files import open_model
from caraserve.model.opened_file import TensorFileError
from caraserve.model.safetensors_reader import weight_files

_SAMPLES, _SAMPLE_BYTES = 32, 4096  # of each file: fine-tunes of one model differ throughout


def model_digest(folder: Path, *settings: str) -> str:
    """Returns a hex digest of the model's config, of samples of its weights, and of the settings it is served with.

    Without weight files (dummy weights) the config and the settings decide.
    """
    found = hashlib.sha256("\n".join(settings).encode())
    if folder.is_file():
        return _digest_of_file(found, folder)
    found.update((folder / "config.json").read_bytes())
    try:
        paths = sorted(set(weight_files(folder).values()))
    except TensorFileError:
        paths = []
    for path in paths:
        found.update(path.name.encode())
        _add_samples(found, path)
    return found.hexdigest()[:32]


def _digest_of_file(found: "hashlib._Hash", path: Path) -> str:
    """Returns the digest of a GGUF model: of its headers, which have the tokens too, and of samples of its weights.
    Files may have other names on another instance."""
    model = open_model(path)
    for part, header_bytes in zip(model.paths, model.header_bytes, strict=True):
        with part.open("rb") as file:
            found.update(file.read(header_bytes))
        _add_samples(found, part)
    return found.hexdigest()[:32]


def _add_samples(found: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    found.update(f" {size}".encode())
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            found.update(file.read(_SAMPLE_BYTES))
