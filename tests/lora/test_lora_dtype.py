"""--lora-dtype: images in another dtype than the adapters' files."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from caraserve.core.lora_layout import aligned_bytes
from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.catalog import Catalog
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.lora.registry import Registry
from caraserve.model.dtype import Dtype, rounded, to_float32
from tests.lora.folders import SPEC, matrices, read, tensor_name, tensors_for, write_adapter
from tests.lora.test_catalog import catalog

SIXTEEN_BITS = pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F16])


@SIXTEEN_BITS
def test_an_adapter_in_fp32_is_kept_as_if_its_file_had_the_dtype_asked_for(tmp_path: Path, dtype: Dtype) -> None:
    tensors = tensors_for()
    values = {name: to_float32(rounded(value, dtype), dtype) for name, value in tensors.items()}
    exact, asked = write_adapter(tmp_path / "exact", tensors=values), write_adapter(tmp_path / "asked", tensors=tensors)
    spec = inspect_adapter(asked, SPEC, dtype=dtype)
    image = read_adapter(asked, SPEC, aligned_bytes(spec.num_bytes), dtype=dtype)
    assert (image.spec, spec.dtype) == (spec, dtype)
    expecting = read(exact, SPEC)
    for span, other in zip(spec.spans, expecting.spec.spans, strict=True):
        for found, expected in zip(matrices(image, span, SPEC), matrices(expecting, other, SPEC), strict=True):
            np.testing.assert_array_equal(found, expected)
    whole = inspect_adapter(asked, SPEC)
    assert (whole.dtype, whole.num_bytes) == (Dtype.F32, 2 * spec.num_bytes)
    assert whole.digest != spec.digest  # so no instance takes one for the other
    if dtype is Dtype.F16:
        halves = {name: value.astype(np.float16) for name, value in tensors.items()}
        assert inspect_adapter(write_adapter(tmp_path / "halves", tensors=halves), SPEC) == spec


def test_a_matrix_that_is_computed_is_rounded_once_it_is_complete(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shared = {"base_model.vera_A": rng.standard_normal((4, 64), np.float32)}
    shared["base_model.vera_B"] = rng.standard_normal((64, 4), np.float32)
    for layer in (0, 1):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj.vera_lambda_"
        shared |= {prefix + "b": rng.standard_normal(64, np.float32), prefix + "d": rng.standard_normal(4, np.float32)}
    fields = {"peft_type": "VERA", "r": 4, "d_initial": 0.1, "projection_prng_key": 0, "save_projection": True}
    folder = write_adapter(tmp_path, fields, shared)
    config = json.loads((folder / "adapter_config.json").read_text())
    del config["lora_alpha"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    whole, spec = read(folder, SPEC), inspect_adapter(folder, SPEC, dtype=Dtype.BF16)
    image = read_adapter(folder, SPEC, aligned_bytes(spec.num_bytes), dtype=Dtype.BF16)
    for span, exact in zip(spec.spans, whole.spec.spans, strict=True):
        for found, values in zip(matrices(image, span, SPEC), matrices(whole, exact, SPEC), strict=True):
            np.testing.assert_array_equal(found, to_float32(rounded(values, Dtype.BF16), Dtype.BF16))


def test_an_adapter_beyond_the_range_of_the_dtype_is_refused(tmp_path: Path) -> None:
    tensors = tensors_for()
    tensors[tensor_name(1, "q_proj", "A")][0, 0] = 70000.0
    folder = write_adapter(tmp_path, tensors=tensors)
    with pytest.raises(AdapterRejected, match=r"q_proj.lora_A.weight has values up to 7e\+04, beyond .*float16"):
        inspect_adapter(folder, SPEC, dtype=Dtype.F16)
    assert inspect_adapter(folder, SPEC, dtype=Dtype.BF16).dtype is Dtype.BF16


def test_a_registry_of_another_dtype_has_its_adapters_read_again(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapters" / "good")

    @contextmanager
    def started(dtype: Dtype | None) -> Iterator[Catalog]:
        reader = AdapterReader(SPEC, lambda call: call(), None, dtype)
        with closing(reader), closing(Registry(tmp_path / "registry.db")) as registry:
            made = catalog(registry, reader, folder.parent)
            assert made.add_at_start([("good", folder)], lambda: None, found=["good"]) == []
            yield made

    for dtype in (None, Dtype.BF16, Dtype.BF16, None):
        with started(dtype) as made:
            assert made.all()[0].digest == inspect_adapter(folder, SPEC, dtype=dtype).digest
