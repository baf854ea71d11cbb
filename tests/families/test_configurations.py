"""Fields that a configuration lacks mean what the classes of transformers say; fields of older releases are read."""

from typing import Any

import pytest
import transformers

from caraserve.errors import ModelLoadError
from caraserve.model.families import plan_of
from caraserve.model.plan import DecoderPlan
from tests.families.cases import CASES, arguments_of

# Published files have these, and a plan without them would be a guess.
REQUIRED = {"architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads"}
REQUIRED |= {"intermediate_size", "vocab_size", "text_config", "n_embd", "n_layer", "n_head"}
# Of every class, and without effect on a decoder; but these.
GENERAL = set(transformers.PreTrainedConfig().to_dict()) - {"dtype", "tie_word_embeddings"}


def configuration_of(name: str) -> dict[str, Any]:
    case = CASES[name]
    made = getattr(transformers, f"{case.config}Config")(**arguments_of(case), architectures=[case.model])
    return dict(made.to_dict())


@pytest.mark.parametrize("name", CASES)
def test_an_absent_field_has_the_value_that_transformers_gives_it(name: str) -> None:
    fields, kind = configuration_of(name), getattr(transformers, f"{CASES[name].config}Config")
    has_images = "text_config" in fields
    inner = ["text_config"] if "text_config" in fields else []
    paths = [(key,) for key in fields] + [(*inner, key) for outer in inner for key in fields[outer]]
    for path in paths:
        if path[-1] in REQUIRED | GENERAL or "vision" in path[-1]:
            continue
        if path[-1] == "tie_word_embeddings" and has_images:
            continue  # releases of transformers differ; the tensors of the checkpoint decide
        without = _without(fields, path)
        try:
            completed = kind(**without).to_dict()  # `from_dict` would print it, a third of the time, for a log
        except Exception:  # transformers refuses what is left
            continue
        assert outcome(without) == outcome(completed), path


def outcome(fields: dict[str, Any]) -> DecoderPlan | str:
    """Returns the plan of a configuration, or why it is refused."""
    try:
        return plan_of(fields)
    except ModelLoadError as error:
        return str(error)


def _without(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Returns a copy without the field at `path`."""
    first, *rest = path
    if not rest:
        return {key: value for key, value in fields.items() if key != first}
    return fields | {first: _without(fields[first], tuple(rest))}
