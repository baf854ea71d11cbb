"""Reads the score heads of adapters that classify texts (task_type SEQ_CLS), as peft saves them: `score.weight`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from caraserve.core.score_head import (
    MAX_CLASS_CHARACTERS,
    MAX_CLASSES,
    MAX_HEAD_BYTES,
    Activation,
    ScoreHead,
)
from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import AdapterTensors
from caraserve.lora.peft_fields import Fields, refusal, shown
from caraserve.lora.tensor_names import normalised
from caraserve.model.plan import DecoderPlan
from caraserve.util.text import is_text

# Fields of the configuration, which peft does not write.
HEAD_FIELDS = frozenset(("id2label", "label2id", "num_labels", "problem_type"))
HEADS = ("score", "classifier")  # what peft lists in modules_to_save for SEQ_CLS; a decoder's head is `score`
_SERVED = "adapters that generate, embed (FEATURE_EXTRACTION) or classify texts (SEQ_CLS) are served"
_OTHER_TASKS = ("TOKEN_CLS", "QUESTION_ANS")
_ACTIVATIONS: dict[str, Activation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
# As saved, and as in a raw dump of the model, in which the untrained head is beside it.
_TENSOR = re.compile(r"score\.(?:modules_to_save\.(?:[A-Za-z0-9_-]+\.)?)?weight")
_UNTRAINED = "score.original_module.weight"


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What a configuration says about a score head. `classes`: their names; None: not said."""

    task: str | None = None
    classes: tuple[str, ...] | None = None
    activation: Activation | None = None


def read_settings(fields: Fields) -> HeadSettings:
    """Reads a configuration's fields. Raises AdapterRejected."""
    task = fields.get("task_type")
    if task in _OTHER_TASKS:
        raise refusal("task_type", f"is {shown(task)}; {_SERVED}")
    problem = fields.get("problem_type")
    if problem is not None and (not isinstance(problem, str) or problem not in _ACTIVATIONS):
        raise refusal("problem_type", f"is {shown(problem)}; it is one of {', '.join(_ACTIVATIONS)}")
    return HeadSettings(
        task if isinstance(task, str) else None,
        _class_names(fields.get("id2label")),
        None if problem is None else _ACTIVATIONS[problem],
    )


def _class_names(id2label: object) -> tuple[str, ...] | None:
    if id2label is None:
        return None
    names = id2label if isinstance(id2label, dict) else {}
    keys = [str(at) for at in range(len(names))]
    if not names or set(names) != set(keys):
        raise refusal("id2label", f"is {shown(id2label)}; it must name the classes 0, 1 and so on")
    for name in names.values():
        if not isinstance(name, str) or len(name) > MAX_CLASS_CHARACTERS or not is_text(name):
            raise refusal("id2label", f"has {shown(name)}; a name has up to {MAX_CLASS_CHARACTERS} characters")
    return tuple(names[key] for key in keys)


def is_of_head(name: str) -> bool:
    """Returns whether a normalised name is that of a score head's tensor, trained or not."""
    return _TENSOR.fullmatch(name) is not None or name == _UNTRAINED


def head_tensor(names: Sequence[str], settings: HeadSettings) -> str | None:
    """Returns the tensor of the trained head among those of score heads, or None. Raises AdapterRejected if it does not
    go with the task."""
    found = [name for name in names if _TENSOR.fullmatch(normalised(name))]
    if len(found) > 1:
        raise AdapterRejected(f"tensors {found[0]} and {found[1]} are the same head's")
    if settings.task == "SEQ_CLS" and not found:
        raise refusal("task_type", "is 'SEQ_CLS', but there is no tensor score.weight: the head was not saved")
    if found and settings.task not in ("SEQ_CLS", None):
        raise AdapterRejected(f"tensor {found[0]} is a score head, and task_type is {shown(settings.task)}")
    return found[0] if found else None


def head_layout(file: AdapterTensors, tensor: str, settings: HeadSettings, plan: DecoderPlan) -> ScoreHead:
    """Returns a head without its numbers. Raises AdapterRejected."""
    shape, dtype = file.shape(tensor), file.dtype(tensor)
    if len(shape) != 2 or shape[1] != plan.hidden or not 1 <= shape[0] <= MAX_CLASSES:
        raise AdapterRejected(
            f"tensor {tensor} has shape {list(shape)}; the base needs [classes, {plan.hidden}] with up to {MAX_CLASSES}"
        )
    if (size := shape[0] * shape[1] * dtype.itemsize) > MAX_HEAD_BYTES:
        raise AdapterRejected(f"tensor {tensor} has {size} bytes; {MAX_HEAD_BYTES} are allowed")
    classes = settings.classes or tuple(f"LABEL_{at}" for at in range(shape[0]))  # as transformers names them
    if len(classes) != shape[0]:
        raise refusal("id2label", f"names {len(classes)} classes, and {tensor} has {shape[0]}")
    return ScoreHead(classes, settings.activation or ("softmax" if shape[0] > 1 else "sigmoid"), dtype)
