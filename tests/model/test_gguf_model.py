"""Models in GGUF files: parts, names, what is refused, and adapters' copies of their tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.errors import ModelLoadError
from caraserve.lora.base_names import Likeness, likeness, names_of_base
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.checkpoint import open_tensors
from caraserve.model.digest import model_digest
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.families import load_plan
from caraserve.model.gguf.files import card_of, names_in, open_model, plain_name
from caraserve.model.gguf_reader import GgufFile
from caraserve.model.plan import Attention
from tests.model.gguf_files import header, write_gguf

HIDDEN, HEADS, DIM, VOCAB, INNER = 64, 4, 16, 48, 96
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "Some Model 1B Instruct",
    "general.license": "mit",
    "general.base_model.0.name": "Other Model 1B",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
Tensors = dict[str, NDArray[Any]]


def tensors_of(layers: int = 2) -> Tensors:
    rng = np.random.default_rng(3)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(layers):
        own = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (HIDDEN, HIDDEN))
        own |= dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, HIDDEN)) | {"ffn_down": (HIDDEN, INNER)}
        own |= dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def model(path: Path, changed: dict[str, Any] | None = None, tensors: Tensors | None = None) -> Path:
    metadata = {key: value for key, value in (METADATA | (changed or {})).items() if value is not None}
    return write_gguf(path, metadata, tensors_of() if tensors is None else tensors)


def parts(folder: Path, count: int = 3, **changed: Any) -> list[Path]:
    """Writes a model in parts, of which only the first has the model's metadata."""
    names, tensors = list(tensors_of()), tensors_of()
    paths = []
    for part in range(count):
        own = {name: tensors[name] for name in names[part::count]}
        metadata = {**(METADATA if part == 0 else {}), "split.no": part, "split.count": count, **changed}
        paths.append(write_gguf(folder / f"m-{part + 1:05}-of-{count:05}.gguf", metadata, own))
    return paths


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load_plan(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_part_stands_for_the_whole_model(tmp_path: Path) -> None:
    whole = load_plan(model(tmp_path / "m.gguf"))
    for path in parts(tmp_path):
        assert load_plan(path) == whole
        assert plain_name(path) == "m"
        with open_tensors(path, whole.stored_names) as read:
            values, _ = read("model.layers.1.mlp.down_proj.weight", (HIDDEN, INNER))
        np.testing.assert_array_equal(values, tensors_of()["blk.1.ffn_down.weight"])


def test_missing_and_misnamed_parts_are_named(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    paths[1].rename(tmp_path / "other.gguf")
    assert "is one of 3 parts, and m-00002-of-00003.gguf is missing beside it" in refusal(paths[0])
    assert "says that it is part 1 of 3, counted from 0; its name must be as" in refusal(tmp_path / "other.gguf")
    paths[0].rename(paths[1])
    parts(tmp_path)[1].unlink()
    (tmp_path / "m-00001-of-00003.gguf").rename(paths[1])
    write_gguf(paths[0], {**METADATA, "split.no": 0, "split.count": 3}, {})
    assert "m-00002-of-00003.gguf says that it is part 0 of 3" in refusal(paths[2])


def test_rows_of_q_and_k_are_read_in_the_order_of_hugging_face(tmp_path: Path) -> None:
    """Neighbours i and i + 1 of a head in the file are i and i + DIM / 2 there; also of 16 bits, also by pieces."""
    stored = np.arange(HIDDEN * HIDDEN, dtype=np.float32).reshape(HIDDEN, HIDDEN).astype(np.float16)
    path = model(tmp_path / "m.gguf", tensors=tensors_of() | {"blk.0.attn_k.weight": stored})
    plan, name = load_plan(path), "model.layers.0.self_attn.k_proj.weight"
    wanted = stored.reshape(HEADS, DIM // 2, 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN).view(np.uint16)
    with open_tensors(path, plan.stored_names) as read:
        values, dtype = read(name, (HIDDEN, HIDDEN))
        np.testing.assert_array_equal(values, wanted)
        assert dtype is Dtype.F16
        found, piece = read.find(name, (HIDDEN, HIDDEN)), bytearray(1000)
        found.read_into(memoryview(piece), 333)
        assert bytes(piece) == wanted.tobytes()[333:1333]


def test_the_dtype_is_that_of_matrices_of_16_bits(tmp_path: Path) -> None:
    halves = {name: one.astype(np.float16) if one.ndim == 2 else one for name, one in tensors_of().items()}
    assert load_plan(model(tmp_path / "a.gguf", tensors=halves)).dtype == "float16"
    assert (
        load_plan(
            model(tmp_path / "b.gguf", tensors=halves | {"blk.0.ffn_up.weight": tensors_of()["blk.0.ffn_up.weight"]})
        ).dtype
        == "float32"
    )


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Tensors], object], str]] = {
    "another architecture": ({"general.architecture": "mamba"}, len, "architecture 'mamba' is not supported in GGUF"),
    "an adapter": ({"general.type": "adapter"}, len, "m.gguf is no model: it is an adapter; serve its base model with"),
    "the part for images": (
        {"general.type": "mmproj"},
        len,
        "m.gguf is no model: it has the part of a model that reads",
    ),
    "an older one": (
        {"general.architecture": "clip"},
        len,
        "m.gguf is no model: it has the part of a model that reads",
    ),
    "no architecture": (
        {"general.architecture": None},
        len,
        "architecture '' is not supported in GGUF files; supported",
    ),
    "an unknown key": ({"llama.attention.clamp": 8.0}, len, "llama.attention.clamp is 8.0; it is not known here"),
    "layers that differ": ({"llama.attention.head_count": [4, 2]}, len, "it differs from layer to layer"),
    "no causal attention": ({"llama.attention.causal": False}, len, "llama.attention.causal is False"),
    "a rotation": ({"llama.rope.scaling.type": "su"}, len, "llama.rope.scaling.type is 'su'; it is not supported"),
    "short values": ({"llama.attention.value_length": 8}, len, "must be as long as keys, 16"),
    "a size that is text": (
        {"llama.embedding_length": "64"},
        len,
        "llama.embedding_length is '64'; it must be a whole",
    ),
    "a head's size": ({"llama.attention.key_length": 20}, len, "m.gguf: head_dim 20 is not a multiple of 16"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, len, "layer_norm_rms_epsilon is missing"),
    "a missing tensor": ({}, lambda tensors: tensors.pop("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight is missing"),
    "an unknown tensor": (
        {},
        lambda tensors: tensors.update({"blk.0.attn_q_norm.weight": np.ones(4, np.float32)}),
        "tensor 'blk.0.attn_q_norm.weight' is not known in models of architecture llama",
    ),
    "a layer more than it says": (
        {},
        lambda tensors: tensors.update({"blk.2.attn_q.weight": np.ones((HIDDEN, HIDDEN), np.float32)}),
        "tensor 'blk.2.attn_q.weight' is not known in models of architecture llama",
    ),
    "pooling": ({"llama.pooling_type": 1}, len, "llama.pooling_type is 1; it is not served (mean)"),
}


def test_a_factor_of_positions_without_a_type_is_linear(tmp_path: Path) -> None:
    def rope(**changed: Any) -> Any:
        attention = load_plan(model(tmp_path / "m.gguf", changed)).layers[0].blocks[0].body
        assert isinstance(attention, Attention)
        return attention.rope

    plain, factor = rope(), {"llama.rope.scaling.factor": 4.0}
    assert rope(**factor) == rope(**factor, **{"llama.rope.scaling.type": "linear"}) != plain
    assert rope(**factor, **{"llama.rope.scaling.type": "none"}) == plain


@pytest.mark.parametrize("kind", REFUSED)
def test_what_could_change_answers_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    changed, change, why = REFUSED[kind]
    tensors = tensors_of()
    change(tensors)
    assert why in refusal(model(tmp_path / "m.gguf", changed, tensors))


def test_a_type_of_tensors_that_is_not_read_is_named(tmp_path: Path) -> None:
    listed = [
        (name, values.shape if values.ndim == 1 else (len(values), 256), 0 if values.ndim == 1 else 21, index << 15)
        for index, (name, values) in enumerate(tensors_of().items())
    ]
    (tmp_path / "m.gguf").write_bytes(header(METADATA, listed) + bytes(len(listed) << 15))
    assert "m.gguf: tensor blk.0.attn_q.weight: tensors of type IQ3_S are not read; F32" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["blk.1.ffn_norm.weight", "blk.0.attn_k.bias", "rope_freqs.weight"])
def test_blocks_are_not_read_for_tensors_of_one_axis(name: str, tmp_path: Path) -> None:
    """Converters leave them as numbers."""
    tensors = tensors_of()
    listed = [(one, values.shape, 0, index << 15) for index, (one, values) in enumerate(tensors.items()) if one != name]
    listed.append((name, (HIDDEN,), 8, len(tensors) << 15))
    path = tmp_path / "m.gguf"
    path.write_bytes(header(METADATA, listed) + bytes(len(tensors) + 1 << 15))
    assert refusal(path) == f"m.gguf: tensor {name} has type Q8_0; F32, F16 or BF16 is needed"


def test_a_wrong_shape_is_refused_when_it_is_read(tmp_path: Path) -> None:
    tensors = tensors_of() | {"blk.0.ffn_up.weight": np.zeros((INNER, HIDDEN + 1), np.float32)}
    path = model(tmp_path / "m.gguf", tensors=tensors)
    plan = load_plan(path)
    said = pytest.raises(ModelLoadError, match=r"blk.0.ffn_up.weight has shape \[96, 65\], the metadata ask \[96, 64\]")
    with said, open_tensors(path, plan.stored_names) as read:
        read("model.layers.0.mlp.up_proj.weight", (INNER, HIDDEN))


def test_copies_of_tensors_are_found_and_compared(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf")
    base = BaseTensors(path, load_plan(path))
    name = base.find("model.layers.0.self_attn.q_proj.weight")
    assert name == "blk.0.attn_q.weight"
    with open_tensors(path) as read:
        copy = to_float32(*read(name, (HIDDEN, HIDDEN)))
    assert list(base.changed_rows(name, lambda start, stop: copy[start:stop], Dtype.F32)) == []
    copy[5] += 1
    assert list(base.changed_rows(name, lambda start, stop: copy[start:stop], Dtype.F32)) == [5]
    assert base.find("lm_head.weight") == "token_embd.weight"
    assert base.find("model.layers.9.self_attn.q_proj.weight") is None


def test_instances_find_each_other_by_the_content_of_their_files(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf")
    digest = model_digest(path, "float32")
    assert digest == model_digest(path.rename(tmp_path / "n.gguf"), "float32")
    assert digest != model_digest(model(tmp_path / "m.gguf", {"llama.rope.freq_base": 5e5}), "float32")
    other = {name: values * np.float32(1.5) for name, values in tensors_of().items()}
    assert digest != model_digest(model(tmp_path / "m.gguf", tensors=other), "float32")


def test_adapters_are_of_the_base_model_that_the_file_names(tmp_path: Path) -> None:
    path = model(tmp_path / "Some-Model-1B-Instruct-Q4_K_M.gguf")
    found = open_model(path)
    served = names_of_base(names_in(found.metadata, path))
    for name in ("org/Some-Model-1B-Instruct", "org/Other-Model-1B"):
        assert likeness(name, served) is Likeness.SAME
    assert likeness("org/Third-Model", served) is Likeness.OTHER
    assert card_of(found) == {
        "architecture": "llama",
        "tensor_types": {"F32": 15},
        "name": "Some Model 1B Instruct",
        "license": "mit",
        "base_models": ["Other Model 1B"],
    }


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = model(tmp_path / "m.gguf")
    plan = load_plan(path)
    reader = open_tensors(path, plan.stored_names)
    model(path, {"general.name": "Another name"})
    with pytest.raises(ModelLoadError, match="was changed while it was being read"), reader as read:
        read(plan.embed, (VOCAB, HIDDEN))
    assert open_model(path).metadata["general.name"] == "Another name"


def test_texts_can_be_skipped(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"t.a": ["x", "yy"], "u": ["z"], "t.b": 3}, {})
    with GgufFile(path, skipped="t.") as file:
        assert file.metadata == {"t.a": [], "u": ["z"], "t.b": 3}
