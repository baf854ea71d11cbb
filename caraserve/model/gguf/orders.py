"""The order of rows and columns in GGUF files, where it is not that of Hugging Face's checkpoints: converters put them
as llama.cpp rotates heads, and as it repeats the heads of keys in delta nets."""

import re
from collections.abc import Sequence
from dataclasses import replace

from caraserve.model.formats import WeightFormat
from caraserve.model.formats.gguf_blocks import GgufBlocks, gguf_format
from caraserve.model.gguf.files import GgufModel
from caraserve.model.gguf_reader import INTERLEAVED
from caraserve.model.linear_plan import interleaved_rows
from caraserve.model.opened_file import TensorFileError

_TILED = ("qwen35",)  # architectures whose value heads are in the order of tiles
_ROTATED = re.compile(r"blk\.(\d{1,5})\.attn_(q|k)\.(?:weight|bias)")
_OF_VALUES = re.compile(r"blk\.\d{1,5}\.(attn_qkv|attn_gate|ssm_(?:alpha|beta|a|dt|conv1d|out))(?:\.(?:weight|bias))?")


def piece_order(model: GgufModel, name: str) -> tuple[int, ...] | None:
    """Returns which stored piece each piece of a tensor is, all of one size; None if they are in order. Raises
    TensorFileError."""
    if model.architecture in INTERLEAVED:
        return _rotated_rows(model, name)
    match = _OF_VALUES.fullmatch(name)
    if match is None or model.architecture not in _TILED:
        return None
    heads, rows = _ValueHeads(model), model.shape(name)[0]
    match match[1]:
        case "attn_qkv" | "ssm_conv1d":  # of q and k before
            first = rows - heads.count * heads.width
            return (*range(first), *(first + row for row in heads.spread(heads.stored)))
        case "ssm_out":
            if isinstance(gguf_format(model.kind(name)), GgufBlocks):
                return None  # blocks do not end where heads do: see `tensor_format`
            return tuple(heads.count * row + head for row in range(rows) for head in heads.stored)
    return heads.stored


def tensor_format(model: GgufModel, name: str) -> WeightFormat:
    """Returns the format of a tensor, with the order of its columns. Raises ModelLoadError for a type that is not read,
    and TensorFileError."""
    found, match = gguf_format(model.kind(name)), _OF_VALUES.fullmatch(name)
    if model.architecture not in _TILED or match is None or match[1] != "ssm_out" or not isinstance(found, GgufBlocks):
        return found
    heads = _ValueHeads(model)
    places = {stored: head for head, stored in enumerate(heads.stored)}
    return replace(found, order=heads.spread([places[stored] for stored in range(heads.count)]))


class _ValueHeads:
    """The value heads of a model's delta nets. Hugging Face's checkpoints have those of one key head together; files
    the first of each key head, then the second of each. Raises TensorFileError."""

    def __init__(self, model: GgufModel) -> None:
        keys, self.count, inner = (
            _positive(model, f"{model.architecture}.ssm.{key}")
            for key in ("group_count", "time_step_rank", "inner_size")
        )
        if self.count % keys or inner % self.count:
            raise TensorFileError(
                f"{model.name}: {keys} key heads and {self.count} value heads do not fit {inner} values"
            )
        self.width = inner // self.count
        shared = self.count // keys
        self.stored = tuple(keys * one + key for key in range(keys) for one in range(shared))  # by head

    def spread(self, heads: Sequence[int]) -> tuple[int, ...]:
        """Returns the rows of heads."""
        return tuple(self.width * head + row for head in heads for row in range(self.width))


def _positive(model: GgufModel, key: str) -> int:
    value = model.metadata.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 20:
        raise TensorFileError(f"{model.name}: {key} is {ascii(value)[:80]}; it must be a positive number")
    return value


def _rotated_rows(model: GgufModel, name: str) -> tuple[int, ...] | None:
    match = _ROTATED.fullmatch(name)
    if match is None:
        return None
    key = f"{model.architecture}.attention.head_count"
    heads = model.metadata.get(key)
    if match[2] == "k":
        heads = model.metadata.get(f"{key}_kv", heads)
    if isinstance(heads, list):
        heads = heads[int(match[1])] if int(match[1]) < len(heads) else None
    rows = model.shape(name)[0]
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or rows % (2 * heads):
        raise TensorFileError(f"{model.name}: tensor {name} has {rows} rows, which {heads!r:.20} heads cannot share")
    return interleaved_rows(heads, rows // heads, rows // heads)
