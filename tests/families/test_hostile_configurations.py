"""A configuration that no model has ends as one ModelLoadError, whatever the types and sizes of its fields."""

import copy
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from caraserve.errors import ModelLoadError
from caraserve.model.families import plan_of, read_config
from tests.families.cases import CASES, arguments_of

ANY: list[Any] = [-1, True, "x", [], ["a"], [[1]], [None], {}, {"a": [1]}, float("nan"), float("inf"), 10**400, 1 << 40]
FIELDS: dict[str, list[Any]] = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim", "vocab_size"), ANY),
    **dict.fromkeys(("hidden_act", "layer_types", "rms_norm_eps", "tie_word_embeddings", "sliding_window"), ANY),
    **dict.fromkeys(("rope_scaling", "rope_theta", "rope_parameters", "partial_rotary_factor"), ANY),
    **dict.fromkeys(("num_experts_per_tok", "num_experts", "num_local_experts", "n_group", "architectures"), ANY),
    **dict.fromkeys(("quantization_config", "no_rope_layers", "layers_block_type", "text_config"), ANY),
}
KINDS = {
    "llama",
    "gemma 3",
    "gemma 3 with images",
    "qwen 3.5",
    "smollm 3",
    "granite 4",
    "exaone 4",
    "gpt-oss",
    "glm 4.5",
}


def configuration(name: str) -> dict[str, Any]:
    case = CASES[name]
    return copy.deepcopy({"architectures": [case.model], **arguments_of(case)})


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.timeout(60)
def test_fields_of_other_types_and_sizes_are_refused_or_have_no_effect(name: str) -> None:
    base = configuration(name)
    plan_of(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for field, values in FIELDS.items():
            for value in values:
                changed = copy.deepcopy(base)
                inner = (
                    changed.get("text_config", changed) if field not in ("text_config", "architectures") else changed
                )
                inner[field] = value
                with suppress(ModelLoadError):
                    plan_of(changed)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers without end": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be a positive integer up to"),
    "heads without end": ("llama", {"num_attention_heads": 1 << 22, "head_dim": 16}, "are more than"),
    "experts without end": ("mixtral", {"num_local_experts": 1 << 31}, "num_local_experts must be a positive integer"),
    "a negative epsilon": ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps must not be negative"),
    "an epsilon that is none": ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
    "a negative base": ("llama", {"rope_parameters": {"rope_theta": -5.0}}, "a rotation's frequency would be nan"),
    "a base of 0": ("llama", {"rope_parameters": {"rope_theta": 0.0}}, "a rotation's frequency would be inf"),
    "a text for layers": ("llama", {"rope_parameters": "yarn"}, "its fields are not those of LlamaForCausalLM"),
    "a list of functions": ("llama", {"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported"),
    "a name of an architecture": ("llama", {"architectures": "LlamaForCausalLM"}, "must be a list of names"),
    "no cap": ("gemma 2", {"attn_logit_softcapping": 0.0}, "one divided by a soft cap would be inf"),
    "no scale": ("gemma 2", {"query_pre_attn_scalar": 0}, "ZeroDivisionError"),
    "a negative scale": ("gemma 2", {"query_pre_attn_scalar": -4}, "the scale of attention would be"),
    "another kind of layers": ("gemma 3", {"layer_types": ["chunked"] * 4}, "layer_types has 'chunked"),
    "a scheme of another type": (
        "llama",
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": ["dynamic"]}},
        "quantization_config: activation_scheme ['dynamic'] is not read; dynamic or static is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_give_no_answers_or_wrong_ones_is_named(kind: str) -> None:
    name, fields, why = REFUSED[kind]
    with pytest.raises(ModelLoadError) as caught:
        plan_of(configuration(name) | fields)
    assert why in str(caught.value)


def test_a_deep_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ModelLoadError, match="is not valid JSON"):
        read_config(tmp_path)
