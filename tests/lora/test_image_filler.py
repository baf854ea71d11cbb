"""Images filled by compiled code and several threads: bytes and errors are those of one thread and NumPy. (`read` of
`folders.py`, which tests of all kinds of adapters use, compares the bytes.)"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.backend_factory import compile_copies
from caraserve.core.lora_layout import Bytes, aligned_bytes
from caraserve.errors import AdapterRejected
from caraserve.lora import image_filler
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.image_filler import ImageFiller
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.families import plan_of
from tests.lora.folders import FIELDS, TARGETS, Tensors, compiled_filler, read, tensor_name, tensors_for, write_adapter

LAYERS = 6
PLAN = plan_of(FIELDS | {"num_hidden_layers": LAYERS})
DTYPES = {"float32": np.float32, "float16": np.float16}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each thread fill a layer at a time."""
    monkeypatch.setattr(image_filler, "_LEAST_BYTES", 1)


def tensors(rank: int = 8, dtype: Any = np.float32) -> Tensors:
    made = tensors_for(TARGETS, tuple(range(LAYERS)), rank)
    return {name: values.astype(dtype) for name, values in made.items()}


def folder_of(path: Path, made: Tensors, rank: int = 8) -> Path:
    return write_adapter(path, {"r": rank, "target_modules": list(TARGETS)}, made)


@pytest.mark.parametrize("rank", [8, 5, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_copies_every_matrix_of_plain_lora(tmp_path: Path, rank: int, dtype: str) -> None:
    copied = list[int]()

    def copy(copies: NDArray[np.void], image: Bytes, largest: NDArray[np.int64]) -> None:
        copied.append(len(copies))
        compile_copies()(copies, image, largest)

    folder = folder_of(tmp_path, tensors(rank, DTYPES[dtype]), rank)
    image = read(folder, PLAN, filled=255)
    again = read_adapter(folder, PLAN, aligned_bytes(image.spec.num_bytes), filler=ImageFiller(copy, helpers=1))
    assert again.spec == image.spec
    assert sum(copied) == LAYERS * 2 * len(TARGETS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", "AB")
def test_the_first_tensor_with_a_value_that_is_not_finite_is_named(
    tmp_path: Path, half: str, dtype: str, value: float
) -> None:
    made = tensors(dtype=DTYPES[dtype])
    for layer in (2, 3, 5):
        made[tensor_name(layer, "up_proj", half)][-1, -1] = value
    folder = folder_of(tmp_path, made)
    expected = f"tensor {tensor_name(2, 'up_proj', half)} has values that are not finite"
    with pytest.raises(AdapterRejected, match=expected):
        read_adapter(folder, PLAN, aligned_bytes(1 << 20), filler=compiled_filler())
    with pytest.raises(AdapterRejected, match=expected):
        inspect_adapter(folder, PLAN, filler=compiled_filler())


def test_values_whose_product_would_overflow_are_refused(tmp_path: Path) -> None:
    made = tensors()
    for half in "AB":
        made[tensor_name(4, "v_proj", half)][0, 0] = -1e12
    with pytest.raises(AdapterRejected, match="may reach"):
        read_adapter(folder_of(tmp_path, made), PLAN, aligned_bytes(1 << 20), filler=compiled_filler())


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tensors())

    def cut(copies: NDArray[np.void], image: Bytes, largest: NDArray[np.int64]) -> None:
        os.truncate(folder / TENSORS_NAME, (folder / TENSORS_NAME).stat().st_size // 2)
        compile_copies()(copies, image, largest)

    with pytest.raises(AdapterRejected, match=r"was cut short while tensor .* was being read"):
        read_adapter(folder, PLAN, aligned_bytes(1 << 20), filler=ImageFiller(cut, helpers=2))


def test_layers_of_a_slow_read_are_reported_when_all_before_them_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_filler, "_FIRST_ARRIVAL_S", 0.0)
    monkeypatch.setattr(image_filler, "_NEXT_ARRIVAL_S", 0.0)
    folder = folder_of(tmp_path, tensors())
    image, into = read(folder, PLAN), aligned_bytes(1 << 20)
    reported = list[int]()

    def arrived(partial: Any, layers: int) -> None:
        end = partial.spec.layer_ends[layers - 1]
        assert np.array_equal(into[:end], image.data[:end])
        reported.append(layers)

    read_adapter(folder, PLAN, into, filler=compiled_filler(), arrived=arrived)
    assert reported == sorted(set(reported))
    assert reported[-1] == LAYERS
