"""Loading of base weights by several threads."""

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.bench.synthetic import SHAPES, shape_plan
from caraserve.cpu.weights import LoadedModel, dummy_reader, load_model, progress_steps
from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Array, TensorReader

PLAN = shape_plan(SHAPES["10M"], 64)


def weights(loaded: LoadedModel) -> list[NDArray[np.uint8]]:
    """Returns the bytes of every site's panels."""
    sites = [site for site in loaded.sites.reshape(-1) if site["panels"]]
    sizes = [int(site["panels"]) * 64 * int(site["inputs"]) * loaded.dtype.itemsize for site in sites]
    places = [int(site["weight"]) for site in sites]
    return [np.frombuffer(ctypes.string_at(at, size), np.uint8).copy() for at, size in zip(places, sizes, strict=True)]


def test_threads_do_not_change_what_is_loaded() -> None:
    steps: list[None] = []
    read = dummy_reader(3, Dtype.F16)
    one = load_model(PLAN, Dtype.F16, 64, read, lambda: None)
    several = load_model(PLAN, Dtype.F16, 64, read, lambda: steps.append(None), threads=4)
    assert len(steps) == progress_steps(PLAN)
    for expected, found in zip(weights(one), weights(several), strict=True):
        assert np.array_equal(expected, found)


@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_of_one_layer_ends_loading(threads: int) -> None:
    rest = dummy_reader(3, Dtype.F16)

    class Broken:
        def __getattr__(self, name: str) -> object:
            return getattr(rest, name)

        def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[Array, Dtype]:
            if ".1.self_attn.q_proj" in name:
                raise ModelLoadError(f"tensor {name} is missing")
            return rest(name, shape)

    read: TensorReader = Broken()  # type: ignore[assignment]
    with pytest.raises(ModelLoadError, match=r"layers\.1\.self_attn\.q_proj\.weight is missing"):
        load_model(PLAN, Dtype.F16, 64, read, lambda: None, threads=threads)
