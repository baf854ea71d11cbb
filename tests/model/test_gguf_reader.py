"""GGUF files give metadata and tensors of plain numbers; hostile and damaged ones are refused."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caraserve.model.dtype import Dtype
from caraserve.model.gguf_reader import GgufFile
from caraserve.model.opened_file import TensorFileError
from tests.model.gguf_files import header, text, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "a flag": True,
    "a float": 0.5,
    "a double": (12, struct.pack("<d", 0.1)),
    "a long": (11, struct.pack("<q", -(2**40))),
    "tokens": ["<s>", "a", "é"],
    "scores": [0.5, -1.0],
}


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "blk.0.attn_q.weight": rng.standard_normal((3, 5), np.float32),
        "half": rng.standard_normal((7, 2)).astype(np.float16),
        "bits": rng.integers(0, 1 << 16, (2, 2, 3), np.uint16),
    }
    with GgufFile(write_gguf(tmp_path / "x.gguf", METADATA, tensors)) as file:
        assert file.metadata == METADATA | {"a double": 0.1, "a long": -(2**40)}
        assert file.names == list(tensors)
        assert [file.dtype(name) for name in file.names] == [Dtype.F32, Dtype.F16, Dtype.BF16]
        for name, values in tensors.items():
            assert file.shape(name) == values.shape
            bits = values if values.itemsize == 4 else values.view(np.uint16)
            np.testing.assert_array_equal(file.raw(name), bits)
            np.testing.assert_array_equal(file.rows(name, 1, 2), bits[1:2])
        file.check_unchanged()
        os.utime(tmp_path / "x.gguf", ns=(0, 0))
        with pytest.raises(TensorFileError, match="was changed while it was being read"):
            file.check_unchanged()


def test_the_alignment_of_the_file_counts(tmp_path: Path) -> None:
    start = header({"general.alignment": 64}, [("t", (2, 2), 0, 0)])
    data = start + bytes(-len(start) % 64) + np.arange(4, dtype=np.float32).tobytes()
    (tmp_path / "x.gguf").write_bytes(data)
    with GgufFile(tmp_path / "x.gguf") as file:
        np.testing.assert_array_equal(file.raw("t"), [[0, 1], [2, 3]])


def test_quantised_tensors_have_a_place_and_no_values(tmp_path: Path) -> None:
    data = header({}, [("t", (2, 256), 12, 0)]) + bytes(288)
    (tmp_path / "x.gguf").write_bytes(data)
    with GgufFile(tmp_path / "x.gguf") as file:
        assert (file.tensor("t").kind, file.tensor("t").num_bytes, file.end("t")) == ("Q4_K", 288, len(data))
        with pytest.raises(TensorFileError, match="tensor t has type Q4_K; F32, F16 and BF16 are supported"):
            file.raw("t")
        with pytest.raises(TensorFileError, match="has no tensor u"):
            file.shape("u")


def one(shape: tuple[int, ...] = (2, 4), kind: int = 0, offset: int = 0, name: str = "t") -> bytes:
    return header({}, [(name, shape, kind, offset)]) + bytes(64)


PAIR = [("t", (2, 4), 0, 0), ("u", (2, 4), 0, 0)]
BLANK = header({}, [])
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it ends within its header, at byte 0"),
    "another format": (b"GGML" + BLANK[4:], "it does not begin with GGUF"),
    "version 1": (header({}, [], version=1), "it has version 1; 2 and 3 are read"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + BLANK[8:], "it is big-endian"),
    "cut short": (header(METADATA, [])[:90], "it ends within its header, at byte 90"),
    "tensors that are not there": (one()[:-64], "bytes, and its tensors end at byte "),
    "a world of tensors": (header({}, [], counts=(1 << 60, 0)), "it claims 0 values and 1152921504606846976 tensors"),
    "a world of metadata": (header({}, [], counts=(0, 1 << 60)), "it claims 1152921504606846976 values"),
    "a text longer than the file": (header({"k": (8, struct.pack("<Q", 1 << 62))}, []), "it ends within its header"),
    "an array longer than the file": (header({"k": (9, struct.pack("<IQ", 0, 1 << 62))}, []), "it ends within its"),
    "an array of arrays": (header({"k": (9, struct.pack("<IQ", 9, 1))}, []), "it has a value of type 9"),
    "an unknown value": (header({"k": (13, b"")}, []), "it has a value of type 13"),
    "no UTF-8": (header({"k": (8, struct.pack("<Q", 1) + b"\xff")}, []), "has a text that is not UTF-8"),
    "a key twice": (header({}, [], counts=(0, 2))[:24] + 2 * (text("k") + bytes(5)), "it has 'k' twice"),
    "a split file": (header({"split.count": 3}, []), "it is a part of several files; join them"),
    "an alignment of 3": (header({"general.alignment": 3}, []), "general.alignment is 3"),
    "an alignment of text": (header({"general.alignment": "x"}, []), "general.alignment is 'x'"),
    "an unknown type": (one(kind=99), "tensor 't' has the unknown type 99"),
    "a removed type": (one(kind=4), "tensor 't' has the unknown type 4"),
    "no dimensions": (one(shape=()), "tensor 't' has 0 dimensions"),
    "many dimensions": (one(shape=(1,) * 5), "tensor 't' has 5 dimensions"),
    "an empty dimension": (one(shape=(0, 4)), "tensor 't' has shape [0, 4]"),
    "a part of a block": (one(shape=(8, 8), kind=12), "tensor 't' has shape [8, 8] at 0 as Q4_K"),
    "an offset out of step": (one(offset=8), "tensor 't' has shape [2, 4] at 8 as F32"),
    "an offset out of the file": (one(offset=64), "its tensors end at byte "),
    "a size out of the file": (one(shape=(1 << 40, 1 << 40)), "its tensors end at byte "),
    "overlapping tensors": (header({}, PAIR) + bytes(64), "tensor 'u' lies over another one"),
    "a tensor twice": (header({}, [PAIR[0], ("t", (2, 4), 0, 32)]) + bytes(64), "it has a tensor twice"),
    "a long name": (one(name="n" * 300), "it has a name of 300 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.timeout(10)
def test_a_file_that_is_not_valid_is_refused_and_said(tmp_path: Path, kind: str) -> None:
    data, why = REFUSED[kind]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(TensorFileError) as caught:
        GgufFile(tmp_path / "x.gguf")
    assert str(caught.value).startswith("x.gguf is not a valid GGUF file: ")
    assert why in str(caught.value)


def test_a_header_may_have_a_limit(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {"k": "x" * 5000}, {})
    with pytest.raises(TensorFileError, match="its header has more than 4096 bytes"):
        GgufFile(path, 4096)
