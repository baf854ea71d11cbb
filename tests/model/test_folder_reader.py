"""A checkpoint's tensors by name: from one file or several, and errors that name tensor and file."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype
from caraserve.model.folder_reader import FolderReader

FIRST, SECOND = torch.arange(12.0).view(3, 4), torch.arange(5.0).to(torch.bfloat16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in two files."""
    files = {"first": "model-1.safetensors", "second": "model-2.safetensors"}
    for (name, file), tensor in zip(files.items(), (FIRST, SECOND), strict=True):
        save_file({name: tensor}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return tmp_path


def test_tensors_are_read_from_the_files_that_hold_them(folder: Path) -> None:
    with FolderReader(folder) as reader:
        first, second = reader("first", (3, 4)), reader("second", (5,))
    assert (first[1], second[1]) == (Dtype.F32, Dtype.BF16)
    np.testing.assert_array_equal(first[0], FIRST.numpy())
    np.testing.assert_array_equal(second[0], SECOND.view(torch.uint16).numpy())


def test_any_part_of_a_tensor_can_be_read(folder: Path) -> None:
    with FolderReader(folder) as reader:
        tensor = reader.find("first", (3, 4))
        part = bytearray(20)
        tensor.read_into(memoryview(part), 7)
    assert (tensor.num_bytes, bytes(part)) == (48, FIRST.numpy().tobytes()[7:27])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("third", (1,), r"tensor third is missing$"),
        ("first", (4, 3), r"^model-1\.safetensors: tensor first has shape \[3, 4\], config\.json asks \[4, 3\]$"),
    ],
)
def test_a_tensor_that_is_not_there_as_asked_is_an_error(
    folder: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    with FolderReader(folder) as reader, pytest.raises(ModelLoadError, match=message):
        reader.find(name, shape)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has neither"):
        FolderReader(tmp_path)


def test_a_file_cut_short_is_named_with_the_tensor(folder: Path) -> None:
    reader, path = FolderReader(folder), folder / "model-2.safetensors"
    tensor = reader.find("second", (5,))
    os.truncate(path, path.stat().st_size - 1)
    message = r"^model-2\.safetensors was cut short while tensor second was being read$"
    with pytest.raises(ModelLoadError, match=message):
        tensor.read_into(memoryview(bytearray(10)), 0)
    with pytest.raises(ModelLoadError, match=message):
        reader("second", (5,))


def read_while_written(folder: Path, error: type[BaseException] | None = None) -> None:
    """Reads a tensor, overwrites its file, and raises `error`."""
    with FolderReader(folder) as reader:
        reader("first", (3, 4))
        (folder / "model-1.safetensors").write_bytes((folder / "model-2.safetensors").read_bytes())
        if error is not None:
            raise error


def test_a_file_that_is_written_meanwhile_is_an_error_at_the_end(folder: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelLoadError, match=r"^model-1\.safetensors was changed while it was being read; try again$"):
        read_while_written(folder)
    assert set(os.listdir("/proc/self/fd")) == before


def test_another_error_comes_before_that(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        read_while_written(folder, KeyboardInterrupt)
