"""The files of a GGUF model: one, or parts named as NAME-00001-of-00003.gguf; what their headers say together."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from caraserve.model.gguf_reader import GgufFile, GgufTensor
from caraserve.model.opened_file import TensorFileError

_PART = re.compile(r"(?P<name>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS, _MOST_BASES, _MOST_CARD_CHARS = 1000, 8, 200
_TOKENIZER = "tokenizer.ggml."  # before the keys of lists with an element for each token
_QUANTISATION = re.compile(r"[-_.](?:i?q\d\w*|[fF]16|bf16|f32|mxfp4\w*|ud)$", re.IGNORECASE)
Stamp = tuple[int, int, int]  # inode, bytes, time of the last change: another one is another file


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is. `part`: index of its file."""

    part: int
    tensor: GgufTensor


@dataclass(frozen=True)
class GgufModel:
    """The headers of a model's files. `metadata`: of the first file, without lists that have an element a token."""

    paths: tuple[Path, ...]
    stamps: tuple[Stamp, ...]
    header_bytes: tuple[int, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Place]

    @property
    def name(self) -> str:
        """The name of the given file, for messages."""
        return self.paths[0].name

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def kind(self, tensor: str) -> str:
        """Returns the name of a tensor's type, as Q4_K."""
        return self.tensors[tensor].tensor.kind

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self.tensors[tensor].tensor.shape


def is_gguf(path: Path) -> bool:
    """Returns whether a path is a GGUF file, by its content. Raises OSError."""
    if not path.is_file():  # a pipe would block
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def plain_name(path: Path) -> str:
    """Returns the name of a file without the number of its part and its ending."""
    match = _PART.fullmatch(path.name)
    return match["name"] if match else path.name.removesuffix(".gguf")


def names_in(metadata: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """Returns the names that a model has, and those of the models that it was made from, as files and adapters write
    them."""
    name = plain_name(path)
    while shorter := _QUANTISATION.sub("", name):
        if shorter == name:
            break
        name = shorter
    keys = [f"general.base_model.{index}.{what}" for index in range(_MOST_BASES) for what in ("name", "repo_url")]
    found = [metadata.get(key) for key in ("general.name", "general.repo_url", *keys)]
    return (name, *(one.strip().replace(" ", "-") for one in found if isinstance(one, str) and one.strip()))


def card_of(model: GgufModel) -> dict[str, Any]:
    """Returns what a client may want to know of a model: architecture, types of its tensors by how many there are, and
    what its metadata say about where it comes from."""
    kinds = Counter(place.tensor.kind for place in model.tensors.values() if len(place.tensor.shape) > 1)
    card: dict[str, Any] = {"architecture": model.architecture, "tensor_types": dict(kinds.most_common())}
    for key in ("name", "size_label", "license", "organization", "repo_url"):
        if isinstance(value := model.metadata.get(f"general.{key}"), str):
            card[key] = value[:_MOST_CARD_CHARS]
    bases = (model.metadata.get(f"general.base_model.{index}.name") for index in range(_MOST_BASES))
    if found := [one[:_MOST_CARD_CHARS] for one in bases if isinstance(one, str)]:
        card["base_models"] = found
    return card


def part_paths(path: Path) -> tuple[Path, ...]:
    """Returns the files of which a path names one. Raises TensorFileError that names those that are missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["part"]) <= count <= _MOST_PARTS:
        raise TensorFileError(f"{path.name} is named as a part that cannot be")
    paths = [path.with_name(f"{match['name']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if missing := [one.name for one in paths if not one.is_file()]:
        shown = f"{missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}"
        raise TensorFileError(f"{path.name} is one of {count} parts, and {shown} is missing beside it")
    return tuple(paths)


def open_model(path: Path) -> GgufModel:
    """Returns what the headers of a model's files say; they are read once while the files stay the same. Raises
    TensorFileError."""
    paths = part_paths(path)
    try:
        return _headers(paths, tuple(stamp_of(os.stat(one)) for one in paths))
    except OSError as error:
        raise TensorFileError(f"{path.name} cannot be read: {error.strerror}") from None


def stamp_of(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_metadata(path: Path) -> dict[str, Any]:
    """Reads the whole metadata of a model's first file. Raises TensorFileError."""
    with GgufFile(part_paths(path)[0], is_part=True) as file:
        return file.metadata


@lru_cache(2)
def _headers(paths: tuple[Path, ...], stamps: tuple[Stamp, ...]) -> GgufModel:
    metadata: dict[str, Any] = {}
    tensors: dict[str, Place] = {}
    header_bytes = []
    for part, path in enumerate(paths):
        with GgufFile(path, is_part=True, skipped=_TOKENIZER) as file:
            header_bytes.append(file.header_bytes)
            _check_part(file, part, len(paths))
            if part == 0:
                metadata = {
                    key: value
                    for key, value in file.metadata.items()
                    if not (key.startswith(_TOKENIZER) and isinstance(value, list))
                }
            for name in file.names:
                if name in tensors:
                    raise TensorFileError(f"{path.name}: another part has tensor {ascii(name)[:200]} too")
                tensors[name] = Place(part, file.tensor(name))
    claimed = metadata.get("split.tensors.count", len(tensors))
    if claimed != len(tensors):
        raise TensorFileError(f"{paths[0].name}: its parts have {len(tensors)} tensors, and it says {claimed!r:.20}")
    return GgufModel(paths, stamps, tuple(header_bytes), metadata, tensors)


def _check_part(file: GgufFile, part: int, parts: int) -> None:
    """Raises TensorFileError unless a file says that it is this part of so many."""
    count = file.metadata.get("split.count", 0)
    if count in (0, 1) and parts == 1:
        return
    number = file.metadata.get("split.no", 0)
    if count != parts or number != part:
        how = "as NAME-00001-of-00002.gguf" if parts == 1 else f"as part {part + 1} of {parts}"
        raise TensorFileError(
            f"{file.name} says that it is part {number!r:.20} of {count!r:.20}, counted from 0; its name must be {how}"
        )
