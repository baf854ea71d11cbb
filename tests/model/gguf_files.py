"""Writes GGUF files, so that a test can damage any part of them."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Value = tuple[int, bytes]  # type and bytes


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_of(value: Any) -> Value:
    """Returns a value of metadata."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, text(value)
    kind = value_of(value[0])[0]
    return 9, struct.pack("<IQ", kind, len(value)) + b"".join(value_of(one)[1] for one in value)


Tensor = tuple[str, Sequence[int], int, int]  # name, shape, number of the type, offset


def header(metadata: Mapping[str, Any], tensors: Sequence[Tensor], *, version: int = 3, counts: Any = None) -> bytes:
    """Returns all that comes before the tensors, up to a multiple of 32 bytes. `counts`: claimed, of tensors and of
    metadata."""
    data = b"GGUF" + struct.pack("<I2Q", version, *(counts or (len(tensors), len(metadata))))
    for key, value in metadata.items():
        kind, content = value_of(value)
        data += text(key) + struct.pack("<I", kind) + content
    for name, shape, kind, offset in tensors:
        data += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        data += struct.pack("<IQ", kind, offset)
    return data + bytes(-len(data) % 32)


TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 30}
# Kinds of blocks: number of the type, weights and bytes of a block, and where it has a float16.
BLOCKS: Mapping[str, tuple[int, int, int, Sequence[int]]] = {
    "Q4_0": (2, 32, 18, (0,)),
    "Q8_0": (8, 32, 34, (0,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
}


@dataclass(frozen=True)
class Blocks:
    """The rows of a matrix in blocks, uint8 [rows, bytes of a row]."""

    kind: str
    rows: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        _, weights, num_bytes, _ = BLOCKS[self.kind]
        return len(self.rows), self.rows.shape[1] // num_bytes * weights


def random_blocks(rng: np.random.Generator, kind: str, rows: int, inputs: int, scale: float) -> Blocks:
    """Returns random codes with scales up to `scale`, and offsets that make up for codes without a sign."""
    _, weights, num_bytes, halves = BLOCKS[kind]
    made = rng.integers(0, 256, (rows, inputs // weights, num_bytes), np.uint8)
    scales = rng.uniform(0.3, 1, made.shape[:2]) * scale
    for at, factor in zip(halves, (1, 7.5), strict=False):
        made[..., at : at + 2] = (scales * factor).astype(np.float16)[..., None].view(np.uint8)
    return Blocks(kind, made.reshape(rows, -1))


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, NDArray[Any] | Blocks]) -> Path:
    """Writes a file; uint16 are the bits of bfloat16."""
    listed, content = [], b""
    for name, values in tensors.items():
        stored = values.rows if isinstance(values, Blocks) else values
        number = BLOCKS[values.kind][0] if isinstance(values, Blocks) else TYPES[values.dtype]
        listed.append((name, values.shape, number, len(content)))
        content += stored.tobytes()
        content += bytes(-len(content) % 32)
    path.write_bytes(header(metadata, listed) + content)
    return path


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """Returns the tokenizer.json of a folder as metadata; its tokens 0 and 1 begin and end a text."""
    found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = found["model"]["vocab"] | {one["content"]: one["id"] for one in found["added_tokens"]}
    special = {one["id"] for one in found["added_tokens"] if one["special"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(ids, key=ids.__getitem__),
        "tokenizer.ggml.token_type": [3 if index in special else 1 for index in range(len(ids))],
        "tokenizer.ggml.merges": [" ".join(one) for one in found["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
