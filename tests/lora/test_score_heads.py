"""Score heads in adapters' files: what is read, what is refused, and what travels to other instances."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caraserve.core.score_head import ScoreHead
from caraserve.errors import AdapterRejected
from caraserve.lora.manifest import manifest_of, read_manifest
from caraserve.lora.peft import inspect_adapter
from caraserve.model.dtype import Dtype
from tests.lora.folders import SPEC, read, tensors_for, write_adapter

SEQ_CLS = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
TENSOR = "base_model.model.score.weight"
MATRIX = np.random.default_rng(1).standard_normal((3, SPEC.hidden), np.float32)


def classifier(folder: Path, changes: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """Writes an adapter with a score head, or with other tensors beside its A and B."""
    more = {f"base_model.model.{name.replace('__', '.')}": values for name, values in tensors.items()}
    return write_adapter(folder, SEQ_CLS | (changes or {}), tensors_for() | (more or {TENSOR: MATRIX}))


def test_a_head_is_read_with_its_numbers_and_the_classes_that_transformers_would_name(tmp_path: Path) -> None:
    spec = read(classifier(tmp_path), SPEC).spec
    assert spec.head == ScoreHead(("LABEL_0", "LABEL_1", "LABEL_2"), "softmax", Dtype.F32, MATRIX.tobytes())
    state = np.random.default_rng(2).standard_normal(SPEC.hidden, np.float32)
    np.testing.assert_allclose(spec.head.logits(state), MATRIX @ state, rtol=1e-5)
    assert spec.num_bytes == read(write_adapter(tmp_path / "plain"), SPEC).spec.num_bytes


@pytest.mark.parametrize(
    ("changes", "classes", "activation"),
    [
        ({"id2label": {"0": "a", "2": "c", "1": "b"}}, ("a", "b", "c"), "softmax"),
        ({"problem_type": "multi_label_classification"}, None, "sigmoid"),
        ({"problem_type": "regression", "num_labels": 3, "label2id": {}}, None, "none"),
        ({"task_type": None}, None, "softmax"),
    ],
)
def test_the_configuration_names_classes_and_activation(
    tmp_path: Path, changes: dict[str, Any], classes: tuple[str, ...] | None, activation: str
) -> None:
    found = inspect_adapter(classifier(tmp_path, changes), SPEC).head
    assert found is not None
    assert (found.classes, found.activation) == (classes or ("LABEL_0", "LABEL_1", "LABEL_2"), activation)


def test_names_may_be_lengthened_as_those_of_modules(tmp_path: Path) -> None:
    tensors = tensors_for() | {TENSOR: MATRIX}
    longer = {f"_orig_mod.{name}": values for name, values in tensors.items()}
    found = inspect_adapter(write_adapter(tmp_path / "longer", SEQ_CLS, longer), SPEC)
    assert found == inspect_adapter(write_adapter(tmp_path / "plain", SEQ_CLS, tensors), SPEC)


def test_one_class_has_a_sigmoid(tmp_path: Path) -> None:
    found = inspect_adapter(classifier(tmp_path, score__weight=MATRIX[:1]), SPEC).head
    assert found is not None
    assert (found.classes, found.activation) == (("LABEL_0",), "sigmoid")


NAN = np.full_like(MATRIX, np.nan)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "token classes": ({"task_type": "TOKEN_CLS"}, {}, "task_type is 'TOKEN_CLS'; adapters that generate"),
    "no head": ({}, {"score__original_module__weight": MATRIX}, "the head was not saved"),
    "generates": ({"task_type": "CAUSAL_LM"}, {}, "task_type is 'CAUSAL_LM'"),
    "other modules": ({"modules_to_save": ["score", "lm_head"]}, {}, "modules_to_save has 'lm_head'"),
    "bias": ({}, {"score__weight": MATRIX, "score__bias": MATRIX[:, 0]}, "score.bias"),
    "twice": ({}, {"score__weight": MATRIX, "score__modules_to_save__weight": MATRIX}, "are the same head's"),
    "hidden": ({}, {"score__weight": MATRIX[:, :-1].copy()}, "has shape [3, 63]"),
    "vector": ({}, {"score__weight": MATRIX[0]}, "has shape [64]"),
    "classes": ({}, {"score__weight": np.zeros((1025, 64), np.float32)}, "up to 1024"),
    "names": ({"id2label": {"0": "a"}}, {}, "names 1 classes, and base_model.model.score.weight has 3"),
    "name gap": ({"id2label": {"0": "a", "2": "b", "3": "c"}}, {}, "id2label is"),
    "no names": ({"id2label": ["a", "b", "c"]}, {}, "id2label is"),
    "long name": ({"id2label": {"0": "a", "1": "b", "2": "c" * 257}}, {}, "id2label has"),
    "name of no text": ({"id2label": {"0": "a", "1": "b", "2": "\ud800"}}, {}, "id2label has '\\ud800'"),
    "problem": ({"problem_type": "guess"}, {}, "problem_type is 'guess'"),
    "problem of another type": ({"problem_type": ["regression"]}, {}, "problem_type is ['regression']"),
    "not finite": ({}, {"score__weight": NAN}, "score.weight has values that are not finite"),
    "overflow": ({}, {"score__weight": MATRIX * np.float32(1e37)}, "with weights above 1e+15 scores overflow"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_head_that_cannot_be_applied_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    changes, tensors, reason = REFUSED[kind]
    with pytest.raises(AdapterRejected) as refused:
        inspect_adapter(classifier(tmp_path, changes, **tensors), SPEC)
    assert reason in refused.value.message


def test_a_head_is_a_part_of_the_manifest_and_of_the_version(tmp_path: Path) -> None:
    spec = inspect_adapter(classifier(tmp_path / "a", {"id2label": {"0": "a", "1": "b", "2": "ü"}}), SPEC)
    assert read_manifest(manifest_of(spec), spec.digest, SPEC) == spec
    others = [
        classifier(tmp_path / "b"),
        classifier(tmp_path / "c", score__weight=-MATRIX),
        write_adapter(tmp_path / "d"),
    ]
    assert len({spec.digest, *(inspect_adapter(other, SPEC).digest for other in others)}) == 4


@pytest.mark.parametrize(
    "head",
    [
        [],
        [["a"], "softmax", Dtype.F32.value, ""],
        [["a"], "softmax", Dtype.F32.value, "?"],
        [["a"], "exp", Dtype.F32.value, base64.b64encode(bytes(4 * SPEC.hidden)).decode()],
        [[7], "softmax", Dtype.F32.value, base64.b64encode(bytes(4 * SPEC.hidden)).decode()],
        [["a", "b"], "softmax", Dtype.F32.value, base64.b64encode(bytes(4 * SPEC.hidden)).decode()],
        [["a", "b", "c"], "softmax", Dtype.F32.value, base64.b64encode(NAN.tobytes()).decode()],
        [["a", "b", "\ud800"], "softmax", Dtype.F32.value, base64.b64encode(MATRIX.tobytes()).decode()],
        [["a", "b", "c"], "softmax", Dtype.F32.value, base64.b64encode((MATRIX * np.float32(1e37)).tobytes()).decode()],
        7,
    ],
)
def test_a_manifest_with_a_wrong_head_is_refused(tmp_path: Path, head: Any) -> None:
    plain = inspect_adapter(write_adapter(tmp_path), SPEC)
    body = json.dumps([*json.loads(manifest_of(plain)), {"head": head}]).encode()
    with pytest.raises(AdapterRejected, match="is not for this base model or this version"):
        read_manifest(body, hashlib.sha256(body).hexdigest(), SPEC)
