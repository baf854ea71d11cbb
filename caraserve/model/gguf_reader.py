"""Safe reading of GGUF files: header, metadata, the table of tensors, and tensors of plain numbers.

Sizes and offsets are checked against the file before anything is read by them, and memory never grows with a size that
a file only claims.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caraserve.model.dtype import Dtype
from caraserve.model.opened_file import FilePlace, OpenedFile, TensorFileError
from caraserve.util.units import align_up

# Architectures whose q and k have the outputs of each head in the order in which neighbours are rotated together: those
# that llama.cpp converts as Llama.
INTERLEAVED = frozenset(
    (
        *("llama", "llama4", "mistral3", "deci", "granite", "granitemoe"),
        *("smollm3", "internlm2", "baichuan", "arcee", "refact"),
    )
)

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_HEADER_BYTES = 64 << 20  # a tokenizer of 256,000 tokens takes 10 MiB
_MOST_KEY_BYTES, _MOST_NAME_BYTES, _MOST_DIMENSIONS = 1 << 16, 256, 4
_MOST_PAIRS = 1 << 16
_STRING, _ARRAY, _BOOL = 8, 9, 7
_LENGTH = struct.Struct("<Q")  # of a text
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}  # types of metadata
# Types of tensors: name, values in a block, bytes of a block.
_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is in the file. `kind`: the name of its type, as Q4_K."""

    kind: str
    shape: tuple[int, ...]  # the last dimension is that of a row's elements, as in safetensors
    start: int
    num_bytes: int


class GgufFile(OpenedFile):
    """One GGUF file, open for reading. `metadata`: its values by key; arrays are lists."""

    def __init__(
        self,
        path: Path,
        most_header_bytes: int = _MOST_HEADER_BYTES,
        *,
        is_part: bool = False,
        skipped: str | None = None,
    ) -> None:
        """Opens the file. `skipped`: how the keys of lists of texts begin that are not kept. Raises TensorFileError for
        anything but a well-formed regular file, for a header of more bytes, and for one of several parts unless
        `is_part`."""
        super().__init__(path)
        header = _Header(self._read, self._status.st_size, most_header_bytes, self.name, skipped)
        if not is_part and header.metadata.get("split.count", 0) not in (0, 1):
            why = "it is a part of several files; join them with gguf-split --merge"
            raise TensorFileError(f"{self.name} is not a valid GGUF file: {why}")
        self.metadata: dict[str, Any] = header.metadata
        self.header_bytes = header.num_bytes
        self._tensors = header.tensors

    @property
    def names(self) -> list[str]:
        """Tensor names, in the order of the table."""
        return list(self._tensors)

    def tensor(self, name: str) -> GgufTensor:
        """Returns a tensor's type and place. Raises TensorFileError when there is no such tensor."""
        if name not in self._tensors:
            raise TensorFileError(f"{self.name} has no tensor {name}")
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape. Raises TensorFileError when there is no such tensor."""
        return self.tensor(name).shape

    def dtype(self, name: str) -> Dtype:
        """Returns a tensor's dtype. Raises TensorFileError unless it is F32, F16 or BF16, and for unknown tensors."""
        kind = self.tensor(name).kind
        if kind not in Dtype.__members__:
            raise TensorFileError(f"{self.name}: tensor {name} has type {kind}; F32, F16 and BF16 are supported")
        return Dtype[kind]

    def raw(self, name: str) -> NDArray[np.generic]:
        """Reads the values of a tensor: float32, or uint16 with the bits of a 16-bit float. Raises TensorFileError."""
        values = np.empty(self.shape(name), self.dtype(name).storage)
        self.read_into(name, values.reshape(-1).view(np.uint8).data, 0)
        return values

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.generic]:
        """Reads some rows of a tensor, as `raw`."""
        shape, dtype = self.shape(name), self.dtype(name)
        values = np.empty((stop - start, *shape[1:]), dtype.storage)
        target = values.reshape(-1).view(np.uint8).data
        self.read_into(name, target, start * dtype.itemsize * math.prod(shape[1:]))
        return values

    def read_into(self, name: str, target: memoryview, start: int) -> None:
        """Reads as many bytes as `target` has, from byte `start` of a tensor on. Raises TensorFileError."""
        self._read_into(target, self.tensor(name).start + start, f"tensor {name}")

    def place(self, name: str) -> FilePlace:
        """Returns where a tensor's values begin. Raises TensorFileError when there is no such tensor."""
        return FilePlace(self._descriptor, self.tensor(name).start)

    def end(self, name: str) -> int:
        """Returns where a tensor ends in the file. Raises TensorFileError when there is no such tensor."""
        tensor = self.tensor(name)
        return tensor.start + tensor.num_bytes


class _Header:
    """Reads the header once, from the start of the file. Raises TensorFileError."""

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        file_bytes: int,
        most_bytes: int,
        name: str,
        skipped: str | None = None,
    ) -> None:
        self._name, self._file_bytes, self._at, self._skipped = name, file_bytes, 0, skipped
        self._data = read(0, min(file_bytes, most_bytes))
        try:
            self.metadata, self.tensors = self._parse()
        except (_TooShort, struct.error):
            raise self._header_too_long() from None
        except UnicodeDecodeError:
            raise self._invalid("its header has a text that is not UTF-8") from None

    def _parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4) != _MAGIC:
            raise self._invalid("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(struct.pack("<I", version), "big") in _VERSIONS
            raise self._invalid("it is big-endian" if is_swapped else f"it has version {version}; 2 and 3 are read")
        tensors, pairs = self._number("Q"), self._number("Q")
        if pairs > _MOST_PAIRS or tensors > self._file_bytes // 32:
            raise self._invalid(f"it claims {pairs} values and {tensors} tensors in its {self._file_bytes} bytes")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text(_MOST_KEY_BYTES)
            if key in metadata:
                raise self._invalid(f"it has {ascii(key)[:80]} twice")
            metadata[key] = self._value(self._number("I"), skips_texts=self._skips(key))
        return metadata, self._tensors(tensors, self._alignment(metadata))

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise self._invalid(f"general.alignment is {ascii(alignment)[:80]}")
        return alignment

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        listed: list[tuple[str, str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, dimensions = self._text(_MOST_NAME_BYTES), self._number("I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self._invalid(f"tensor {ascii(name)[:200]} has {dimensions} dimensions")
            shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
            number, offset = self._number("I"), self._number("Q")
            if number not in _TYPES:
                raise self._invalid(f"tensor {ascii(name)[:200]} has the unknown type {number}")
            kind, values, block_bytes = _TYPES[number]
            num_bytes = math.prod(shape) // values * block_bytes
            if min(shape) < 1 or shape[-1] % values or offset % alignment:
                raise self._invalid(f"tensor {ascii(name)[:200]} has shape {list(shape)} at {offset} as {kind}")
            listed.append((name, kind, shape, offset, num_bytes))
        self.num_bytes = self._at
        start = align_up(self._at, alignment)
        tensors = {
            name: GgufTensor(kind, shape, start + offset, num_bytes) for name, kind, shape, offset, num_bytes in listed
        }
        if len(tensors) != len(listed):
            raise self._invalid("it has a tensor twice")
        end = start
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise self._invalid(f"tensor {ascii(name)[:200]} lies over another one")
            end = tensor.start + tensor.num_bytes
        if end > self._file_bytes:
            raise self._invalid(f"it has {self._file_bytes} bytes, and its tensors end at byte {end}: copy it again")
        return tensors

    def _skips(self, key: str) -> bool:
        return self._skipped is not None and key.startswith(self._skipped)

    def _value(self, kind: int, *, nested: bool = False, skips_texts: bool = False) -> Any:
        if kind == _STRING:
            return self._text(len(self._data))
        if kind == _BOOL:
            return self._number("B") != 0
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY or nested:
            raise self._invalid(f"it has a value of type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if count > len(self._data) - self._at:
            raise _TooShort
        if inner in _NUMBERS:
            item = _NUMBERS[inner]
            return list(struct.unpack(f"<{count}{item}", self._take(count * struct.calcsize(item))))
        if skips_texts and inner == _STRING:
            for _ in range(count):  # 0.2 µs each, of which a tokenizer has 800,000
                self._at += _LENGTH.size + _LENGTH.unpack_from(self._data, self._at)[0]
                if self._at > len(self._data):
                    raise _TooShort
            return []
        return [self._value(inner, nested=True) for _ in range(count)]

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))
        return value

    def _text(self, most: int) -> str:
        length = self._number("Q")
        if length > most:
            raise _TooShort if length > len(self._data) else self._invalid(f"it has a name of {length} bytes")
        return self._take(length).decode()

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise _TooShort
        self._at += count
        return self._data[self._at - count : self._at]

    def _header_too_long(self) -> TensorFileError:
        if len(self._data) == self._file_bytes:
            return self._invalid(f"it ends within its header, at byte {self._file_bytes}: copy it again")
        most = f"{len(self._data)} bytes, the most that are read here"
        return TensorFileError(f"{self._name}: its header has more than {most}")

    def _invalid(self, why: str) -> TensorFileError:
        return TensorFileError(f"{self._name} is not a valid GGUF file: {why}")


class _TooShort(Exception):
    """The header claims more bytes than it may have."""
